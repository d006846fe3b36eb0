"""Nothing is lost, nothing is stuck: books balance after every event, whatever the load and the memory."""

from __future__ import annotations

import dataclasses
import os
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_cases import random_case
from simulator_harness import ORDERS, SCHEMES, Case, RecordingBackendConfig, closed_load, column, latency, open_load

from confsim.kv.pools import BlockPool
from confsim.outcome.result import Result
from confsim.outcome.slo import Slo
from confsim.run.engine import Run
from traces.load import Load

EXAMPLES = int(os.environ.get("CONFSIM_EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or 25,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)

LAW = latency(linear_base_s=0.01, linear_token_s=1e-5)
MOST_ITERATIONS = 5000  # of a small case; more would be a livelock


def assert_books(case: Case, result: Result) -> None:
    """Counts, tokens and times of a finished run."""
    counts = result.summary["requests"]
    assert counts["injected"] == counts["completed"] + counts["rejected"] + counts["unfinished"]
    assert counts["injected"] == len(case.rows)
    assert counts["unfinished"] == 0
    assert result.summary["iterations"] == result.iterations.num_rows < MOST_ITERATIONS
    statuses = column(result, "status")
    wanted = [row[2] if status == "completed" else 0 for row, status in zip(case.rows, statuses, strict=True)]
    assert column(result, "emitted_tokens") == wanted
    table = result.iterations.to_pandas()
    assert table["end_s"].is_monotonic_increasing
    for _, loop in table.groupby("instance"):
        start, end = loop["start_s"].to_numpy(), loop["end_s"].to_numpy()
        assert np.all(end > start)
        assert np.all(start[1:] >= end[:-1] * (1 - 1e-12)), "a loop runs one iteration at a time"


def prefilled_tokens(case: Case, result: Result) -> int:
    """Prompt tokens of the completed requests."""
    statuses = column(result, "status")
    return sum(row[1] for row, status in zip(case.rows, statuses, strict=True) if status == "completed")


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_books_balance_after_every_event(scheme: str, order: str, prefix_cache: bool) -> None:
    @SETTINGS
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        case = random_case(seed, scheme, order, prefix_cache)
        result = case.run(check=True)
        assert_books(case, result)
        total = sum(result.iterations["prefill_tokens"].to_pylist())
        hits = result.summary["prefix_hit_tokens"]
        emitted_in_prefill = total + hits - prefilled_tokens(case, result)
        if not result.summary["requests"]["preemptions"]:
            assert emitted_in_prefill == 0, "every prompt token is prefilled once, or found in the cache"
        else:
            assert emitted_in_prefill >= 0

    check()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_closed_loop_and_several_instances(scheme: str) -> None:
    @SETTINGS
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = Random(seed)
        case = random_case(seed, scheme, rng.choice(ORDERS), rng.random() < 0.5)
        case = dataclasses.replace(
            case,
            instances=rng.choice([1, 2, 3]),
            router=rng.choice(["round_robin", "least_tokens", "least_requests"]),
        )
        concurrency = rng.randint(1, 5)
        trace = case.trace()
        result = case.simulation().replay(closed_load(trace, concurrency), check=True)
        assert_books(case, result)
        assert_concurrency(result, concurrency)
        result = case.simulation().replay(open_load(trace), check=True)
        assert_books(case, result)

    check()


def assert_concurrency(result: Result, most: int) -> None:
    """Never more in flight than asked for, and as many as there are until the rows run out."""
    arrivals, finishes = column(result, "arrival_s"), column(result, "finish_s")
    served = [(a, f) for a, f in zip(arrivals, finishes, strict=True) if f is not None]
    for arrival, _ in served:
        inside = sum(a <= arrival < f for a, f in served)
        assert inside <= most


@pytest.mark.parametrize("scheme", SCHEMES)
def test_closed_sessions(scheme: str) -> None:
    """A turn comes its think time after its parent's last token, or rejection."""

    @SETTINGS
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = Random(seed)
        case = random_case(seed, scheme, rng.choice(ORDERS), rng.random() < 0.5)
        trace = case.trace()
        count = len(case.rows)
        parents = np.array([rng.randint(-1, row - 1) for row in range(count)])
        think = np.array([rng.choice([0.0, 0.02, rng.uniform(0, 0.3)]) for _ in range(count)])
        load = Load(trace, trace.table["arrival_s"].to_numpy(), "recorded", None, think_s=think, parent_row=parents)
        result = case.simulation().replay(load, check=True)
        assert_books(case, result)
        arrival, finish = column(result, "arrival_s"), column(result, "finish_s")
        for row, parent in enumerate(parents.tolist()):
            if parent < 0:
                assert arrival[row] == case.rows[row][0]
            else:
                ended = arrival[parent] if finish[parent] is None else finish[parent]
                assert arrival[row] == pytest.approx(ended + think[row], abs=1e-9)

    check()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_horizon_cuts_anywhere(scheme: str) -> None:
    """A cut run is the beginning of the whole one."""

    @SETTINGS
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = Random(seed)
        case = random_case(seed, scheme, rng.choice(ORDERS), rng.random() < 0.5)
        whole = case.run()
        horizon = rng.uniform(0.0, 1.1) * whole.summary["simulated_s"] + 1e-6
        cut = dataclasses.replace(case, horizon_s=horizon).run(check=True)
        counts = cut.summary["requests"]
        assert counts["injected"] == counts["completed"] + counts["rejected"] + counts["unfinished"]
        assert counts["injected"] == sum(row[0] <= horizon for row in case.rows)
        assert cut.summary["simulated_s"] <= horizon * (1 + 1e-12)
        assert_beginning(cut, whole, horizon)

    check()


def assert_beginning(cut: Result, whole: Result, horizon_s: float) -> None:
    """Requests of a cut run have got what they had got by then in the whole run."""
    ids = cut.requests["request_id"].to_pylist()
    finish = column(whole, "finish_s")
    status = column(whole, "status")
    for row, request in enumerate(ids):
        done = status[request] == "completed" and finish[request] <= horizon_s
        got = cut.requests["status"][row].as_py()
        if status[request] == "rejected":
            assert got == "rejected"
        else:
            assert got == ("completed" if done else "unfinished")
        if done:
            assert cut.requests["finish_s"][row].as_py() == pytest.approx(finish[request], rel=1e-12)
    ended = [end for end in cut.iterations["end_s"].to_pylist() if end <= horizon_s]
    assert ended == pytest.approx(whole.iterations["end_s"].to_pylist()[: len(ended)], rel=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_s8_second_waits(scheme: str) -> None:
    """S8: 100 tokens, two requests of 60: the second starts when the first has ended."""
    rows = [(0.0, 50, 10), (0.001, 50, 10)]
    case = Case(rows, scheme, latency=LAW, gpus=1, block_tokens=1, capacity_tokens=100)
    result = case.run(check=True)
    first, second = column(result, "finish_s")
    start = 0.001 + column(result, "queueing_s")[1]
    assert start == pytest.approx(first)
    assert second > first
    assert max(result.iterations["kv_used_blocks"].to_pylist()) <= 100


@pytest.mark.parametrize("admission", ["prompt", "step"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_s1_unservable_is_rejected_at_arrival(scheme: str, admission: str) -> None:
    """S1: 50 blocks of 16; 900 prompt tokens can never fit, the next request runs."""
    rows = [(0.0, 900, 5), (0.5, 100, 5)]
    case = Case(rows, scheme, latency=LAW, gpus=1, capacity_tokens=800, admission=admission)
    result = case.run(check=True)
    assert column(result, "status") == ["rejected", "completed"]
    assert column(result, "reason") == ["kv_capacity", None]
    assert column(result, "missed_by") == ["rejected", None]
    assert result.summary["rejected_by"] == {"kv_capacity": 1}
    assert result.summary["attainment"] == 0.5
    assert any("1 of 2 requests rejected: 1 by kv_capacity" in warning for warning in result.summary["warnings"])


@pytest.mark.parametrize(
    "prompt,output,servable", [(800, 1, True), (801, 1, False), (790, 11, True), (790, 12, False), (1, 800, True)]
)
def test_unservable_limit_in_place(prompt: int, output: int, servable: bool) -> None:
    """prompt + output - 1 tokens must fit: the last token's KV is never stored."""
    case = Case([(0.0, prompt, output)], "chunked_prefill", latency=LAW, gpus=1, capacity_tokens=800)
    assert column(case.run(check=True), "status") == ["completed" if servable else "rejected"]


@pytest.mark.parametrize("kv_heads,unit", [(8, 4), (4, 4), (2, 2), (1, 1)])
def test_unservable_limit_of_conflux(kv_heads: int, unit: int) -> None:
    """Shards (on every group) and the decode copy (on one) count together until the transfer ends."""
    capacity = 100 * 16
    most = 100 * unit // (1 + unit) * 16  # tokens of prompt + output - 1 with both copies in one pool
    for prompt, output, servable in ((most - 8, 9, True), (most - 8, 10, False), (capacity * unit, 1, True)):
        case = Case([(0.0, prompt, output)], latency=LAW, kv_heads=kv_heads, capacity_tokens=capacity)
        assert column(case.run(check=True), "status") == ["completed" if servable else "rejected"], (prompt, output)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_s5_context_limit(scheme: str) -> None:
    """S5: prompt + output above the limit is rejected at arrival, counted by reason."""
    rows = [(0.0, 6758, 500), (0.1, 8000, 192), (0.2, 8000, 193)]
    case = Case(rows, scheme, latency=LAW, max_context_tokens=8192)
    result = case.run(check=True)
    assert column(result, "status") == ["completed", "completed", "rejected"]
    assert result.summary["rejected_by"] == {"context_limit": 1}
    unlimited = dataclasses.replace(case, max_context_tokens=None).run()
    assert column(unlimited, "status") == ["completed"] * 3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("order", ORDERS)
def test_newest_is_preempted_and_the_oldest_never(scheme: str, order: str) -> None:
    """Growth runs out of room: the latest gives way, recomputes, and every token comes once."""
    rows = [(0.0, 40, 60), (0.001, 40, 60), (0.002, 40, 60)]
    case = Case(rows, scheme, order, latency=LAW, gpus=1, block_tokens=4, capacity_tokens=200)
    result = case.run(check=True)
    assert_books(case, result)
    preemptions = column(result, "preemptions")
    assert preemptions[0] == 0 and preemptions[2] > 0
    assert preemptions == sorted(preemptions)
    assert result.summary["requests"]["preempted"] == sum(count > 0 for count in preemptions)
    finish = column(result, "finish_s")
    assert finish[0] == min(finish)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_partial_prefills_do_not_deadlock(scheme: str) -> None:
    """Prompts in progress fill the pool block by block: all end all the same."""
    rows = [(0.0, 150, 4)] * 6
    law = latency(linear_base_s=0.01, linear_token_s=1e-3)  # 30 tokens in 40 ms
    case = Case(
        rows, scheme, "srpf", latency=law, slo=Slo(2.0, 0.04), gpus=1, block_tokens=1, capacity_tokens=320,
        admission="step", max_partial_prefills=4,
    )  # fmt: skip
    assert_books(case, case.run(check=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompts_in_progress_go_on_behind_one_that_may_not_begin(scheme: str) -> None:
    """A shorter prompt comes to the head of the queue while as many as may be are in progress, and nothing decodes."""
    law = latency(linear_base_s=0.01, linear_token_s=1e-3)  # 30 tokens in 40 ms
    rows = [(0.0, 200, 4), (0.01, 90, 4)]
    case = Case(rows, scheme, "srpf", latency=law, slo=Slo(2.0, 0.04), gpus=1, max_partial_prefills=1)
    result = case.run(check=True)
    assert_books(case, result)
    first, second = column(result, "first_token_s")
    assert first < second


@pytest.mark.parametrize("scheme", SCHEMES)
def test_targets_that_nothing_meets(scheme: str) -> None:
    """A TBT below what an iteration takes: one block of prefill an iteration, and everything ends."""
    case = Case([(0.0, 100, 5), (0.0, 64, 5)], scheme, latency=LAW, slo=Slo(2.0, 0.005), gpus=1)
    plans = RecordingBackendConfig()
    result = case.run(check=True, backend=plans)
    assert_books(case, result)
    assert max(sum(chunk.tokens for chunk in plan.chunks) for plan in plans.plans) == 16


def test_audit_sees_a_leak() -> None:
    """The audit is worth something: a unit that nobody owns is found."""
    case = Case([(0.0, 100, 50)], latency=LAW)
    run = Run(case.simulation(), open_load(case.trace()))
    run.env.run(0.2)
    run.audit()
    pool: BlockPool = run.instances[0].pools()[0]
    pool.held += 1
    with pytest.raises(AssertionError):
        run.audit()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_several_instances_share_the_load(scheme: str) -> None:
    rows = [(0.01 * i, 100, 5) for i in range(9)]
    result = Case(rows, scheme, latency=LAW, instances=3).run(check=True)
    assert column(result, "instance") == [0, 1, 2] * 3
    assert [entry["requests"] for entry in result.summary["instances"]] == [3, 3, 3]
