"""Every registered scheme, with every policy bundle and model: it runs, loses nothing, and refuses what it must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scheme_cases import column, simulation

from confsim.api import Simulation, build, compose
from confsim.outcome.result import Result
from confsim.run.engine import Run
from confsim.setup.configuration import options
from traces.load import Load
from traces.trace import SCHEMA, Trace

SCHEMES = options("scheme")
POLICIES = options("policy")
CLUSTERS = {
    "llama3_1_8b": ("cluster.gpus=4",),
    "qwen3_14b": ("cluster.gpus=4",),
    "qwen3_32b": ("cluster.gpus=8", "cluster.tp=2"),
}
TWO_GROUPS = ("disaggregated",)  # schemes that need more than one group of GPUs
TINY = [(0.0, 700, 6), (0.0, 40, 1), (0.01, 2500, 12), (0.02, 9000, 3), (0.3, 33, 40), (0.31, 16, 2), (5.0, 1200, 8)]
COMPILED: dict[str, dict[tuple[int, int], Any]] = {}  # latency models by model, as one simulation keeps them


def load_of(rows: list[tuple[float, int, int]]) -> Load:
    columns: dict[str, Any] = {field.name: [None] * len(rows) for field in SCHEMA}
    columns["request_id"] = list(range(len(rows)))
    for index, name in enumerate(("arrival_s", "prompt_tokens", "output_tokens")):
        columns[name] = [row[index] for row in rows]
    trace = Trace(pa.table(columns, schema=SCHEMA), 0, {"name": "hand-made"})
    return Load(trace, np.array([row[0] for row in rows]), "recorded", None, label="hand-made")


def fitted(scheme: str, policy: str, model: str, *overrides: str) -> Simulation:
    config = compose(
        [f"scheme={scheme}", f"policy={policy}", f"model={model}", "trace=fixed", *CLUSTERS[model], *overrides]
    )
    return replace(build(config), compiled=COMPILED.setdefault(model, {}))


def replay(sim: Simulation, rows: list[tuple[float, int, int]]) -> Result:
    """Audited after every event; afterwards nothing may hold KV."""
    run = Run(sim, load_of(rows))
    run.execute(None, check=True)
    assert run.ledger.injected == len(rows)
    for instance in run.instances:
        assert instance.outstanding_requests == 0
        assert instance.outstanding_tokens == 0
        assert all(pool.held == 0 for pool in instance.pools())
    return run.result()


def small(scheme: str, *overrides: str) -> Simulation:
    """A closed-form law on the fewest GPUs that the scheme runs on."""
    gpus = 2 if scheme in TWO_GROUPS else 1
    return simulation(f"scheme={scheme}", f"cluster.gpus={gpus}", *overrides)


@pytest.mark.parametrize("model", CLUSTERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_conservation_with_every_policy_and_model(scheme: str, policy: str, model: str) -> None:
    result = replay(fitted(scheme, policy, model), TINY)
    counts = result.summary["requests"]
    assert counts["completed"] == len(TINY)
    assert counts["rejected"] == counts["unfinished"] == 0
    assert column(result, "emitted_tokens") == [row[2] for row in TINY]
    assert result.summary["tokens"]["emitted"] == sum(row[2] for row in TINY)
    assert sum(result.iterations["prefill_tokens"].to_pylist()) == sum(row[1] for row in TINY)
    assert sum(result.iterations["decode_tokens"].to_pylist()) == sum(row[2] - 1 for row in TINY)
    assert min(column(result, "queueing_s")) >= 0
    assert min(column(result, "prefill_s")) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_s6_two_rows_run(scheme: str, policy: str) -> None:
    result = replay(fitted(scheme, policy, "qwen3_14b"), TINY[:2])
    assert result.summary["scheme"] == scheme
    assert column(result, "status") == ["completed"] * 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_configuration_same_result(scheme: str) -> None:
    noisy = fitted(scheme, "fcfs", "qwen3_14b", "latency.noise=0.05")
    first, second = replay(noisy, TINY), replay(noisy, TINY)
    assert first.requests.equals(second.requests)
    assert first.iterations.equals(second.iterations)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_s1_a_request_that_can_never_fit_is_rejected_at_arrival(scheme: str) -> None:
    """50 blocks of 16, a prompt of 900 and a normal one."""
    result = replay(small(scheme, "kv.capacity_tokens=800"), [(0.0, 900, 4), (0.1, 100, 4)])
    assert column(result, "status") == ["rejected", "completed"]
    assert result.summary["rejected_by"] == {"kv_capacity": 1}
    counts = result.summary["requests"]
    assert counts["injected"] == counts["completed"] + counts["rejected"] + counts["unfinished"] == 2
    assert any("rejected" in warning for warning in result.summary["warnings"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_s5_context_limit(scheme: str) -> None:
    """Prompt + output at the limit is served, one token more is not."""
    sim = small(scheme, "model.max_context_tokens=8192", "kv.capacity_tokens=40000")
    result = replay(sim, [(0.0, 6758, 500), (0.1, 8000, 192), (0.2, 8000, 193)])
    assert column(result, "status") == ["completed", "completed", "rejected"]
    assert column(result, "reason") == [None, None, "context_limit"]
    assert result.summary["rejected_by"] == {"context_limit": 1}
    assert any("context_limit" in warning for warning in result.summary["warnings"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_s8_a_full_pool_makes_the_second_wait(scheme: str) -> None:
    """100 tokens of KV, two requests of 60: pools are audited after every event."""
    result = replay(small(scheme, "kv.capacity_tokens=100"), [(0.0, 60, 5), (0.0, 60, 5)])
    assert column(result, "status") == ["completed"] * 2
    first, second = column(result, "ttft_s")
    assert column(result, "queueing_s")[1] >= first
    assert second > first


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scarce_kv_is_conserved_and_everything_ends(scheme: str) -> None:
    rows = [(0.01 * index, 40 + 13 * (index % 7), 1 + 9 * (index % 8)) for index in range(40)]
    result = replay(small(scheme, "kv.capacity_tokens=400"), rows)
    assert column(result, "status") == ["completed"] * len(rows)
    assert column(result, "emitted_tokens") == [row[2] for row in rows]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefix_cache_on(scheme: str) -> None:
    """With reuse on, a scheme reuses or says that it cannot."""
    config = compose([f"scheme={scheme}", "trace=toolagent", "trace.requests=60", "kv.prefix_cache=true"])
    sim = replace(build(config), compiled=COMPILED.setdefault("qwen3_14b", {}))
    result = sim.run(check=True)
    assert result.summary["requests"]["completed"] == 60
    note = any("prefix_cache" in warning for warning in result.summary["warnings"])
    assert note or result.summary["prefix_hit_tokens"] > 0
