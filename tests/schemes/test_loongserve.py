"""Elastic sequence parallelism: ring costs, the batching programme, pauses, scale-down, masters and dropped KV."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheme_cases import LAW, column, loop_rows, replay, simulation

from confsim.api import build, compose
from confsim.errors import InputError
from confsim.latency.affine import AffineLatency
from confsim.run.engine import Run
from confsim.run.model_backend import Clock, Cost, ModelBackend, ModelBackendConfig, Noise
from confsim.run.plan import DecodeBatch, IterationPlan
from confsim.run.request import Request
from confsim.run.scenario import Scenario, ScenarioRun
from confsim.schemes.elastic.batching import Share, partition
from confsim.schemes.elastic.gate import Footprint, MemoryGate
from confsim.schemes.elastic.law import PrefillLaw, fit_law
from confsim.schemes.elastic.ring import RingCost
from confsim.schemes.link import KvLink
from confsim.schemes.loongserve import LoongServe
from confsim.specs import ClusterSpec

SCHEME = ("scheme=loongserve", "scheme.max_new_tokens=8")
TOKEN_S = 2e-6  # half of a token's KV, which is what a transfer over two groups moves
COEFFICIENTS = {**LAW, "transfer_token_s": TOKEN_S}


def ring(overlap: bool = False, **changes: float) -> RingCost:
    """The law of `scheme_cases` on instances of one GPU."""
    law = {**COEFFICIENTS, **changes}
    return RingCost(AffineLatency(**law), KvLink(AffineLatency(sp=2, **law), 2.0, 0.0, 100.0), overlap, 50.0)


def prefill_s(degree: int, *prompts: int, overlap: bool = False) -> float:
    """The same, written out."""
    stripe = -(-sum(prompts) // degree)
    step = sum(4e-9 * (-(-tokens // degree)) ** 2 / 2 for tokens in prompts)
    send = 2 * TOKEN_S * stripe if degree > 1 else 0.0
    ring_s = step + (degree - 1) * (max(step, send) if overlap else step + send)
    return 0.008 + 40e-6 * stripe + ring_s + 0.0005 + 2e-6 * -(-len(prompts) // degree)


def decode_s(count: int, context: int) -> float:
    return 0.008 + 40e-6 * count + 0.001 + 1e-6 * context + 0.0005 + 2e-6 * count


# Costs and the fitted law


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_ring_attention_by_hand(degree: int, overlap: bool) -> None:
    cost = ring(overlap)
    assert cost.prefill([3000, 1000], degree).duration_s == pytest.approx(
        prefill_s(degree, 3000, 1000, overlap=overlap)
    )


def test_overlap_hides_sends_behind_attention() -> None:
    """Long prompts: attention outlasts a send, so n steps of it remain; short ones: a step and n - 1 sends."""
    long, short = 64000, 400
    saved = ring().prefill([long], 4).duration_s - ring(True).prefill([long], 4).duration_s
    assert saved == pytest.approx(3 * 2 * TOKEN_S * long / 4)
    step = 4e-9 * (short / 4) ** 2 / 2
    saved = ring().prefill([short], 4).duration_s - ring(True).prefill([short], 4).duration_s
    assert saved == pytest.approx(3 * step)


def test_attention_work_divides_over_the_ring() -> None:
    """n steps on stripes of len / n make len^2 / (2 n) pairs an instance."""
    whole, quarter = ring().prefill([8000], 1), ring().prefill([8000], 4)
    assert quarter.prefill_attention_s == pytest.approx(whole.prefill_attention_s / 4)


def test_decodes_computed_ahead_are_those_of_one_plan_after_the_other() -> None:
    """Two rings in lockstep, one of two instances with a single master: the slowest sets the pace, step by step."""
    cost = ring()

    def plan(step: int) -> IterationPlan:
        shares = (
            DecodeBatch(0, 0, 9000),
            DecodeBatch(1, 3, 400 + 3 * (step + 1)),
            DecodeBatch(2, 20, 5000 + 20 * (step + 1)),
        )
        return IterationPlan((), shares, rings=((0, 1), (2,)))

    run = cost.decode_run(plan(0), Clock(2.0, 9.0, 30, Noise(0.0, np.random.default_rng(0))))
    single = [cost.timing(plan(step)) for step in range(30)]
    first = single[0]
    assert (run.linear_s, run.head_s, run.communication_s) == (first.linear_s, first.head_s, first.communication_s)
    assert run.ends_s == pytest.approx([2.0 + sum(one.duration_s for one in single[: n + 1]) for n in range(30)])
    assert run.attention_s == pytest.approx([one.decode_attention_s for one in single])
    exchange_s = max(1, round(2 * 3 * cost.query_bytes / 100.0)) * TOKEN_S  # of three queries, and back
    beside = 0.008 + 40e-6 * 3 + 0.0005 + 2e-6 * 3 + 0.001 + 1e-6 * 9000 + exchange_s
    alone = decode_s(20, 5020)
    assert first.duration_s == pytest.approx(max(beside, alone))
    assert first.duration_s > alone


def test_fit_recovers_a_law_of_its_form() -> None:
    cost = ring(head_base_s=0.0, head_token_s=0.0)
    law = fit_law(cost, 4, 16384)
    for degree, (a, b, c) in enumerate(law.coefficients, start=1):
        exact = 1e-2 if degree == 3 else 1e-6  # 3 does not divide the prompts
        assert a == pytest.approx(0.008, rel=exact)
        sends = (degree - 1) * 2 * TOKEN_S / degree
        assert b == pytest.approx(40e-6 / degree + sends, rel=exact)
        assert c == pytest.approx(4e-9 / 2 / degree, rel=exact)
    assert law.seconds(0, 1, 1) == float("inf")


def test_fit_is_never_negative() -> None:
    law = fit_law(ring(prefill_pair_s=0.0, linear_base_s=0.0, head_base_s=0.0), 2, 4096)
    assert min(value for row in law.coefficients for value in row) >= 0.0


def test_fit_to_a_profile_is_close() -> None:
    """T(k) of qwen3_14b within 35% of the cost it is fitted to, from 512 tokens to a full stripe."""
    sim = build(compose(["scheme=loongserve", "trace=fixed", "trace.requests=1"]))
    run = Run(sim, sim.arrivals.apply(sim.trace, 1.0, 0))
    instance = run.instances[0]
    assert run.setup.compiled[1, 1].extrapolations == 0  # the fit leaves no trace
    for degree in (1, 2, 4):
        for tokens in (512, 2048, 8192, 32768):
            exact = instance.cost.prefill([tokens], degree).duration_s
            assert instance.law.seconds(degree, tokens, tokens**2) == pytest.approx(exact, rel=0.35)


# Seconds of a ring prefill of llama3_1_8b on A100s, measured by the Tetris paper: by instances, at 32k, 64k, 128k.
MEASURED_S = {1: (3.22, 9.05, 29.2), 2: (1.67, 4.61, 14.3), 4: (0.92, 2.43, 7.32), 8: (0.58, 1.37, 3.96)}


def test_prefill_times_are_those_that_others_measured() -> None:
    """Within 20% for long prompts; below 16k host synchronisations, which are not charged, dominate on 8 instances."""
    sim = build(compose(["scheme=loongserve", "model=llama3_1_8b", "gpu=a100_sxm", "cluster.gpus=8", "trace=fixed"]))
    run = Run(sim, sim.arrivals.apply(sim.trace, 1.0, 0))
    cost = run.instances[0].cost
    for degree, seconds in MEASURED_S.items():
        for thousands, measured in zip((32, 64, 128), seconds, strict=True):
            assert cost.prefill([thousands * 1024], degree).duration_s == pytest.approx(measured, rel=0.2)


# The dynamic programme

TYPICAL = PrefillLaw(tuple((0.004 + 0.004 * k, 40e-6 / k, 2e-9 / k) for k in (1, 2, 3, 4)))


def cost_of(shares: list[Share], lengths: list[int], law: PrefillLaw) -> float:
    total = 0.0
    for share in shares:
        batch = lengths[share.first : share.last]
        seconds = law.seconds(share.right - share.left, sum(batch), sum(n * n for n in batch))
        total += seconds * sum(1 / n for n in batch)
    return total


def cuts(count: int, parts: int) -> list[list[tuple[int, int]]]:
    """All ways to cut [0, count) into `parts` runs."""
    return [list(pairwise((0, *inner, count))) for inner in combinations(range(1, count), parts - 1)]


def best_of_all(lengths: list[int], rooms: list[int], law: PrefillLaw) -> float:
    """Least cost over every partition, without pruning."""
    best = float("inf")
    for used in range(1, len(rooms) + 1):
        for parts in range(1, min(len(lengths), used) + 1):
            for requests in cuts(len(lengths), parts):
                for places in cuts(used, parts):
                    shares = [Share(*a, *b) for a, b in zip(requests, places, strict=True)]
                    if all(sum(lengths[s.first : s.last]) <= sum(rooms[s.left : s.right]) for s in shares):
                        best = min(best, cost_of(shares, lengths, law))
    return best


def test_a_long_prompt_takes_every_instance_and_a_short_one_does_not() -> None:
    assert partition([64000], [10**6] * 4, TYPICAL) == [Share(0, 1, 0, 4)]
    assert partition([100], [10**6] * 4, TYPICAL) == [Share(0, 1, 0, 1)]


def test_long_and_short_prompts_are_kept_apart() -> None:
    shares = partition([40000, 200], [10**6] * 4, TYPICAL)
    assert sorted(shares) == [Share(0, 1, 0, 3), Share(1, 2, 3, 4)]


def test_one_batch_where_the_search_never_splits() -> None:
    assert partition([40000, 200], [10**6] * 4, TYPICAL, split=False) == [Share(0, 2, 0, 4)]


def test_rooms_bind() -> None:
    """Instances come with the least used first; a prompt larger than one takes two."""
    assert partition([150], [100, 60], TYPICAL) == [Share(0, 1, 0, 2)]
    with pytest.raises(ValueError, match="do not fit"):
        partition([200], [100, 60], TYPICAL)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(10, 20000), min_size=1, max_size=5),
    rooms=st.lists(st.integers(5000, 60000), min_size=1, max_size=4),
)
def test_partition_covers_fits_and_is_the_best(lengths: list[int], rooms: list[int]) -> None:
    lengths.sort(reverse=True)
    rooms.sort(reverse=True)
    if sum(lengths) > sum(rooms):
        return
    shares = sorted(partition(lengths, rooms, TYPICAL))
    assert [share.first for share in shares] == [0, *(share.last for share in shares[:-1])]
    assert shares[-1].last == len(lengths)
    assert [share.left for share in shares] == [0, *(share.right for share in shares[:-1])]
    assert all(sum(lengths[s.first : s.last]) <= sum(rooms[s.left : s.right]) for s in shares)
    best = best_of_all(lengths, rooms, TYPICAL)
    assert cost_of(shares, lengths, TYPICAL) == pytest.approx(best)


# The memory gate


def peak_of(items: list[Footprint]) -> int:
    """The bound, written as it is defined."""
    by_rest = sorted(items, key=lambda item: -item.remaining)
    held = [sum(item.current for item in by_rest[: count + 1]) for count in range(len(by_rest))]
    return max(item.remaining * (place + 1) + held[place] for place, item in enumerate(by_rest))


FOOTPRINT = st.builds(Footprint, st.integers(1, 60), st.integers(0, 40))


@settings(max_examples=100, deadline=None)
@given(running=st.lists(FOOTPRINT, max_size=8), new=FOOTPRINT, slots=st.integers(1, 700), joins=st.booleans())
def test_memory_gate_is_the_bound(running: list[Footprint], new: Footprint, slots: int, joins: bool) -> None:
    gate = MemoryGate([] if joins else running, slots)
    for item in running if joins else []:
        gate.add(item)
    assert gate.fits(new) == (peak_of([*running, new]) <= slots)


# The loop


@dataclass(frozen=True)
class Watched(ModelBackendConfig):
    """The model one iteration at a time, with a list of the plans that it timed."""

    plans: list[IterationPlan] = field(default_factory=list)

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> ModelBackend:
        plans = self.plans

        class Backend(ModelBackend):
            def __init__(self) -> None:
                super().__init__(cost, noise)
                self.can_run_ahead = False

            def submit(self, plan: IterationPlan) -> None:
                plans.append(plan)
                super().submit(plan)

        return Backend()


def test_a_backend_that_cannot_look_ahead_gives_the_same_times() -> None:
    sim = simulation(*SCHEME, "cluster.gpus=2", "kv.capacity_tokens=2600", transfer_token_s=TOKEN_S)
    rows = [(0.0, 500, 40), (0.05, 1400, 30), (0.2, 900, 60), (0.3, 20, 8)]
    watched = Watched()
    ahead, single = replay(sim, rows), replay(replace(sim, backend=watched), rows)
    for name in ("ttft_s", "e2e_s", "max_gap_s"):
        assert column(single, name) == pytest.approx(column(ahead, name))
    for name in ("decode_tokens", "context_tokens", "decode_per_group"):
        assert single.iterations[name].to_pylist() == ahead.iterations[name].to_pylist()
    assert len(watched.plans) == single.summary["iterations"]
    released = [request for plan in watched.plans for request in plan.released]
    assert len(released) == len(set(released)) and 1 <= len(released) < len(rows)  # the last has no plan after it
    for plan in watched.plans:
        if not plan.prefill:
            assert [batch.group for batch in plan.decode] == [index for members in plan.rings for index in members]


def test_prefills_are_timed_as_plans_striped_over_their_ring() -> None:
    sim = simulation(*SCHEME, "cluster.gpus=4", transfer_token_s=TOKEN_S)
    watched = Watched()
    rows = [(0.0, 4001, 3), (0.0, 3, 3), (0.0, 30, 1), (0.01, 6002, 20), (0.02, 77, 5)]
    result = replay(replace(sim, backend=watched), rows)
    chunks = [chunk for plan in watched.plans for chunk in plan.prefill]
    assert sorted((chunk.request.id, chunk.tokens) for chunk in chunks) == [(i, row[1]) for i, row in enumerate(rows)]
    assert all((chunk.group == -1) == (rows[chunk.request.id][2] == 1) for chunk in chunks)
    plans = [plan for plan in watched.plans if plan.prefill]
    for plan in plans:
        (members,) = plan.rings
        for shards in [chunk.shards for chunk in plan.prefill] + [plan.shards(4)]:
            on_ring = [shards[index] for index in members]
            assert sum(on_ring) == sum(shards)
            assert max(on_ring) - min(on_ring) <= 1
    recorded = [row["prefill_per_group"] for row in result.iterations.to_pylist() if row["prefill_tokens"]]
    assert sorted(recorded) == sorted(list(plan.shards(4)) for plan in plans)


def test_a_request_alone() -> None:
    """The programme picks the degree with the least T(k); decodes stay on one instance, where the KV is."""
    sim = simulation(*SCHEME, "cluster.gpus=4", transfer_token_s=TOKEN_S)
    result = replay(sim, [(0.0, 8000, 4)])
    best = min(range(1, 5), key=lambda degree: prefill_s(degree, 8000))
    assert best == 4
    assert column(result, "ttft_s") == [pytest.approx(prefill_s(4, 8000))]
    gaps = [decode_s(1, 8001 + step) for step in range(3)]
    assert column(result, "e2e_s") == [pytest.approx(prefill_s(4, 8000) + sum(gaps))]
    (prefill,) = loop_rows(result, "loongserve/batch0")
    assert prefill["prefill_per_group"] == [2000] * 4
    assert [row["decode_per_group"] for row in loop_rows(result, "loongserve/main")] == [[1, 0, 0, 0]] * 3


def test_overlap_is_an_option() -> None:
    sim = simulation(*SCHEME, "cluster.gpus=4", "scheme.ring_overlap=true", transfer_token_s=TOKEN_S)
    result = replay(sim, [(0.0, 64000, 1)])
    assert column(result, "ttft_s") == [pytest.approx(prefill_s(4, 64000, overlap=True))]


def test_paused_decodes_generate_nothing() -> None:
    """One instance: the second prompt takes it after ten iterations, and the first request waits for its prefill."""
    sim = simulation(*SCHEME, "cluster.gpus=1")
    result = replay(sim, [(0.0, 1000, 100), (0.06, 300, 3)])
    first = prefill_s(1, 1000)
    tenth = first + sum(decode_s(1, 1001 + step) for step in range(10))
    assert column(result, "queueing_s")[1] == pytest.approx(tenth - 0.06)
    assert column(result, "prefill_s")[1] == pytest.approx(prefill_s(1, 300))
    after = decode_s(2, 1000 + 10 + 1 + 301)
    assert column(result, "max_gap_s")[0] == pytest.approx(prefill_s(1, 300) + after)
    assert column(result, "max_gap_s")[1] == pytest.approx(decode_s(2, 1000 + 10 + 1 + 301 + 2))
    assert result.summary["paused_batches"] == 1
    assert result.summary["macro_iterations"] == 2


def test_decodes_on_other_instances_go_on() -> None:
    sim = simulation(*SCHEME, "cluster.gpus=2", transfer_token_s=TOKEN_S)
    result = replay(sim, [(0.0, 1000, 100), (0.2, 4000, 3)])
    assert result.summary["paused_batches"] == 0
    assert column(result, "max_gap_s")[0] < 0.014 < prefill_s(1, 4000) / 10  # the longer context sets the pace
    main, side = loop_rows(result, "loongserve/main"), loop_rows(result, "loongserve/batch0")
    prefill = side[1]
    assert prefill["prefill_per_group"] in ([4000, 0], [0, 4000])
    beside = [row for row in main if prefill["start_s"] <= row["start_s"] < prefill["end_s"]]
    assert len(beside) > 10
    # Both decode in lockstep afterwards, each on its instance.
    assert any(sorted(row["decode_per_group"]) == [1, 1] for row in main)


def test_kv_fills_the_fullest_instance_and_the_rest_is_released() -> None:
    """150 tokens on two instances of 100: 100 and 50; the one with room is master, both read."""
    sim = simulation(*SCHEME, "cluster.gpus=2", "kv.capacity_tokens=100", transfer_token_s=TOKEN_S, decode_token_s=1e-3)
    result = replay(sim, [(0.0, 150, 3)])
    (row, _) = loop_rows(result, "loongserve/main")
    assert sorted(row["decode_per_group"]) == [0, 1]
    # Attention is that of the fuller instance: its 100 tokens, not the 51 of the master.
    law = {**COEFFICIENTS, "decode_token_s": 1e-3}
    exchange = (40 * 128 * 2 + 40 * 129 * 4) / (2 * 8 * 128 * 2)  # a query's exchange in tokens of KV
    linear = law["linear_base_s"] + law["linear_token_s"]
    expected = linear + 0.001 + 1e-3 * 100 + 0.0005 + 2e-6 + max(1, round(2 * exchange)) * TOKEN_S
    assert row["end_s"] - row["start_s"] == pytest.approx(expected)


def test_a_large_decode_batch_grows_into_idle_instances() -> None:
    rows = [(0.0, 10, 20)] * 9
    alone = replay(simulation(*SCHEME, "cluster.gpus=4"), rows)
    grown = replay(simulation(*SCHEME, "cluster.gpus=4", "scheme.compute_bound_batch=2"), rows)
    assert max(sum(n > 0 for n in row["decode_per_group"]) for row in loop_rows(grown, "loongserve/main")) == 4
    widest = max(loop_rows(grown, "loongserve/main"), key=lambda row: row["decode_tokens"])
    assert sum(widest["decode_per_group"]) == 9
    assert max(widest["decode_per_group"]) <= 3
    assert column(grown, "status") == column(alone, "status") == ["completed"] * 9


def test_slots_exhausted_the_latest_request_is_prefilled_again() -> None:
    sim = simulation(*SCHEME, "cluster.gpus=1", "kv.capacity_tokens=100")
    result = replay(sim, [(0.0, 40, 30), (0.0, 40, 30)])
    assert column(result, "preemptions") == [0, 1]
    assert column(result, "emitted_tokens") == [30, 30]
    prefills = [row for row in result.iterations.to_pylist() if row["prefill_tokens"]]
    again = prefills[-1]["prefill_tokens"]
    assert 40 < again < 70  # input and output so far
    assert sum(row["prefill_tokens"] for row in prefills) == 80 + again


def test_assumed_output_holds_requests_back() -> None:
    """Two prompts of 40 in 100 slots: with 8 tokens assumed both start, with 30 the second waits."""
    rows = [(0.0, 40, 5), (0.0, 40, 5)]
    both = replay(simulation(*SCHEME, "cluster.gpus=1", "kv.capacity_tokens=100"), rows)
    long = ("scheme=loongserve", "scheme.max_new_tokens=30", "cluster.gpus=1", "kv.capacity_tokens=100")
    one = replay(simulation(*long), rows)
    assert column(both, "queueing_s") == [0.0, 0.0]
    assert column(one, "queueing_s")[1] > column(one, "ttft_s")[0]


def test_kv_is_migrated_to_make_room() -> None:
    """Two decodes sit on two instances; a prompt that needs more than none is served on the one that is emptied."""
    sim = simulation(*SCHEME, "cluster.gpus=2", "kv.capacity_tokens=4000", transfer_token_s=TOKEN_S)
    result = replay(sim, [(0.0, 1000, 150), (0.2, 900, 120), (0.6, 3000, 3)])
    assert result.summary["migrated_tokens"] > 900
    assert result.summary["paused_batches"] == 0
    assert column(result, "status") == ["completed"] * 3
    last = loop_rows(result, "loongserve/main")[-1]
    assert last["decode_tokens"] >= 1


def test_short_prompts_overtake_a_long_one_a_bounded_number_of_times() -> None:
    """A decode holds an instance, the long prompt needs both and waits; a short one may pass it, or wait beside it."""
    rows = [(0.0, 500, 150), (0.2, 4000, 2), (0.2, 20, 2)]
    options = (*SCHEME, "cluster.gpus=2", "kv.capacity_tokens=2600")
    overtaken = column(replay(simulation(*options), rows), "queueing_s")
    strict = column(replay(simulation(*options, "scheme.max_out_of_order=0"), rows), "queueing_s")
    assert overtaken[2] < overtaken[1]
    assert strict[2] == strict[1]


def test_options_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"scheme\.max_batched_tokens=0"):
        LoongServe(max_batched_tokens=0)
    with pytest.raises(InputError, match=r"scheme\.max_prefill_s=soon"):
        LoongServe(max_prefill_s="soon")
    with pytest.raises(InputError, match=r"scheme\.max_prefill_s=tuned"):
        simulation("scheme=loongserve", "scheme.max_prefill_s=tuned").run()
    assert LoongServe(max_prefill_s="tuned").tunable() == {"max_prefill_s": [0.5, 1.0, 2.0, 5.0]}
    with pytest.raises(InputError, match=r"scheme\.split_batches=often"):
        simulation("scheme=loongserve", "scheme.split_batches=often").run()
    assert LoongServe(split_batches="tuned").tunable() == {"split_batches": [True, False]}
    assert LoongServe(tp="auto").tunable(ClusterSpec(8, 2)) == {"tp": [2, 4, 8]}


def test_prompts_beyond_all_instances_are_refused() -> None:
    sim = simulation(*SCHEME, "cluster.gpus=2", "scheme.max_batched_tokens=100", "kv.capacity_tokens=1000")
    result = replay(sim, [(0.0, 200, 2), (0.0, 199, 2), (0.0, 1999, 3)])
    assert column(result, "reason") == ["prompt_limit", None, "kv_capacity"]


ROWS = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=14)
SIMULATIONS = {
    gpus: simulation(
        "scheme=loongserve", f"cluster.gpus={gpus}", "kv.capacity_tokens=300", "scheme.max_new_tokens=4",
        "scheme.compute_bound_batch=3", "scheme.max_wait_tokens=3", transfer_token_s=TOKEN_S,
    )
    for gpus in (1, 2, 4)
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    gpus=st.sampled_from([1, 2, 4]),
    capacity=st.integers(210, 500),
    order=st.sampled_from(["fcfs", "srpf", "deadline"]),
)
def test_nothing_is_lost(rows: list[tuple[float, int, int]], gpus: int, capacity: int, order: str) -> None:
    sim = SIMULATIONS[gpus]
    sim = replace(sim, kv=replace(sim.kv, capacity_tokens=capacity), policy=replace(sim.policy, order=order))
    result = replay(sim, sorted(rows))
    assert set(column(result, "status")) == {"completed"}
    assert column(result, "emitted_tokens") == [row[2] for row in sorted(rows)]


# Memory, and decodes whose KV is given


def kv_of(*words: str, command: str = "scenario") -> tuple[int, int]:
    """Slots of an instance, and prompt tokens that it computes at once."""
    sim = build(compose(["scheme=loongserve", *words], command=command))
    run = Run(sim, sim.arrivals.apply(sim.trace, None, 0))
    limits = run.instances[0].state.limits
    return limits.instance_slots, limits.instance_tokens


def test_activations_are_those_of_the_longest_prefill() -> None:
    """Qwen3-14B: stream and FFN are 2 * 5120 + 3 * 17408 values of 2 bytes a token, ring buffers 2 * 4096 bytes."""
    slots, tokens = kv_of("prefill_tokens=32768")
    shorter, few = kv_of("prefill_tokens=16384")
    assert (tokens, few) == (32768, 16384)
    token_bytes = (2 * 5120 + 3 * 17408) * 2 + 2 * 4096
    assert shorter - slots == pytest.approx(16384 * token_bytes / (40 * 4096), abs=16)
    assert kv_of("prefill_tokens=100")[1] == 8192  # short prompts are batched
    assert kv_of("prefill_tokens=100", "scheme.max_batched_tokens=32768") == (slots, 32768)
    fixed = ("trace=fixed", "trace.prompt_tokens=20000", "trace.requests=2", "arrivals=closed_loop")
    assert kv_of(*fixed, "trace.output_tokens=301", command="simulate")[1] == 20300  # with its output, if dropped


def preloaded(capacity: int, contexts: list[int], gpus: int = 3) -> list[dict[int, int]]:
    """Where the KV of given decodes lies, one after the other; `gpu` is always the last."""
    sim = simulation(*SCHEME, f"cluster.gpus={gpus}", f"kv.capacity_tokens={capacity}", "trace=fixed")
    run = Run(sim, sim.arrivals.apply(sim.trace, 1.0, 0))
    instance = run.instances[0]
    places: list[dict[int, int]] = []
    for tokens in contexts:
        request = Request(len(run.output_tokens), 0.0, tokens)
        request.emitted = 1
        run.output_tokens.append(5)
        run.ledger.inject(request)
        if not instance.preload(request, gpus - 1):
            places.append({})
            continue
        places.append(dict(instance.state.slots.held[request.id].tokens))
        instance.audit()
    run.close()
    return places


def test_given_decodes_go_to_the_fullest_instance_with_room() -> None:
    """Instances of 100: 60 on the first; 30 beside it; 50 on the second; 9 on the first (one slot is for the next)."""
    assert preloaded(100, [60, 30, 50, 9]) == [{0: 60}, {0: 30}, {1: 50}, {0: 9}]
    assert preloaded(100, [60, 40]) == [{0: 60}, {1: 40}]


def test_a_given_decode_without_room_anywhere_is_refused() -> None:
    assert preloaded(100, [90, 90, 90, 40]) == [{0: 90}, {1: 90}, {2: 90}, {}]


def test_given_decodes_leave_an_instance_to_prefills() -> None:
    """Four decodes of 1,000 fit on two of four instances: a prompt runs on the others, and no decode waits for it."""
    words = (
        "latency=affine",
        "scheme=loongserve",
        "kv.capacity_tokens=2200",
        "decodes_per_gpu=1",
        "decode_context=1000",
    )
    words += ("decode_tokens=16", "scheme.max_new_tokens=16", "prefill_tokens=2000", "prefills=3", "concurrency=2")
    sim = build(compose(list(words), command="scenario"))
    replayed = ScenarioRun(sim, Scenario(1, 1000, 16, 2))
    replayed.execute(check=True)
    summary = replayed.outcome().summary
    assert replayed.replay.instances[0].counters()["paused_batches"] == 0
    assert summary["max_gap_s"] < min(summary["prefill_s"]) / 2
    used = [share for row in replayed.outcome().iterations.to_pylist() for share in row["decode_per_group"][2:]]
    assert sum(used) == 0
