"""MuxWise: two loops on disjoint SMs, against hand calculation, and what it must not lose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from scheme_cases import LAW, column, loop_rows, replay, simulation

from confsim.api import build, compose
from confsim.errors import InputError
from confsim.latency.share import SmShares
from confsim.run.plan import WHOLE_GPU
from confsim.schemes.mux_cost import Division, automatic_divisions, decode_sms
from confsim.schemes.muxwise import MuxWise
from confsim.specs import GpuSpec

A100 = GpuSpec("a100_sxm", 1, 1.0, 1.0, 1.0, 108)
H100 = GpuSpec("h100_sxm", 85520809984, 3.35e12, 9.89e14, 4.5e11, 132)
ARTIFACT = ("scheme=muxwise", "cluster.gpus=4", "scheme.contention=mean")
SCHEME = (*ARTIFACT, "scheme.split=best_fit", "scheme.async_schedule=true")
WORST, MEAN = 1.3, 1.15


@dataclass(frozen=True)
class Hand:
    """The law of `scheme_cases` on `sms` SMs, written out."""

    sms: int = 132

    @property
    def _speeds(self) -> Any:
        return SmShares().speeds(H100, self.sms, "linear")

    def decode(self, count: int, context: int) -> float:
        speeds = self._speeds
        linear = (0.008 + 40e-6) / speeds.bandwidth + 40e-6 * (count - 1) / speeds.compute
        head = (0.0005 + 2e-6) / speeds.bandwidth + 2e-6 * (count - 1) / speeds.compute
        return linear + head + (0.001 + 1e-6 * context) / speeds.decode_attention

    def prefill(self, tokens: int, count: int = 1) -> float:
        speeds = self._speeds
        linear = (0.008 + 40e-6) / speeds.bandwidth + 40e-6 * (tokens - 1) / speeds.compute
        head = (0.0005 + 2e-6) / speeds.bandwidth + 2e-6 * (count - 1) / speeds.compute
        return linear + head + 4e-9 * tokens * tokens / 2 / 4 / speeds.prefill_attention


def test_partitions_of_sixteen_sms() -> None:
    assert decode_sms(H100, 16) == [20, 36, 52, 68, 84, 100, 116]
    assert decode_sms(GpuSpec("a100_sxm", 1, 1.0, 1.0, 1.0, 108), 16) == [12, 28, 44, 60, 76, 92]


def test_alone_each_phase_has_the_whole_gpu() -> None:
    result = replay(simulation(*SCHEME), [(0.0, 1000, 3)])
    assert column(result, "ttft_s") == [pytest.approx(Hand().prefill(1000))]
    gaps = Hand().decode(1, 1001), Hand().decode(1, 1002)
    assert column(result, "e2e_s") == [pytest.approx(Hand().prefill(1000) + sum(gaps))]


def test_prefill_beside_decode_by_hand() -> None:
    """A prompt arrives during a decode iteration on the whole GPU, waits for its end, then runs on 112 of 132 SMs."""
    result = replay(simulation(*SCHEME), [(0.0, 1000, 200), (0.1, 8000, 4)])
    decodes = loop_rows(result, "muxwise decode")
    start = next(row["end_s"] for row in decodes if row["end_s"] > 0.1)
    assert column(result, "queueing_s")[1] == pytest.approx(start - 0.1)
    prefill = 1.015 * Hand(112).prefill(8000)
    assert column(result, "prefill_s")[1] == pytest.approx(prefill)
    done = start + prefill
    for row in decodes:
        beside = start <= row["start_s"] < done
        sms, factor = (20, MEAN) if beside else (132, 1.0)
        solo = Hand(sms).decode(row["decode_tokens"], row["context_tokens"])
        assert row["end_s"] - row["start_s"] == pytest.approx(solo * factor)
        assert row["predicted_s"] == pytest.approx(solo)
    # it joins the decodes at the next iteration, which does not wait for it
    joined = next(row for row in decodes if row["decode_tokens"] == 2)
    assert joined["start_s"] == next(row["end_s"] for row in decodes if row["end_s"] >= done)
    prefills = loop_rows(result, "muxwise prefill")
    assert [row["prefill_tokens"] for row in prefills] == [1000, 8000]
    assert prefills[1]["start_s"] == pytest.approx(start) and prefills[1]["end_s"] == pytest.approx(done)


@pytest.mark.parametrize("sms", [20, 36, 52, 68, 84, 100, 116])
def test_decode_gets_the_fewest_sms_that_meet_the_target_at_worst(sms: int) -> None:
    target = Hand(sms).decode(1, 5005) * WORST  # met up to context 5005
    result = replay(simulation(*SCHEME, f"slo.tbt_s={target!r}"), [(0.0, 5000, 8), (0.01, 30000, 1)])
    beside = [row for row in loop_rows(result, "muxwise decode") if row["end_s"] - row["start_s"] > 0][:7]
    for row in beside:
        context = row["context_tokens"]
        expected = sms if context <= 5005 else min(sms + 16, 116)
        solo = Hand(expected).decode(1, context)
        assert row["end_s"] - row["start_s"] == pytest.approx(solo * MEAN)


def test_largest_share_where_no_share_meets_the_target() -> None:
    result = replay(simulation(*SCHEME, "slo.tbt_s=0.001"), [(0.0, 5000, 4), (0.01, 30000, 1)])
    row = loop_rows(result, "muxwise decode")[0]
    assert row["end_s"] - row["start_s"] == pytest.approx(Hand(116).decode(1, 5001) * MEAN)


def test_decode_meets_the_target_at_any_sampled_contention() -> None:
    sim = simulation(*SCHEME, "scheme.contention=sampled", "slo.tbt_s=0.03")
    result = replay(sim, [(0.0, 3000, 300), (0.5, 60000, 1), (4.0, 60000, 1)])
    gaps = [row["end_s"] - row["start_s"] for row in loop_rows(result, "muxwise decode") if row["decode_tokens"]]
    assert max(gaps) <= 0.03 * (1 + 1e-9)
    beside = [row for row in loop_rows(result, "muxwise decode") if row["predicted_s"] < 0.999 * gap(row)]
    factors = [gap(row) / row["predicted_s"] for row in beside]
    assert len(set(factors)) > 50 and min(factors) > 1.0 and max(factors) <= 1.3
    again = replay(sim, [(0.0, 3000, 300), (0.5, 60000, 1), (4.0, 60000, 1)])
    assert again.iterations.equals(result.iterations)


def gap(row: dict[str, Any]) -> float:
    return float(row["end_s"] - row["start_s"])


def test_layers_cover_about_one_decode_iteration() -> None:
    """Groups of ceil(T_d * N_T / T_P) layers: a preempting prompt starts at the first group end after its arrival."""
    sim = simulation(*SCHEME, "scheme.preempt_prefill=true", "slo.ttft_s=20")
    result = replay(sim, [(0.0, 1000, 200), (0.1, 40000, 1), (0.5, 500, 1)])
    start = 0.1 + column(result, "queueing_s")[1]
    layer = 1.015 * Hand(112).prefill(40000) / 40
    guarded = Hand(20).decode(1, 1010) * WORST
    layers = -(-guarded // layer)
    assert layers == 1.0
    waited = 0.1 + 0.4 + column(result, "queueing_s")[2] - start
    assert waited / layer == pytest.approx(round(waited / layer))
    assert result.summary["prefill_preemptions"] == 1
    first, second = 1.015 * Hand(112).prefill(40000), 1.015 * Hand(112).prefill(500)
    assert column(result, "prefill_s")[1] == pytest.approx(first + second)
    assert column(result, "prefill_s")[2] == pytest.approx(second)
    tokens = [row["prefill_tokens"] for row in loop_rows(result, "muxwise prefill")]
    assert tokens == [1000, 0, 500, 40000]


def test_no_preemption_of_a_prompt_that_would_miss_its_deadline() -> None:
    first = 1.015 * Hand(112).prefill(40000)
    sim = simulation(*SCHEME, "scheme.preempt_prefill=true", f"slo.ttft_s={first + 0.02}")
    result = replay(sim, [(0.0, 1000, 200), (0.1, 40000, 1), (0.5, 500, 1)])
    assert result.summary["prefill_preemptions"] == 0
    assert column(result, "prefill_s")[1] == pytest.approx(first)


def test_prompts_are_prefilled_together_up_to_the_cap() -> None:
    sim = simulation(*SCHEME, "scheme.max_batched_tokens=3000")
    result = replay(sim, [(0.0, 100, 1), (0.001, 1000, 1), (0.001, 2000, 1), (0.001, 4000, 1)])
    rows = loop_rows(result, "muxwise prefill")
    assert [row["prefill_tokens"] for row in rows] == [100, 3000, 4000]
    whole = Hand().prefill(1000, 2) + 40e-6 * 2000 + 4e-9 * 2000 * 2000 / 2 / 4
    assert rows[1]["end_s"] - rows[1]["start_s"] == pytest.approx(whole)


def test_decode_waits_for_layers_in_flight_before_it_takes_their_kv() -> None:
    """The pool is full and the victim is being prefilled: its group of layers ends, then it gives its blocks up."""
    sim = simulation(*SCHEME, f"kv.capacity_tokens={103 * 4}", linear_token_s=400e-6)
    result = replay(sim, [(0.0, 16, 100), (0.05, 1600, 4)])
    assert column(result, "preemptions") == [0, 1]
    assert column(result, "status") == ["completed"] * 2
    assert column(result, "emitted_tokens") == [100, 4]
    # the prompt starts over once the first request has ended
    prefill = loop_rows(result, "muxwise prefill")[-1]
    assert prefill["prefill_tokens"] == 1600
    assert prefill["start_s"] >= column(result, "finish_s")[0]


def test_memory_pays_for_graphs_of_every_partition() -> None:
    def capacity(*overrides: str) -> dict[str, Any]:
        kv: dict[str, Any] = build(compose(["trace=fixed", "trace.requests=1", *overrides])).run().summary["kv"]
        return kv

    mux = capacity("scheme=muxwise", "scheme.split=best_fit")
    plain = capacity(
        "scheme=muxwise", "scheme.split=best_fit", "scheme.graph_memory=0", "scheme.longest_prompt_tokens=8192"
    )
    assert mux["groups"] == 1 and mux["gpus_per_group"] == 4
    assert mux["capacity_tokens"] < plain["capacity_tokens"]
    extra = -mux["terms"]["terms"]["extra"]
    assert extra == int(0.062 * 85520809984) - 2**30 + 7 * 2 * 4 * 2**20 + 392 * 2**20
    artifact = -capacity("scheme=muxwise")["terms"]["terms"]["extra"]  # six splits
    assert artifact == extra - 2 * 4 * 2**20


def test_requests_longer_than_the_activations_have_room_for_are_rejected() -> None:
    result = replay(simulation(*SCHEME, "scheme.longest_prompt_tokens=10000"), [(0.0, 9991, 10), (0.0, 9992, 10)])
    assert column(result, "status") == ["completed", "rejected"]
    assert column(result, "reason") == [None, "activation_memory"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_sms": 0},
        {"contention": "none"},
        {"worst_slowdown": 0.9},
        {"launch_overhead": -0.1},
        {"graph_memory": 1.0},
        {"split": "table"},
        {"sm_groups": 2},
        {"decodes_divisor": 0},
        {"layer_tokens": 0},
        {"preempt_prefill": True},
        {"divisions": []},
        {"divisions": [[112, 20]]},
        {"divisions": [[112, 20, 2]]},
        {"divisions": [[112, 20, 1], [56, 76, 25], [64, 68, 20]]},
        {"divisions": [[112, 20, 1]], "split": "best_fit"},
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"scheme.{next(iter(wrong))}"):
        MuxWise(**wrong)


def test_host_time_is_hidden_or_exposed() -> None:
    law = {**LAW, "iteration_overhead_s": 0.02}
    hidden = replay(simulation(*SCHEME, **law), [(0.0, 1000, 3)])
    assert column(hidden, "max_gap_s") == [pytest.approx(0.02)]
    exposed = replay(simulation(*SCHEME, "scheme.async_schedule=false", **law), [(0.0, 1000, 3)])
    assert column(exposed, "max_gap_s") == [pytest.approx(0.02 + Hand().decode(1, 1002))]


def test_best_fit_on_the_whole_gpu_when_nothing_is_prefilled() -> None:
    assert WHOLE_GPU == -1
    result = replay(simulation(*SCHEME), [(0.0, 100, 50)])
    for row in loop_rows(result, "muxwise decode"):
        assert gap(row) == pytest.approx(Hand().decode(1, row["context_tokens"]))


@pytest.mark.parametrize("policy", ["fcfs", "srpf", "deadline_waterfill"])
@pytest.mark.parametrize("split", ["artifact", "best_fit", "best_fit scheme.preempt_prefill=true"])
@pytest.mark.parametrize("extra", [(), ("kv.prefix_cache=true",), ("kv.admission=step", "latency.noise=0.05")], ids=str)
def test_nothing_is_lost_with_little_kv(policy: str, split: str, extra: tuple[str, ...]) -> None:
    overrides = ["scheme=muxwise", "trace=toolagent", "trace.requests=40", "kv.capacity_tokens=10000", "rate=8"]
    overrides += [f"policy={policy}", *f"scheme.split={split}".split(), *extra]
    result = build(compose(overrides)).run(check=True)
    counts = result.summary["requests"]
    assert counts["injected"] == 40 == counts["completed"] + counts["rejected"]
    done = [row for row in result.requests.to_pylist() if row["status"] == "completed"]
    assert all(row["emitted_tokens"] == row["output_tokens"] for row in done)
    starts = {row["loop"]: [] for row in result.iterations.to_pylist()}
    for row in result.iterations.to_pylist():
        starts[row["loop"]].append((row["start_s"], row["end_s"]))
    for spans in starts.values():  # a loop does one thing at a time
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))


# The artifact's split


def test_automatic_divisions_of_the_artifact() -> None:
    """Eight groups: from 112/20 to 72/60 of 132 SMs, from 84/24 to 54/54 of 108; all of a smaller GPU's few."""
    starts = [1, 12, 18, 24, 30, 36]
    assert automatic_divisions(H100, 8, 36, 8) == list(map(Division, [20, 28, 36, 44, 52, 60], starts))
    assert automatic_divisions(A100, 8, 36, 2) == list(map(Division, [24, 30, 36, 42, 48, 54], starts))
    assert automatic_divisions(A100, 4, 36, 2) == [Division(34, 1), Division(54, 36)]
    small = GpuSpec("h20", 1, 1.0, 1.0, 1.0, 78)
    assert automatic_divisions(small, 8, 36, 8) == [Division(22, 1), Division(30, 24), Division(38, 36)]
    assert automatic_divisions(GpuSpec("cpu", 1, 1.0, 1.0, 1.0, 1), 8, 36, 8) == []


