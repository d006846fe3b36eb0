"""The protocol that schemes rely on: monotone, finite, continuous, nothing for no work; and pinned predictions."""

from __future__ import annotations

import math
import typing
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confsim.errors import InputError
from confsim.latency.affine import AffineLatency
from confsim.latency.base import LatencyModel
from confsim.latency.compiled import CompiledLatency
from confsim.latency.config import FittedLatency
from confsim.latency.profile import Profile
from confsim.schemes.cost import in_turn, overlapped
from confsim.specs import GpuSpec, ModelSpec

TOKENS = st.integers(1, 200_000)
SEQUENCES = st.integers(1, 4096)
CONTEXT = st.integers(0, 4_000_000)


def test_protocol_members_exist(compiled: CompiledLatency) -> None:
    for model in (compiled, AffineLatency()):
        for name in {**typing.get_type_hints(LatencyModel), **vars(LatencyModel)}:
            if not name.startswith("_"):
                assert hasattr(model, name), name


def test_no_work_takes_no_time(compiled: CompiledLatency) -> None:
    assert compiled.linear_s(0) == 0.0
    assert compiled.decode_attention_s(0, 0) == 0.0
    assert compiled.prefill_attention_s(0, 10_000) == 0.0
    assert compiled.all_to_all_s(0) == 0.0
    assert compiled.head_s(0) == 0.0
    assert compiled.overhead_s(0) == 0.0
    assert compiled.kv_transfer_s(0) == 0.0
    assert compiled.decode_attention_line(0, 0) == (0.0, 0.0, math.inf)


@settings(max_examples=300, deadline=None)
@given(low=TOKENS, more=TOKENS, cached=CONTEXT)
def test_terms_rise_with_tokens(spread: CompiledLatency, low: int, more: int, cached: int) -> None:
    model = spread
    high = low + more
    for term in (model.linear_s, model.all_to_all_s, model.head_s, model.overhead_s, model.kv_transfer_s):
        assert 0.0 < term(low) <= term(high) < math.inf, term.__name__
    assert 0.0 < model.prefill_attention_s(low, cached) <= model.prefill_attention_s(high, cached) < math.inf
    assert model.prefill_attention_s(low, cached) <= model.prefill_attention_s(low, cached + more)


@settings(max_examples=300, deadline=None)
@given(sequences=SEQUENCES, context=CONTEXT, more=CONTEXT)
def test_decode_rises_with_context(spread: CompiledLatency, sequences: int, context: int, more: int) -> None:
    model = spread
    low, high = model.decode_attention_s(sequences, context), model.decode_attention_s(sequences, context + more)
    assert 0.0 < low <= high * (1 + 1e-12) < math.inf


@settings(max_examples=300, deadline=None)
@given(sequences=SEQUENCES, more=SEQUENCES, each=st.integers(1, 100_000))
def test_decode_rises_with_sequences_of_one_length(
    spread: CompiledLatency, sequences: int, more: int, each: int
) -> None:
    model = spread
    low = model.decode_attention_s(sequences, sequences * each)
    high = model.decode_attention_s(sequences + more, (sequences + more) * each)
    assert low <= high * (1 + 1e-12)


@settings(max_examples=300, deadline=None)
@given(sequences=SEQUENCES, context=CONTEXT, ahead=st.floats(0.0, 1.0))
def test_decode_line_is_exact_until_it_ends(
    spread: CompiledLatency, sequences: int, context: int, ahead: float
) -> None:
    model = spread
    value, slope, until = model.decode_attention_line(sequences, context)
    assert value == pytest.approx(model.decode_attention_s(sequences, context), rel=1e-12)
    assert until >= context
    end = min(until, context + 1_000_000)
    at = context + int(ahead * (end - context))
    assert value + slope * (at - context) == pytest.approx(model.decode_attention_s(sequences, at), rel=1e-9)
    if until < math.inf:
        assert value + slope * (until - context) == pytest.approx(
            model.decode_attention_s(sequences, int(until)), rel=1e-9
        )


def test_tables_jump_only_where_kernels_were_measured_to(compiled: CompiledLatency) -> None:
    """GEMMs after full tiles, where one row more was measured too; nothing else, and nothing beyond 4,352 rows."""
    tiles = {8, 14, *range(16, 129, 16), 160, 192, 224, *range(256, 4353, 256)}
    for term, step in ((compiled.linear_s, 200e-6), (compiled.head_s, 50e-6), (compiled.all_to_all_s, 100e-6)):
        values = [term(tokens) for tokens in range(1, 40_000)]
        jumps = {tokens for tokens, (a, b) in enumerate(pairwise(values), 1) if b - a >= step}
        assert jumps <= (tiles if term != compiled.all_to_all_s else set()), (term.__name__, jumps)
    assert compiled.linear_s(1025) / compiled.linear_s(1024) > 1.03


def test_queries_beyond_measurements_are_counted(model: ModelSpec, gpu: GpuSpec) -> None:
    compiled = FittedLatency().compile(model, gpu, 1, 4)
    compiled.linear_s(32_768)
    compiled.decode_attention_s(16, 16 * 8192)
    compiled.prefill_attention_s(16_384, 100_000)
    assert compiled.extrapolations == 0
    compiled.linear_s(32_769)
    compiled.all_to_all_s(32_769)
    compiled.head_s(4097)
    compiled.prefill_attention_s(16_385, 0)
    compiled.decode_attention_s(2049, 2049)
    compiled.decode_attention_s(1, 1_000_000)
    assert compiled.extrapolations == 6


