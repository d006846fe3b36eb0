"""Uniform sequence parallelism: both phases spread, one exchange, one pool."""

from __future__ import annotations

import pytest
from scheme_cases import column, loop_rows, replay, simulation

from confsim.api import build, compose

SCHEME = ("scheme=uniform_sp", "cluster.gpus=4", "slo.tbt_s=0.1")


def test_prefill_and_decode_alone_by_hand() -> None:
    result = replay(simulation(*SCHEME), [(0.0, 400, 3)])
    prefill = (0.008 + 40e-6 * 100) + (0.002 + 4e-6 * 100) + 4e-9 * 400 * 200 / 4 + (0.0005 + 2e-6)
    assert column(result, "ttft_s") == [pytest.approx(prefill)]
    # a decode costs every GPU the weights, and an exchange: one token goes to one of the four
    decode = (0.008 + 40e-6) + (0.002 + 4e-6) + (0.0005 + 2e-6) + 0.001
    gaps = decode + 1e-6 * 401, decode + 1e-6 * 402
    assert column(result, "e2e_s") == [pytest.approx(prefill + sum(gaps))]
    assert column(result, "max_gap_s") == [pytest.approx(gaps[1])]


def test_mixed_iteration_exchanges_both_phases_together_and_attends_in_turn() -> None:
    result = replay(simulation(*SCHEME, "slo.tbt_s=1.0"), [(0.0, 400, 20), (0.0, 400, 20), (0.1, 4002, 1)])
    mixed = [row for row in loop_rows(result, "uniform_sp") if row["prefill_tokens"] and row["decode_tokens"]]
    assert len(mixed) == 1
    row = mixed[0]
    assert sum(row["decode_per_group"]) == 2 and sum(row["prefill_per_group"]) == 4002
    stacked = [a + b for a, b in zip(row["decode_per_group"], row["prefill_per_group"], strict=True)]
    assert stacked == [1001] * 4
    linear, exchange, head = 0.008 + 40e-6 * 1001, 0.002 + 4e-6 * 1001, 0.0005 + 2e-6 * 2
    attention = 4e-9 * 4002 * 2001 / 4 + 0.001 + 1e-6 * row["context_tokens"]
    assert row["end_s"] - row["start_s"] == pytest.approx(linear + exchange + attention + head)


def test_iterations_fill_to_the_target() -> None:
    result = replay(simulation(*SCHEME, "slo.tbt_s=0.06"), [(0.0, 400, 60), (0.1, 20000, 1)])
    mixed = [row for row in loop_rows(result, "uniform_sp") if row["prefill_tokens"] and row["decode_tokens"]]
    assert len(mixed) > 4
    for row in mixed[:-1]:
        assert 0.0598 < row["end_s"] - row["start_s"] <= 0.06 * (1 + 1e-9)


def test_one_pool_over_all_gpus_without_replicas() -> None:
    """With 8 KV heads on 4 or 8 GPUs nothing is replicated: the pool is that of all groups together."""
    for gpus in (4, 8):
        sim = build(compose([*SCHEME, f"cluster.gpus={gpus}", "trace=fixed", "kv.capacity_tokens=16000"]))
        kv = sim.run().summary["kv"]
        assert (kv["groups"], kv["gpus_per_group"], kv["capacity_tokens"]) == (1, gpus, 16000 * gpus)


@pytest.mark.parametrize("policy", ["fcfs", "srpf", "deadline_waterfill"])
@pytest.mark.parametrize("extra", [(), ("kv.prefix_cache=true",), ("kv.admission=step",)], ids=str)
def test_nothing_is_lost_with_little_kv(policy: str, extra: tuple[str, ...]) -> None:
    overrides = [*SCHEME, "trace=toolagent", "trace.requests=40", "kv.capacity_tokens=10000", "rate=8"]
    result = build(compose([*overrides, f"policy={policy}", *extra])).run(check=True)
    counts = result.summary["requests"]
    assert counts["injected"] == 40 == counts["completed"] + counts["rejected"]
    done = [row for row in result.requests.to_pylist() if row["status"] == "completed"]
    assert all(row["emitted_tokens"] == row["output_tokens"] for row in done)
