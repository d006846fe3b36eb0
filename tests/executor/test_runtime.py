"""What a driver can do: plans under way, tokens that are still under way, KV moved to any group, timings by rank."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from executor_harness import THREADS, alone, generate, prompts, tiny

from confsim.errors import InputError
from confsim.run.plan import DecodeBatch, IterationPlan, IterationTiming, PrefillChunk
from confsim.run.request import Request
from confsim.specs import KvConfig
from executor.clock import STAGES
from executor.config import Device, Layout
from executor.runtime import Runtime

KV = KvConfig(capacity_tokens=512)
PROMPT = prompts([19])[0]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with alone(tiny()) as runtime:
        return generate(runtime, {0: PROMPT}, 12).tokens[0]


def start(runtime: Runtime, request: Request, group: int, shards: tuple[int, ...]) -> tuple[DecodeBatch, ...]:
    """Prefill a request in one chunk; the batches of its decode."""
    batches = tuple(DecodeBatch(index) for index in range(runtime.layout.groups))
    runtime.submit(IterationPlan((PrefillChunk(request, 0, shards, True, group),), batches))
    batches[group].members[request.id] = request
    return batches


@pytest.mark.parametrize("group", range(4))
def test_kv_moves_to_every_group(group: int, expected: list[int]) -> None:
    with Runtime(tiny(), Layout("xp", 4, 1), THREADS, KV) as runtime:
        runtime.add(0, PROMPT)
        batches = start(runtime, Request(0, 0.0, 19), group, (4, 7, 0, 8))
        tokens = [runtime.result().tokens[0]]
        for _ in range(4):
            done = runtime.run(IterationPlan((), batches))
            assert [rank.rank for rank in done.ranks if rank.tokens] == [group]
            tokens.append(done.tokens[0])
    assert tokens == expected[:5]


def test_iterations_under_way_run_in_order(expected: list[int]) -> None:
    """Tokens stay on the device for the next plan: the driver need not see them first."""
    with Runtime(tiny(), Layout("xp", 2, 1), THREADS, KV) as runtime:
        runtime.add(0, PROMPT)
        batches = start(runtime, Request(0, 0.0, 19), 1, (10, 9))
        for _ in range(5):
            runtime.submit(IterationPlan((), batches))
        done = [runtime.result() for _ in range(6)]
        assert [item.number for item in done] == list(range(6))
        assert [item.tokens[0] for item in done] == expected[:6]


def test_recomputation_waits_for_tokens_under_way(expected: list[int]) -> None:
    """A request preempted while its last token is being computed: its new chunks hold that token too."""
    with Runtime(tiny(), Layout("xp", 2, 1), THREADS, KV) as runtime:
        runtime.add(0, PROMPT)
        request = Request(0, 0.0, 19)
        batches = start(runtime, request, 0, (10, 9))
        runtime.submit(IterationPlan((), batches))
        runtime.submit(IterationPlan((), batches))
        del batches[0].members[0]
        request.target_tokens = 19 + 3
        chunk = PrefillChunk(request, 0, (0, 22), True, 1)
        runtime.submit(IterationPlan((chunk,), batches, (0,)))
        assert [runtime.result().tokens[0] for _ in range(4)] == expected[:4]
        request.target_tokens = 19 + 9
        with pytest.raises(InputError, match="a prompt of 19 and 4 emitted tokens"):
            runtime.submit(IterationPlan((chunk._replace(shards=(0, 28)),), batches, (0,)))


def test_a_result_is_an_iteration_timing(expected: list[int]) -> None:
    device = Device(launcher="threads", overlap="threads")
    with Runtime(tiny(), Layout("xp", 2, 1), device, KV) as runtime:
        runtime.add(0, PROMPT)
        runtime.add(1, PROMPT)
        batches = start(runtime, Request(0, 0.0, 19), 0, (10, 9))
        first = runtime.result()
        second = runtime.run(IterationPlan((PrefillChunk(Request(1, 0.0, 19), 0, (9, 10), True, -1),), batches))
    assert isinstance(first, IterationTiming)
    other = pickle.loads(pickle.dumps(first._replace(predicted_s=2.0)))
    assert (other.predicted_s, other.duration_s, other.tokens) == (2.0, first.duration_s, first.tokens)
    assert (first.overlap, first.overlap_valid) == ("none", True)
    assert (second.overlap, second.overlap_valid) == ("threads", True)
    assert second.ranks[1].overlap == "none"  # no decode there
    assert second.tokens == {0: expected[1], 1: expected[0]}
    assert second.duration_s == max(rank.duration_s for rank in second.ranks)
    assert second.linear_s == second.slowest.stages["linear"]
    assert set(second.ranks[0].stages) == set(STAGES)
    for name in STAGES[:5]:
        assert 0 < max(rank.stages[name] for rank in second.ranks) <= second.duration_s
    assert second.duration_s <= sum(second[1:8]) * (1 + 1e-9)  # all of it is accounted for, side by side or not
    assert first.transfer_s > 0
    assert second.wall_s >= second.duration_s
    assert 0 < second.ranks[0].busy_share <= 1


def test_facts_name_kernels_and_how_paths_run() -> None:
    with Runtime(tiny(), Layout("xp", 2, 1), THREADS, KV) as runtime:
        facts = runtime.ready[1].facts
    assert (facts["device"], facts["dtype"], facts["attention"]) == ("cpu", "float32", "sdpa")
    assert (facts["overlap"], facts["page_tokens"]) == ("turn", 16)
    assert facts["kv_units"] == 512 // 16 * 2


def test_ended_requests_make_room() -> None:
    """Requests without a decode are gone after their last chunk; released ones before the next iteration."""
    with Runtime(tiny(), Layout("xp", 2, 1), THREADS, KvConfig(capacity_tokens=64)) as runtime:
        for index in range(10):
            runtime.add(index, np.arange(60))
            request = Request(index, 0.0, 60)
            if index % 2:
                runtime.run(IterationPlan((PrefillChunk(request, 0, (30, 30), True, -1),), ()))
                continue
            runtime.run(IterationPlan((PrefillChunk(request, 0, (30, 0), False),), ()))
            done = runtime.run(IterationPlan((), (), (index,)))
            assert [rank.kv_units for rank in done.ranks] == [0, 0]