def test_extrapolation_follows_the_last_slope(model: ModelSpec, gpu: GpuSpec) -> None:
    compiled = FittedLatency().compile(model, gpu, 1, 4)
    slope = compiled.linear_s(32_768) - compiled.linear_s(32_767)
    assert compiled.linear_s(40_000) == pytest.approx(compiled.linear_s(32_768) + slope * (40_000 - 32_768))
    # A chunk's own attention keeps its last efficiency: four times the pairs take four times as long.
    pairs = compiled.prefill_attention_s(120_000, 0) / compiled.prefill_attention_s(60_000, 0)
    assert pairs == pytest.approx(4.0, rel=0.02)


def test_pinned_predictions_of_the_h100(model: ModelSpec, gpu: GpuSpec) -> None:
    """A changed profile or evaluation must be noticed; the values are those of the packaged profile."""
    compiled = FittedLatency().compile(model, gpu, 1, 4)
    assert compiled.linear_s(16) == pytest.approx(10.776e-3, rel=1e-3)
    assert compiled.linear_s(2048) == pytest.approx(76.88e-3, rel=1e-3)
    assert compiled.decode_attention_s(16, 16 * 8192) == pytest.approx(8.4408e-3, rel=1e-3)
    assert compiled.head_s(16) == pytest.approx(0.5531e-3, rel=1e-3)
    assert compiled.overhead_s(16) == pytest.approx(2e-3 + 16 * 3.7e-5)


def test_smaller_heads_do_not_divide_by_the_degree(model: ModelSpec, gpu: GpuSpec) -> None:
    """1,024 tokens of prefill attention lose efficiency as heads are spread; decode keeps most of its gain."""
    one, eight = (FittedLatency().compile(model, gpu, 1, sp) for sp in (1, 8))
    gain = one.prefill_attention_s(1024, 0) / eight.prefill_attention_s(1024, 0)
    assert 1.5 < gain < 4.0
    assert one.prefill_attention_s(16_384, 0) / eight.prefill_attention_s(16_384, 0) > 7.0


def test_communication_only_where_there_are_groups(model: ModelSpec, gpu: GpuSpec) -> None:
    one = FittedLatency().compile(model, gpu, 4, 1)
    assert one.all_to_all_s(8192) == 0.0
    assert one.kv_transfer_s(8192) == 0.0
    spread = FittedLatency().compile(model, gpu, 1, 4)
    assert spread.kv_transfer_s(32_768) > spread.kv_transfer_s(1) > 0.0
    # 32,768 tokens x 160 KiB x 3/4 arrive at no more than the link's 450 GB/s.
    assert spread.kv_transfer_s(32_768) > 32_768 * 160 * 1024 * 0.75 / 4.5e11


def test_slowdowns_follow_the_sm_share_unless_measured(model: ModelSpec, gpu: GpuSpec) -> None:
    assert FittedLatency(decode_sm_share=0.25).compile(model, gpu, 1, 4).prefill_slowdown == pytest.approx(4 / 3)
    assert FittedLatency().compile(model, gpu, 1, 4).prefill_slowdown == pytest.approx(1 / 0.68)
    assert FittedLatency().compile(model, gpu, 1, 4).decode_slowdown == pytest.approx(1 / 0.9)
    measured = FittedLatency(prefill_slowdown=1.7, decode_slowdown=1.2).compile(model, gpu, 1, 4)
    assert (measured.prefill_slowdown, measured.decode_slowdown) == (1.7, 1.2)


def test_the_attention_stage_that_the_sm_share_rests_on(spread: CompiledLatency) -> None:
    """32 decodes of 8K a GPU beside a first chunk of 8,192 on 4 H100: 36.3 ms in turn, 28.0 ms overlapped."""
    paths = spread.all_to_all_s(2048), spread.prefill_attention_s(8192, 0), spread.decode_attention_s(32, 32 * 8192)
    assert in_turn(*paths, spread) == pytest.approx(0.0363, abs=1e-4)
    assert overlapped(*paths, spread) == pytest.approx(0.0280, abs=1e-4)


@pytest.mark.parametrize(
    "key,value",
    [
        ("decode_sm_share", 0.0),
        ("decode_sm_share", 0.9),
        ("decode_sm_share", math.nan),
        ("prefill_slowdown", 0.9),
        ("noise", -0.1),
        ("decode_slowdown", math.inf),
    ],
)
def test_s13_options_that_cannot_be_are_refused(key: str, value: float) -> None:
    with pytest.raises(InputError, match=f"latency.{key}"):
        FittedLatency(**{key: value})


def test_layouts_and_models_that_do_not_fit_are_refused(profile: Profile, model: ModelSpec, gpu: GpuSpec) -> None:
    with pytest.raises(InputError, match="cannot be split over 3 ranks"):
        profile.compile(model, gpu, 3, 1)
    with pytest.raises(InputError, match=r"no layout of 40 groups of 1 GPUs.*cluster.tp.*it has .*4 groups of 2"):
        profile.compile(model, gpu, 1, 40)
    with pytest.raises(InputError, match=r"fitted for model.hidden_size=5120, not 4096"):
        profile.compile(replace(model, hidden_size=4096), gpu, 1, 1)
    with pytest.raises(InputError, match="fitted for gpu=h100_sxm"):
        profile.compile(model, GpuSpec("b200", 1, 1.0, 1.0, 1.0, 1), 1, 1)
