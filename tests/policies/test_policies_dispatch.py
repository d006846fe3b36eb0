"""Dispatch of prefill tokens over groups: waterfill and even shares."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_harness import Case, latency

from confsim.latency.affine import AffineLatency
from confsim.policies.dispatch.even import Dispatch as Even
from confsim.policies.dispatch.waterfill import Dispatch as Waterfill
from confsim.run.plan import DecodeLoad
from confsim.run.request import Request
from confsim.schemes.cost import CoBatchCost, overlapped
from confsim.schemes.fill import Fill, Limits

decodes = st.one_of(
    st.lists(st.integers(0, 60), min_size=1, max_size=8), st.lists(st.integers(0, 3), min_size=2, max_size=5)
)
token_counts = st.one_of(st.integers(1, 300), st.integers(1, 12))


def test_worked_example_of_the_paper() -> None:
    """40, 10, 10, 0 decodes and the level 300: 260, 290, 290, 300 tokens, 1140 in all."""
    fill = Waterfill((40, 10, 10, 0))
    assert fill.capacity(300) == 1140
    assert fill.spread(1140) == (260, 290, 290, 300)
    assert fill.peak(1140) == (300, 300)


def test_refill_of_twenty_tokens() -> None:
    assert Waterfill((40, 10, 10, 0)).spread(20) in ((0, 3, 4, 13), (0, 4, 3, 13))


def naive_level(decode: list[int], tokens: int) -> int:
    """The highest stacked total of a group that takes some, by adding one token at a time to the lowest group."""
    level = list(decode)
    takes: set[int] = set()
    for _ in range(tokens):
        group = level.index(min(level))
        level[group] += 1
        takes.add(group)
    return max(level[group] for group in takes)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(decodes, token_counts)
def test_waterfill_levels(decode: list[int], tokens: int) -> None:
    fill = Waterfill(decode)
    shares = fill.spread(tokens)
    assert sum(shares) == tokens and min(shares) >= 0
    takers = [d + s for d, s in zip(decode, shares, strict=True) if s]
    level = naive_level(decode, tokens)
    assert max(takers) == level
    for held, share in zip(decode, shares, strict=True):
        if held > level:
            assert share == 0, "a group above the level takes nothing"
        else:
            assert level - 1 <= held + share <= level or held + share == held == level
    assert fill.peak(tokens) == (max(map(sum, zip(decode, shares, strict=True))), max(shares))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(decodes, st.integers(0, 120))
def test_waterfill_capacity(decode: list[int], level: int) -> None:
    fill = Waterfill(decode)
    most = fill.capacity(level)
    if most:
        shares = fill.spread(most)
        assert max(d + s for d, s in zip(decode, shares, strict=True) if s) == level
    over = fill.spread(most + 1)
    assert max(d + s for d, s in zip(decode, over, strict=True) if s) > level


@settings(max_examples=300, derandomize=True, deadline=None)
@given(decodes, st.integers(0, 300))
def test_even_shares(decode: list[int], tokens: int) -> None:
    even = Even(decode)
    shares = even.spread(tokens)
    assert sum(shares) == tokens and max(shares) - min(shares) <= 1
    assert even.peak(tokens) == (max(map(sum, zip(decode, shares, strict=True))), max(shares))
    assert even.capacity(max(decode) + 7) == 7 * len(decode)


def test_chunk_of_the_worked_example() -> None:
    """The engine: a prompt with 2000 tokens left beside 40, 10, 10, 0 decodes gets the budget of the level 300."""
    law = AffineLatency(1, 4, linear_base_s=0.01, linear_token_s=1e-4)  # 300 stacked tokens take 40 ms, 301 more
    load = DecodeLoad((40, 10, 10, 0), 40, 60, 0.0)
    request = Request(0, 0.0, 2000)
    fill = Fill(CoBatchCost(law, overlapped), Waterfill, Limits(0.04), 16)
    fill.begin(load)
    tokens = fill.fit(request)
    assert tokens == 1140
    fill.add(request, tokens, False, -1)
    assert fill.spread()[0].shards == (260, 290, 290, 300)


def test_shares_of_several_chunks_add_up() -> None:
    """20 tokens of three prompts over 40, 10, 10, 0: the sums are those of one prompt."""
    law = AffineLatency(1, 4, linear_base_s=0.01)
    load = DecodeLoad((40, 10, 10, 0), 40, 60, 0.0)
    fill = Fill(CoBatchCost(law, overlapped), Waterfill, Limits(1.0), 16)
    fill.begin(load)
    for index, tokens in enumerate((7, 1, 12)):
        request = Request(index, 0.0, tokens)
        assert fill.fit(request) == tokens
        fill.add(request, tokens, True, -1)
    shards = [chunk.shards for chunk in fill.spread()]
    assert [sum(chunk) for chunk in shards] == [7, 1, 12]
    assert tuple(map(sum, zip(*shards, strict=True))) in ((0, 3, 4, 13), (0, 4, 3, 13))


@pytest.mark.parametrize("dispatch,shares", [("even", [25, 25, 25, 25]), ("waterfill", [25, 25, 25, 25])])
def test_dispatch_by_configuration(dispatch: str, shares: list[int]) -> None:
    result = Case([(0.0, 100, 1)], latency=latency(linear_base_s=0.01), dispatch=dispatch).run()
    assert result.iterations["prefill_per_group"].to_pylist() == [shares]


def test_conflux_always_uses_waterfill() -> None:
    """Bundles change the order only; beside decodes the shares differ."""
    rows = [(0.0, 16, 50), (0.1, 101, 1)]
    law = latency(linear_base_s=0.01)
    for order in ("fcfs", "srpf", "deadline"):
        table = Case(rows, order=order, latency=law).run().iterations.to_pylist()
        mixed = [row for row in table if row["prefill_tokens"] and row["decode_tokens"]]
        assert len(mixed) == 1
        stacked = [a + b for a, b in zip(mixed[0]["prefill_per_group"], mixed[0]["decode_per_group"], strict=True)]
        assert sorted(stacked) == [25, 25, 26, 26]


def test_waterfill_small_loads_exhaustively() -> None:
    """Every load of up to 4 groups and 3 decodes, every number of tokens up to 14."""
    for groups in range(1, 5):
        for decode in product(range(4), repeat=groups):
            fill = Waterfill(decode)
            for tokens in range(1, 15):
                shares = fill.spread(tokens)
                assert min(shares) >= 0 and sum(shares) == tokens, (decode, tokens, shares)
                stacked = [d + s for d, s in zip(decode, shares, strict=True)]
                level = naive_level(list(decode), tokens)
                assert max(s for s, share in zip(stacked, shares, strict=True) if share) == level
                assert min(stacked) >= level - 1
                assert fill.peak(tokens) == (max(stacked), max(shares)), (decode, tokens)
