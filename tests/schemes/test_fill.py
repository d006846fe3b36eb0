"""The budget search on laws that step: always the most tokens that meet the target."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from confsim.latency.base import LatencyModel
from confsim.latency.config import FittedLatency
from confsim.outcome.slo import TOLERANCE
from confsim.policies.dispatch.waterfill import Dispatch
from confsim.run.plan import DecodeBatch
from confsim.run.request import Request
from confsim.schemes.cost import CoBatchCost, overlapped
from confsim.schemes.fill import Fill, Guess, Limits, most
from confsim.specs import GpuSpec, ModelSpec

H100 = GpuSpec("h100_sxm", 85520809984, 3.35e12, 9.89e14, 4.5e11, 132)
QWEN3_14B = ModelSpec("qwen3_14b", 5120, 40, 40, 8, 128, 17408, 151936, qk_norm=True)


@pytest.fixture(scope="module")
def spread() -> LatencyModel:
    """Qwen3-14B on four groups of one H100."""
    return FittedLatency().compile(QWEN3_14B, H100, 1, 4)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0.0, 0.03)), max_size=8),
    st.floats(0.0, 2e-4),
    st.floats(0.0, 0.12),
    st.integers(1, 1500),
    st.integers(0, 3000),
    st.floats(0.0, 1e-3),
    st.integers(0, 500),
)
def test_the_search_agrees_with_trying_every_number(
    jumps: list[tuple[int, float]],
    token_s: float,
    target_s: float,
    want: int,
    guessed: int,
    slope_s: float,
    before: int,
) -> None:
    """A line with jumps anywhere, whatever the last search left behind."""
    at = list(accumulate(gap for gap, _ in jumps))
    heights = [0.0, *accumulate(height for _, height in jumps)]

    def seconds(tokens: int) -> float:
        return tokens * token_s + heights[bisect_right(at, tokens)]

    found = most(seconds, target_s, want, Guess(guessed, slope_s), before)
    fits = 0
    while fits < want and seconds(fits + 1) <= target_s:
        fits += 1
    assert found == fits


@given(st.integers(0, 48), st.integers(0, 30_000), st.floats(0.045, 0.1), st.integers(0, 8192))
def test_budgets_on_measured_steps_are_the_largest(
    spread: LatencyModel, decodes: int, cached: int, target_s: float, earlier: int
) -> None:
    cost = CoBatchCost(spread, overlapped)
    fill = Fill(cost, Dispatch, Limits(target_s), 16)
    load = cost.load([DecodeBatch(group, decodes, decodes * 4096) for group in range(4)])
    if cost.decodes_s(load) > target_s:
        return  # then the oldest prefill has one block
    fill.begin(load)
    request = Request(0, 0.0, 100_000, 2.0, ())
    request.prefilled = cached
    fill._guess.tokens = earlier
    tokens = fill.fit(request)
    seconds = cost.predictor(load, Dispatch(load.counts), request, fill.planned)
    assert tokens == 0 or seconds(tokens) <= target_s * TOLERANCE
    full = Dispatch(load.counts).capacity(8192)
    assert tokens == full or seconds(tokens + 1) > target_s * TOLERANCE


def test_planners_stop_just_below_a_step(spread: LatencyModel) -> None:
    """From 1,024 to 1,025 stacked tokens the linear stage takes 39.05 and 45.84 ms: targets between ask for 1,024."""
    cost = CoBatchCost(spread, overlapped)
    fill = Fill(cost, Dispatch, Limits(1.0), 16)
    load = cost.load([DecodeBatch(group, 0, 0) for group in range(4)])
    request = Request(0, 0.0, 100_000, 2.0, ())
    seconds = cost.predictor(load, Dispatch(load.counts), request, fill.planned)
    below_s, above_s = seconds(4 * 1024), seconds(4 * 1024 + 1)
    assert above_s - below_s == pytest.approx(spread.linear_s(1025) - spread.linear_s(1024), abs=1e-4)
    assert above_s - below_s > 0.006
    for share in (0.01, 0.5, 0.99):
        fill = Fill(cost, Dispatch, Limits(below_s + share * (above_s - below_s)), 16)
        fill.begin(load)
        assert fill.fit(request) == 4 * 1024
