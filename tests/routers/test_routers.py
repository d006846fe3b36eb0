"""Routers: what they choose, what they know, and what that does to a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confsim import api
from confsim.errors import InputError
from confsim.routers._state import Backlog, PrefixMemory
from confsim.routers.base import Router, new_router
from confsim.run.request import Request, RequestState
from confsim.setup.configuration import compose

NAMES = ["least_requests", "least_tokens", "prefix_aware", "round_robin", "slo_aware"]


@dataclass
class Place:
    """A target that counts what it was sent."""

    outstanding_requests: int = 0
    outstanding_tokens: int = 0


def request(
    number: int, prompt: int = 100, at_s: float = 0.0, ttft_s: float = 2.0, blocks: tuple[int, ...] = ()
) -> Request:
    return Request(number, at_s, prompt, ttft_s, blocks)


def first_token(one: Request, time_s: float) -> None:
    one.first_token_s = time_s


def test_names() -> None:
    for name in NAMES:
        assert hasattr(new_router(name, "cluster.router"), "choose")
    with pytest.raises(InputError, match="cluster.router=nope: unknown, use one of " + ", ".join(NAMES)):
        new_router("nope", "cluster.router")


@pytest.mark.parametrize("name", NAMES)
def test_every_choice_is_a_target_and_the_same_every_time(name: str) -> None:
    def choices() -> list[int]:
        router, places, found = new_router(name, "k"), [Place() for _ in range(5)], []
        for number in range(200):
            one = request(number, 50 + number * 37 % 400, number * 0.01, blocks=(0, number % 7, number))
            found.append(router.choose(one, places))
            places[found[-1]].outstanding_requests += 1
            places[found[-1]].outstanding_tokens += one.prompt_tokens
        return found

    first = choices()
    assert first == choices()
    assert set(first) == set(range(5))


def test_prefix_aware_follows_a_prefix_until_the_queue_costs_more() -> None:
    router, places = new_router("prefix_aware", "k"), [Place(), Place()]
    a = request(0, 1000, blocks=(1, 2))
    assert router.choose(a, places) == 0
    first_token(a, 0.5)
    assert router.choose(request(1, 10, blocks=(9,)), places) == 0  # a tie: the first
    # 1,000 tokens of which 999 are cached on target 0, where 10 wait: 11 against 1,000.
    assert router.choose(request(2, 1000, blocks=(1, 2)), places) == 0
    # The backlog there has grown by 1. A prompt that shares one block of two: 500 new and 11 waiting, against 1,000.
    assert router.choose(request(3, 1000, blocks=(1, 3)), places) == 0
    # 511 wait on target 0; nothing is cached of this one anywhere.
    assert router.choose(request(4, 400, blocks=(7,)), places) == 1
    # Half is cached on target 0: 500 + 511 there against 400 + 1,000 on the other.
    assert router.choose(request(5, 1000, blocks=(1, 4)), places) == 0
    # Half is cached on target 0: 500 + 1,011 there against 400 + 1,000 on the other: the queue costs more.
    assert router.choose(request(6, 1000, blocks=(1, 5)), places) == 1


def test_slo_aware_sends_what_is_late_everywhere_where_it_delays_nobody() -> None:
    router, places = new_router("slo_aware", "k"), [Place(), Place()]
    sent = [request(0, 1000), request(1, 1000)]
    assert [router.choose(one, places) for one in sent] == [0, 1]
    for one in sent:
        first_token(one, 1.0)  # both show 1,000 tokens a second
    assert router.choose(request(20, 1500, 1.0), places) == 0  # 1.5 s on either
    assert router.choose(request(21, 900, 1.0), places) == 1  # 2.4 s there, 0.9 s here
    assert router.choose(request(22, 1000, 1.0), places) == 1  # 2.5 and 1.9 s: one is in time
    assert router.choose(request(23, 5000, 1.0), places) == 1  # late on both: behind the 1,900 tokens that are there
    assert router.choose(request(24, 400, 1.0), places) == 0  # 1.9 s here, where nothing is late


def test_slo_aware_spreads_a_burst_before_it_knows_any_speed() -> None:
    router, places = new_router("slo_aware", "k"), [Place(), Place(), Place()]
    assert [router.choose(request(i, 100), places) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_slo_aware_expects_the_usual_speed_of_a_target_it_does_not_know() -> None:
    router, places = new_router("slo_aware", "k"), [Place(), Place()]
    one, two = request(0, 1000), request(1, 10)
    assert [router.choose(one, places), router.choose(two, places)] == [0, 1]
    first_token(one, 1.0)  # 1,000 tokens a second; target 1 has not answered
    assert router.choose(request(2, 500, 1.0), places) == 0  # 0.5 s against 0.51 s
    assert router.choose(request(3, 500, 1.0), places) == 1
    assert router.choose(request(4, 9000, 1.0), places) == 1  # late: behind 510 tokens rather than 500


def test_a_backlog_forgets_what_was_rejected() -> None:
    backlog = Backlog()
    one, two = request(0), request(1)
    backlog.add(one, 100)
    backlog.add(two, 50)
    one.move_to(RequestState.REJECTED)
    backlog.settle()
    assert backlog.tokens == 50
    assert backlog.pace_s is None  # nothing was learned


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.booleans()), max_size=60), st.randoms(use_true_random=False))
def test_a_backlog_is_exact_after_enough_looks(entries: list[tuple[int, bool]], rng: Any) -> None:
    backlog = Backlog()
    sent = [(request(i), tokens, done) for i, (tokens, done) in enumerate(entries)]
    for one, tokens, _ in sent:
        backlog.add(one, tokens)
    for one, _, done in rng.sample(sent, len(sent)):
        if done:
            first_token(one, 1.0)
    for _ in range(20):
        backlog.settle()
    assert backlog.tokens == sum(tokens for _, tokens, done in sent if not done)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=6, unique=True), st.integers(0, 3)), max_size=20),
    st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
)
def test_prefix_memory_is_the_longest_run_of_seen_blocks(sent: list[tuple[list[int], int]], asked: list[int]) -> None:
    memory = PrefixMemory()
    seen: list[set[int]] = [set() for _ in range(4)]
    for number, (blocks, target) in enumerate(sent):
        memory.sent(request(number, 600, blocks=tuple(blocks)), target)
        seen[target] |= set(blocks)
    one = request(99, 100 * len(asked), blocks=tuple(asked))
    expected = []
    for blocks in seen:
        depth = next((i for i, block in enumerate(asked) if block not in blocks), len(asked))
        expected.append(min(100 * depth, one.prompt_tokens - 1))
    assert memory.cached_tokens(one, 4) == expected


# --- clusters --------------------------------------------------------------------------------------------------------

CLUSTER = ["trace=conversation", "trace.requests=300", "cluster.instances=4", "rate=9", "arrivals=poisson"]


def result(router: str, *overrides: str, check: bool = False) -> dict[str, Any]:
    cfg = compose([*CLUSTER, f"cluster.router={router}", *overrides])
    return dict(api.build(cfg).run(check=check).summary)


@pytest.mark.parametrize("scheme", ["conflux", "chunked_prefill", "data_parallel"])
def test_every_router_serves_every_request(scheme: str) -> None:
    for router in NAMES:
        summary = result(router, f"scheme={scheme}", "trace.requests=50", check=True)
        assert summary["requests"]["completed"] == 50
        assert sum(part["requests"] for part in summary["instances"]) == 50
        assert [part["instance"] for part in summary["instances"]] == [0, 1, 2, 3]


def test_routers_differ_as_they_should() -> None:
    prefix = ["kv.prefix_cache=true"]
    found = {name: result(name, *prefix) for name in NAMES}
    assert {part["requests"] for part in found["round_robin"]["instances"]} == {75}
    assert found["prefix_aware"]["prefix_hit_tokens"] > 1.2 * found["round_robin"]["prefix_hit_tokens"]
    assert found["slo_aware"]["attainment"] >= found["round_robin"]["attainment"]
    assert found["prefix_aware"]["attainment"] >= found["round_robin"]["attainment"]


def test_slo_aware_keeps_instances_in_time_under_overload() -> None:
    overload = ["rate=30", "slo.ttft_s=1"]
    blind, aware = (result(name, *overload)["attainment"] for name in ("least_tokens", "slo_aware"))
    assert aware > 1.3 * blind


def test_one_instance_needs_no_router() -> None:
    one = [result(name, "cluster.instances=1", "rate=2", "trace.requests=60") for name in NAMES]
    assert all("instances" not in summary for summary in one)
    assert len({summary["attainment"] for summary in one}) == 1


def test_routers_inside_a_scheme() -> None:
    words = ["cluster.instances=1", "scheme=data_parallel", "rate=2", "trace.requests=80"]
    for router in ("prefix_aware", "slo_aware"):
        assert result("round_robin", *words, f"scheme.router={router}")["requests"]["completed"] == 80


def test_a_router_is_a_protocol() -> None:
    routers: list[Router] = [new_router(name, "k") for name in NAMES]
    assert len(routers) == len(NAMES)
