"""SM shares: the law, measured tables in its place, and a latency model on a part of the SMs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confsim.errors import InputError
from confsim.latency.affine import AffineLatency
from confsim.latency.base import LatencyModel
from confsim.latency.config import FittedLatency
from confsim.latency.share import ALL_SMS, FAMILIES, PartitionLatency, SmShares, Speeds
from confsim.specs import GpuSpec, ModelSpec

A100 = GpuSpec("a100_sxm", 85899345920, 2.039e12, 3.12e14, 3.0e11, 108)
H100 = GpuSpec("h100_sxm", 85520809984, 3.35e12, 9.89e14, 4.5e11, 132)
QWEN3_14B = ModelSpec("qwen3_14b", 5120, 40, 40, 8, 128, 17408, 151936, qk_norm=True)
TABLE = {
    "kind": "sm_shares",
    "format": 1,
    "gpu": "h100_sxm",
    "sms": [44, 88, 132],
    "bandwidth": [0.6, 0.9, 1.0],
    "decode_attention": [0.5, 0.8, 1.0],
}


@pytest.fixture(scope="module")
def tp4() -> LatencyModel:
    """Qwen3-14B on a TP group of four H100."""
    return FittedLatency().compile(QWEN3_14B, H100, 4, 1)


def write(folder: Path, **changes: Any) -> str:
    path = folder / "shares.json"
    path.write_text(json.dumps({**TABLE, **changes}))
    return str(path)


@pytest.mark.parametrize(("sms", "measured"), [(24, 0.64), (56, 0.92), (88, 0.986)])
def test_bandwidth_law_passes_through_the_public_a100_points(sms: int, measured: float) -> None:
    assert SmShares().speeds(A100, sms).bandwidth == pytest.approx(measured, abs=0.01)


@pytest.mark.parametrize(("sms", "measured"), [(32, 0.59), (64, 0.86)])
def test_bandwidth_law_passes_through_the_public_h100_copy_at_its_own_scale(sms: int, measured: float) -> None:
    assert SmShares(bandwidth_scale=0.27).speeds(H100, sms).bandwidth == pytest.approx(measured, abs=0.02)


def test_law_at_half_the_gpu_and_at_all_of_it() -> None:
    half = SmShares().speeds(H100, 66)
    assert half.compute == half.prefill_attention == 0.5
    assert half.bandwidth == pytest.approx(0.9066, abs=1e-4)
    assert half.decode_attention == pytest.approx(0.9731, abs=1e-4)  # about 1 - 0.1 ** (0.5 / 0.32)
    assert half.collective == 1.0
    assert SmShares().speeds(H100, 12).collective == 0.5
    assert SmShares().speeds(H100, 132) == ALL_SMS


def test_tma_kernels_reach_90_percent_on_their_share() -> None:
    gpu = GpuSpec("hundred", 8 * 10**10, 3e12, 1e15, 4.5e11, 100)
    assert SmShares().speeds(gpu, 32, "tma").decode_attention == pytest.approx(0.9, rel=1e-9)
    assert SmShares(tma_share=0.5).speeds(gpu, 50, "tma").decode_attention == pytest.approx(0.9, rel=1e-9)
    assert SmShares(tma_share=0.89).speeds(gpu, 89, "tma").decode_attention == pytest.approx(0.9, rel=1e-3)
    assert SmShares(tma_share=0.5).decode_share(gpu, "tma") == 0.5


@pytest.mark.parametrize(("sms", "speed"), [(24, 0.23), (56, 0.53), (88, 0.77), (108, 1.0), (40, 0.38), (12, 0.115)])
def test_linear_kernels_pass_through_the_public_a100_fits(sms: int, speed: float) -> None:
    assert SmShares().speeds(A100, sms, "linear").decode_attention == pytest.approx(speed)


def test_a_named_family_is_that_of_every_scheme_and_weights_keep_their_law() -> None:
    for own in FAMILIES:
        forced = SmShares(kernels="linear").speeds(H100, 44, own)
        assert forced.decode_attention == SmShares().speeds(H100, 44, "linear").decode_attention < 0.35
        assert forced.bandwidth == SmShares().speeds(H100, 44, own).bandwidth > 0.75
    # 90% lie at 0.13 / 0.23 of the way from 88 to 108 of 108 SMs
    assert SmShares().decode_share(H100, "linear") == pytest.approx((88 + 20 * 0.13 / 0.23) / 108)


def test_the_static_split_follows_the_family() -> None:
    """g_p of Conflux: prefill attention computes on what the smallest share with 90% of the bandwidth leaves."""
    tma, linear = (FittedLatency(shares=SmShares(kernels=name)).compile(QWEN3_14B, H100, 1, 4) for name in FAMILIES)
    assert tma.prefill_slowdown == pytest.approx(1 / 0.68)
    assert linear.prefill_slowdown == pytest.approx(1 / (1 - (88 + 20 * 0.13 / 0.23) / 108))
    assert tma.decode_slowdown == linear.decode_slowdown == pytest.approx(1 / 0.9)


def test_the_law_of_tma_kernels_follows_the_static_share() -> None:
    assert FittedLatency(decode_sm_share=0.5).shares.speeds(H100, 66, "tma").decode_attention == pytest.approx(0.9)
    given = FittedLatency(decode_sm_share=0.5, shares=SmShares(tma_share=0.25)).shares
    assert given.speeds(H100, 33, "tma").decode_attention == pytest.approx(0.9)


@given(st.integers(1, 131), st.integers(1, 131), st.sampled_from(FAMILIES))
def test_speeds_rise_with_the_sms(a: int, b: int, kernels: str) -> None:
    low, high = sorted((a, b))
    pairs = zip(SmShares().speeds(H100, low, kernels), SmShares().speeds(H100, high, kernels), strict=True)
    assert all(0.0 < slow <= fast <= 1.0 for slow, fast in pairs)


def test_partition_of_an_affine_law_by_hand() -> None:
    law = AffineLatency(
        linear_base_s=0.010, linear_token_s=40e-6, decode_base_s=0.001, decode_token_s=1e-6, prefill_pair_s=1e-9,
        head_base_s=0.0005, head_token_s=2e-6,
    )  # fmt: skip
    part = PartitionLatency(law, Speeds(0.25, 0.5, 0.2, 0.4, 1.0))
    assert part.linear_s(1) == pytest.approx(0.01004 / 0.5)
    assert part.linear_s(1001) == pytest.approx(0.01004 / 0.5 + 0.040 / 0.25)
    assert part.head_s(11) == pytest.approx(0.000502 / 0.5 + 20e-6 / 0.25)
    assert part.decode_attention_s(3, 5000) == pytest.approx(0.006 / 0.4)
    assert part.prefill_attention_s(1000, 500) == pytest.approx(0.001 / 0.2)
    assert part.linear_s(0) == part.head_s(0) == part.decode_attention_s(0, 0) == part.prefill_attention_s(0, 0) == 0.0


def test_all_sms_are_the_latency_model_itself(tp4: LatencyModel) -> None:
    part = PartitionLatency(tp4, ALL_SMS)
    for tokens in (1, 7, 64, 300, 1000, 2048, 5000, 8192, 20000):
        assert part.linear_s(tokens) == pytest.approx(tp4.linear_s(tokens), rel=1e-9)
        assert part.head_s(tokens) == pytest.approx(tp4.head_s(tokens), rel=1e-9)


def test_many_tokens_are_bound_by_arithmetic_and_links_do_not_slow_down(tp4: LatencyModel) -> None:
    part = PartitionLatency(tp4, SmShares().speeds(H100, 66))
    collective_s = tp4.collective_s(8192)
    assert collective_s > 0.0
    local_s = part.linear_s(8192) - collective_s
    assert local_s / (tp4.linear_s(8192) - collective_s) == pytest.approx(2.0, rel=0.08)


def test_few_tokens_are_bound_by_bandwidth(tp4: LatencyModel) -> None:
    speeds = SmShares().speeds(H100, 66)
    part = PartitionLatency(tp4, speeds)
    local_s = tp4.linear_s(1) - tp4.collective_s(1)
    assert part.linear_s(1) == pytest.approx(local_s / speeds.bandwidth + tp4.collective_s(1))


@settings(max_examples=60)
@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(8, 132), st.integers(8, 132))
def test_times_rise_with_tokens_and_fall_with_sms(
    tp4: LatencyModel, tokens: int, more: int, sms: int, other: int
) -> None:
    few, many = sorted((sms, other))
    part, larger = (PartitionLatency(tp4, SmShares().speeds(H100, count)) for count in (few, many))
    short, long = sorted((tokens, more))
    for name in ("linear_s", "head_s"):
        assert getattr(part, name)(short) <= getattr(part, name)(long) * (1 + 1e-12)
        assert getattr(larger, name)(short) <= getattr(part, name)(short) * (1 + 1e-12)


def test_table_replaces_what_it_measures(tmp_path: Path) -> None:
    shares = SmShares(table=write(tmp_path))
    speeds = shares.speeds(H100, 66)
    assert speeds.bandwidth == pytest.approx(0.75)
    assert speeds.decode_attention == pytest.approx(0.65)
    assert speeds.compute == 0.5  # not measured: the law
    assert shares.speeds(H100, 22).bandwidth == pytest.approx(0.3)  # a line from nothing at no SM
    assert shares.speeds(H100, 132) == ALL_SMS
    # 90% of decode's bandwidth half-way between 88 SMs, with 80%, and all
    assert shares.decode_share(H100) == pytest.approx(110 / 132)
    slowed = FittedLatency(shares=shares).compile(QWEN3_14B, H100, 1, 4)
    assert slowed.prefill_slowdown == pytest.approx(132 / 22)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "x"}, "kind"),
        ({"format": 2}, "format"),
        ({"bandwidth": [0.6, 1.0]}, "one speed for each"),
        ({"bandwidth": [0.6, 0.5, 1.0]}, "ascend"),
        ({"bandwidth": [0.6, 0.9, 0.99]}, "ascend to 1"),
        ({"bandwidth": [0.0, 0.9, 1.0]}, "at least"),
        ({"bandwidth": [0.6, "a", 1.0]}, "not a list of numbers"),
        ({"bandwidth": [0.6, float("nan"), 1.0]}, "not a list of numbers"),
        ({"sms": [44, 44, 132]}, "ascend"),
        ({"gpu": "h200_sxm"}, "not h100_sxm"),
        ({"sms": [44, 88, 114]}, "with 114 SMs"),
    ],
)
def test_table_mistakes_are_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(InputError, match=says) as caught:
        SmShares(table=path).speeds(H100, 66)
    assert path in str(caught.value)


def test_missing_table_and_wrong_parameters() -> None:
    with pytest.raises(InputError, match=r"latency\.shares\.table"):
        SmShares(table="/nope/shares.json").speeds(H100, 66)
    with pytest.raises(InputError, match="bandwidth_scale"):
        SmShares(bandwidth_scale=0.0)
    with pytest.raises(InputError, match="collective_sms"):
        SmShares(collective_sms=0)
    with pytest.raises(InputError, match="auto or one of tma, linear"):
        SmShares(kernels="fa3")
    with pytest.raises(InputError, match="tma_share"):
        SmShares(tma_share=0.9)
    with pytest.raises(InputError, match="132"):
        SmShares().speeds(H100, 133)
