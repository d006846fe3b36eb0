"""Cost of many instances: `pytest tests/benchmarks/test_bench_routers.py --benchmark-only -s`. CPU time, one core."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import confsim

RATE = 2.0  # of one instance, requests per second
INSTANCES = 16
RATIO = 1.5  # an iteration of sixteen instances against one of a single instance
ROUNDS = 3


@pytest.mark.parametrize("scheme", ["conflux", "chunked_prefill"])
def test_sixteen_instances_cost_what_one_costs(benchmark: Any, scheme: str, shared_traces: Path) -> None:
    path = shared_traces / "conversation_trace.jsonl"
    words = ["trace=mooncake", f"trace.path={path}", f"scheme={scheme}"]
    trace = confsim.load_trace(confsim.compose(words))

    def cost_us(instances: int) -> float:
        cfg = confsim.compose([*words, f"cluster.instances={instances}", f"rate={RATE * instances}"])
        simulation = confsim.build(cfg, trace)
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.process_time()
            iterations = simulation.run().summary["iterations"]
            best = min(best, (time.process_time() - began) / iterations * 1e6)
        return best

    one = cost_us(1)
    many = benchmark.pedantic(lambda: cost_us(INSTANCES), rounds=1)
    print(f"\n{scheme}: {one:.1f} us an iteration of 1 instance, {many:.1f} us of {INSTANCES} ({many / one:.2f})")
    assert many < RATIO * one
