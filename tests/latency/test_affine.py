"""The closed-form law by hand, and S11: a mixed iteration put together from its terms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from confsim.errors import InputError
from confsim.latency.affine import AffineLatency, AffineLatencyConfig
from confsim.latency.compiled import CompiledLatency
from confsim.latency.profile import Profile
from confsim.specs import GpuSpec, ModelSpec


def test_every_term_by_hand() -> None:
    law = AffineLatency(
        tp=1,
        sp=4,
        linear_base_s=1.0,
        linear_token_s=0.1,
        decode_base_s=2.0,
        decode_sequence_s=0.5,
        decode_token_s=0.01,
        prefill_base_s=3.0,
        prefill_pair_s=4.0,
        all_to_all_base_s=5.0,
        all_to_all_token_s=0.2,
        head_base_s=6.0,
        head_token_s=0.3,
        iteration_overhead_s=7.0,
        sequence_overhead_s=0.4,
        transfer_base_s=8.0,
        transfer_token_s=0.5,
    )
    assert law.linear_s(10) == pytest.approx(2.0)
    assert law.decode_attention_s(2, 100) == pytest.approx(4.0)
    assert law.decode_attention_line(2, 100) == (pytest.approx(4.0), 0.01, math.inf)
    assert law.prefill_attention_s(10, 5) == pytest.approx(3.0 + 4.0 * 10 * (5 + 5) / 4)
    assert law.all_to_all_s(10) == pytest.approx(7.0)
    assert law.head_s(10) == pytest.approx(9.0)
    assert law.overhead_s(10) == pytest.approx(11.0)
    assert law.kv_transfer_s(10) == pytest.approx(13.0)
    assert law.extrapolations == 0
    alone = AffineLatency(all_to_all_base_s=1.0, transfer_base_s=1.0)
    assert alone.all_to_all_s(10) == alone.kv_transfer_s(10) == 0.0
    zero = AffineLatency(linear_base_s=1.0, head_base_s=1.0, prefill_base_s=1.0, decode_base_s=1.0)
    assert zero.linear_s(0) == zero.head_s(0) == zero.prefill_attention_s(0, 9) == zero.decode_attention_s(0, 0) == 0.0


def test_config_compiles_and_checks(model: ModelSpec, gpu: GpuSpec) -> None:
    law = AffineLatencyConfig(linear_base_s=0.5).compile(model, gpu, 1, 4)
    assert (law.sp, law.linear_s(1)) == (4, pytest.approx(0.5 + 40e-6))
    assert (
        AffineLatencyConfig().describe(model, gpu)["profile_hash"]
        != AffineLatencyConfig(linear_base_s=0.5).describe(model, gpu)["profile_hash"]
    )
    with pytest.raises(InputError, match="cannot be split over 3 ranks"):
        AffineLatencyConfig().compile(model, gpu, 3, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_s13_coefficients_that_cannot_be(value: float) -> None:
    with pytest.raises(InputError, match=r"latency\.decode_token_s"):
        AffineLatencyConfig(decode_token_s=value)
    with pytest.raises(InputError, match=r"latency\.prefill_slowdown"):
        replace(AffineLatencyConfig(), prefill_slowdown=0.5)


def test_s11_a_mixed_iteration_costs_its_stacked_tokens(spread: CompiledLatency) -> None:
    """Prompts of 4,080 beside 4 decodes: the decodes ride on the read of the weights instead of paying it again.

    At 1,024 stacked tokens: with more, the GEMMs step up by 17%.
    """
    shard, decodes, context = 4080 // 4, 4, 4 * 8192
    mixed = (
        spread.linear_s(shard + decodes)
        + max(
            spread.all_to_all_s(shard) + spread.prefill_slowdown * spread.prefill_attention_s(4080, 0),
            spread.decode_slowdown * spread.decode_attention_s(decodes, context),
        )
        + spread.head_s(decodes + 1)
    )
    prefill = spread.linear_s(shard) + spread.all_to_all_s(shard) + spread.prefill_attention_s(4080, 0)
    decode = spread.linear_s(decodes) + spread.decode_attention_s(decodes, context)
    assert max(prefill, decode) < mixed < prefill + decode + spread.head_s(1) + spread.head_s(decodes)
    assert spread.linear_s(shard + decodes) - spread.linear_s(shard) < 0.05 * spread.linear_s(decodes)


def test_s11_errors_are_told_by_batch_kind(profile: Profile) -> None:
    errors = profile.errors["gemm"]
    rows = [errors[kind]["rows"] for kind in ("decode_batches", "mixed_batches", "prefill_batches")]
    assert sum(rows) == errors["held_out"]["rows"] and min(rows) > 1000
    assert all(errors[kind]["mean_pct"] < 7.0 for kind in ("decode_batches", "mixed_batches", "prefill_batches"))