@pytest.mark.parametrize("gpu", [H100, A100])
@pytest.mark.parametrize(("groups", "divisor"), [(8, 36), (8, 5), (4, 36), (5, 1)])
def test_automatic_rule_is_the_clamped_quotient(gpu: GpuSpec, groups: int, divisor: int) -> None:
    divisions = automatic_divisions(gpu, groups, divisor, 2)
    most = len(divisions)
    for count in range(1, 80):
        index = max(1, min(most, count * most // divisor))
        assert [row for row in divisions if count >= row.from_decodes][-1] == divisions[index - 1]


TABLE = "scheme.divisions=[[112,20,1],[96,36,3],[56,76,5]]"


@pytest.mark.parametrize(
    ("decodes", "sms", "overrides"),
    [(1, 20, ()), (11, 20, ()), (12, 28, ()), (2, 20, (TABLE,)), (3, 36, (TABLE,)), (5, 76, (TABLE,))],
)
def test_decodes_decide_the_split(decodes: int, sms: int, overrides: tuple[str, ...]) -> None:
    """`decodes` short prompts are prefilled in one batch; a long one comes while they decode on the whole GPU."""
    rows = [(0.0, 10, 1), *[(0.001, 100, 40)] * decodes, (0.06, 8000, 1)]
    result = replay(simulation(*ARTIFACT, *overrides), rows)
    row = next(row for row in loop_rows(result, "muxwise decode") if row["start_s"] > 0.06)
    assert row["decode_tokens"] == decodes
    assert gap(row) == pytest.approx(Hand(sms).decode(decodes, row["context_tokens"]) * MEAN)


def test_end_of_prefill_is_noticed_at_the_end_of_a_decode_step() -> None:
    """Its first token, the next prompt's start and the new split wait for it; the first decode is the next step's."""
    result = replay(simulation(*ARTIFACT), [(0.0, 1000, 200), (0.1, 8000, 4), (0.11, 6000, 1)])
    decodes, prefills = loop_rows(result, "muxwise decode"), loop_rows(result, "muxwise prefill")
    start = next(row["end_s"] for row in decodes if row["end_s"] > 0.1)
    done = start + 1.015 * Hand(112).prefill(8000)  # eight layers a step outlast every step
    assert prefills[1]["start_s"] == pytest.approx(start) and prefills[1]["end_s"] == pytest.approx(done)
    noticed = next(row["end_s"] for row in decodes if row["end_s"] >= done)
    assert noticed > done + 1e-3
    assert column(result, "ttft_s")[1] == pytest.approx(noticed - 0.1)
    assert next(row for row in decodes if row["decode_tokens"] == 2)["start_s"] == noticed
    assert prefills[2]["start_s"] == noticed
    for row in decodes:
        beside = start <= row["start_s"] < done or prefills[2]["start_s"] <= row["start_s"] < prefills[2]["end_s"]
        sms, factor = (20, MEAN) if beside else (132, 1.0)
        assert gap(row) == pytest.approx(Hand(sms).decode(row["decode_tokens"], row["context_tokens"]) * factor)


@pytest.mark.parametrize("layer_tokens", [65536, 8000, 1])
def test_layers_that_a_decode_step_launches(layer_tokens: int) -> None:
    """max(1, budget // tokens) of 40 layers a step: a short prompt idles between steps once they are run."""
    tokens = 400
    sim = simulation(*ARTIFACT, f"scheme.layer_tokens={layer_tokens}")
    result = replay(sim, [(0.0, 1000, 200), (0.1, tokens, 1)])
    decodes, prefill = loop_rows(result, "muxwise decode"), loop_rows(result, "muxwise prefill")[1]
    first = next(index for index, row in enumerate(decodes) if row["start_s"] == prefill["start_s"])
    layer = 1.015 * Hand(112).prefill(tokens) / 40
    per_step = max(1, layer_tokens // tokens)
    free, left = 0.0, 40
    for row in decodes[first:]:
        group = min(per_step, left)
        free, left = max(free, row["start_s"]) + group * layer, left - group
        if not left:
            break
    assert prefill["end_s"] == pytest.approx(free)
    assert column(result, "ttft_s")[1] == pytest.approx(
        next(row["end_s"] for row in decodes if row["end_s"] >= free) - 0.1
    )


@pytest.mark.parametrize("layer_tokens", [65536, 12000 * 4])
def test_split_stays_until_decode_drains_and_launched_layers_have_run(layer_tokens: int) -> None:
    """What decode steps have launched ends on its part of the SMs; what is left has the whole GPU."""
    tokens, steps = 12000, 4
    sim = simulation(*ARTIFACT, f"scheme.layer_tokens={layer_tokens}")
    result = replay(
        sim,
        [(0.0, 1000, steps + 2), (0.08, tokens, 1)],
    )
    decodes, prefill = loop_rows(result, "muxwise decode"), loop_rows(result, "muxwise prefill")[1]
    beside = [row for row in decodes if row["start_s"] >= prefill["start_s"]]
    launched = len(beside) * max(1, layer_tokens // tokens)
    assert beside and launched < 40
    part, whole = 1.015 * Hand(112).prefill(tokens) / 40, Hand().prefill(tokens) / 40
    assert launched * part > beside[-1]["end_s"] - prefill["start_s"]  # they outlast decode
    end = prefill["start_s"] + launched * part + (40 - launched) * whole
    assert prefill["end_s"] == pytest.approx(end)
    assert column(result, "ttft_s")[1] == pytest.approx(end - 0.08)


def test_split_does_not_follow_decodes_that_end_during_a_prefill() -> None:
    rows = [(0.0, 10, 1), *[(0.001, 100, 12)] * 11, (0.001, 100, 60), (0.06, 20000, 1)]
    result = replay(simulation(*ARTIFACT), rows)
    long = loop_rows(result, "muxwise prefill")[-1]
    beside = [row for row in loop_rows(result, "muxwise decode") if long["start_s"] <= row["start_s"] < long["end_s"]]
    assert {row["decode_tokens"] for row in beside} == {12, 1}
    for row in beside:
        assert gap(row) == pytest.approx(Hand(28).decode(row["decode_tokens"], row["context_tokens"]) * MEAN)


def test_artifact_exposes_host_time() -> None:
    law = {**LAW, "iteration_overhead_s": 0.02}
    result = replay(simulation(*ARTIFACT, **law), [(0.0, 1000, 3)])
    assert column(result, "max_gap_s") == [pytest.approx(0.02 + Hand().decode(1, 1002))]


def test_divisions_have_to_add_up_to_the_gpus_sms() -> None:
    with pytest.raises(InputError, match=r"scheme.divisions.*132"):
        replay(simulation(*ARTIFACT, "scheme.divisions=[[84,24,1]]"), [(0.0, 10, 1)])
