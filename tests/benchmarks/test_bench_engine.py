"""Speed of the engine: `pytest tests/benchmarks/test_bench_engine.py --benchmark-only -s`.

Measured from parsed requests to in-memory metrics; imports, parsing and files are outside. One core. On a machine
that others use, seconds of CPU time say what the engine costs, and wall-clock what was to be had: both are printed,
the bars are on CPU time.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import confsim
from confsim.outcome.result import Result
from confsim.run.engine import Simulation

ITERATIONS_PER_S = 40_000
PASS_P99_US = 100.0
PEAK_RSS_MB = 300
BACKLOG_FACTOR = 1.5  # an iteration with 5,000 requests queued against one with 10
ROUNDS = 3


def conversation(folder: Path, *overrides: str) -> Simulation:
    """The conversation trace, spread, at 3 requests per second."""
    path = folder / "conversation_trace.jsonl"
    cfg = confsim.compose(["trace=mooncake", f"trace.path={path}", "arrivals=spread", "rate=3", *overrides])
    return confsim.build(cfg, confsim.load_trace(cfg))


def queued(requests: int, prompt: int, output: int, *overrides: str) -> Simulation:
    """So many requests at once, on the fitted profile."""
    cfg = confsim.compose(
        [
            "trace=fixed", f"trace.requests={requests}", f"trace.prompt_tokens={prompt}",
            f"trace.output_tokens={output}", "trace.interval_s=1e-6", "arrivals=recorded", *overrides,
        ]
    )  # fmt: skip
    return confsim.build(cfg, confsim.load_trace(cfg))


def cpu_s(simulation: Simulation) -> tuple[float, int]:
    """CPU seconds of a run, the fewest of `ROUNDS`, and its iterations."""
    best, steps = float("inf"), 0
    for _ in range(ROUNDS):
        began = time.process_time()
        result = simulation.run()
        best = min(best, time.process_time() - began)
        steps = result.summary["iterations"]
    return best, steps


def cost_s(simulation: Simulation) -> float:
    """CPU seconds that one more iteration takes: between two horizons, so that arrivals and metrics cancel."""
    short_s, short = cpu_s(dataclasses.replace(simulation, horizon_s=20.0))
    long_s, long = cpu_s(dataclasses.replace(simulation, horizon_s=100.0))
    return (long_s - short_s) / (long - short)


@pytest.mark.parametrize("scheme", ["conflux", "chunked_prefill"])
def test_bench_conversation(benchmark: Any, shared_traces: Path, scheme: str) -> None:
    """Iterations per second on the conversation trace: Qwen3-14B, 4 H100, FCFS."""
    simulation = conversation(shared_traces, f"scheme={scheme}")
    simulation.run()
    spent: list[float] = []

    def run() -> Result:
        began = time.process_time()
        result = simulation.run()
        spent.append(time.process_time() - began)
        return result

    result = benchmark.pedantic(run, rounds=ROUNDS, iterations=1)
    steps = result.summary["iterations"]
    rates = {"cpu": steps / min(spent), "wall": steps / benchmark.stats["min"]}
    benchmark.extra_info |= {f"iterations_per_s_{clock}": round(rate) for clock, rate in rates.items()}
    print(f"\n{scheme}: {steps} iterations, {min(spent):.2f} s of CPU, {rates['cpu']:,.0f} iterations per s of CPU, "
          f"{rates['wall']:,.0f} per s of wall-clock; pass us {result.timing['schedule_pass_us']}")  # fmt: skip
    assert rates["cpu"] >= ITERATIONS_PER_S


@pytest.mark.parametrize("order", ["fcfs", "srpf", "deadline_waterfill"])
@pytest.mark.parametrize("scheme", ["conflux", "chunked_prefill"])
def test_bench_schedule_pass(benchmark: Any, scheme: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P99 of a scheduling pass while at least 1,000 requests are queued, by wall-clock and by the thread's CPU time.

    The bar is on CPU time: where other processes take the core, a pass of 50 us lasts as long as their time slice.
    """
    simulation = queued(3000, 4000, 40, f"scheme={scheme}", f"policy={order}", "slo.ttft_s=1000")
    simulation = dataclasses.replace(simulation, horizon_s=90.0)
    result = benchmark.pedantic(simulation.run, rounds=ROUNDS, iterations=1)
    backlog = min(result.iterations["queued"].to_pylist()[1:])
    figures = {"wall": result.timing["schedule_pass_us"]}
    monkeypatch.setattr("confsim.schemes.cobatch.perf_counter", time.thread_time)
    passes = [simulation.run().timing["schedule_pass_us"] for _ in range(ROUNDS)]
    figures["cpu"] = min(passes, key=lambda one: one["p99"])
    benchmark.extra_info |= {"pass_us": figures, "least_backlog": backlog}
    print(f"\n{scheme}, {order}: {len(result.iterations)} iterations, at least {backlog} queued, pass us {figures}")
    assert backlog >= 1000
    assert figures["cpu"]["p99"] <= PASS_P99_US


@pytest.mark.parametrize("order", ["fcfs", "srpf", "deadline_waterfill"])
@pytest.mark.parametrize("scheme", ["conflux", "chunked_prefill"])
def test_bench_backlog(benchmark: Any, scheme: str, order: str) -> None:
    """An iteration with 5,000 requests queued costs what it costs with a few tens."""
    overrides = (f"scheme={scheme}", f"policy={order}", "slo.ttft_s=100000")
    costs: dict[int, float] = {}

    def measure() -> None:
        for backlog in (10, 5000):
            simulation = queued(8000, 2000, 20, *overrides)
            if backlog == 10:  # the same work, as a closed loop with 10 to 20 of them waiting
                cfg = confsim.compose(["trace=fixed", "arrivals=closed_loop", "arrivals.concurrency=60", *overrides])
                simulation = dataclasses.replace(simulation, arrivals=confsim.build(cfg).arrivals)
            costs[backlog] = cost_s(simulation)

    benchmark.pedantic(measure, rounds=1, iterations=1)
    ratio = costs[5000] / costs[10]
    benchmark.extra_info |= {"us_by_backlog": {k: v * 1e6 for k, v in costs.items()}, "ratio": ratio}
    print(f"\n{scheme}, {order}: us an iteration by backlog { {k: round(v * 1e6, 1) for k, v in costs.items()} }, "
          f"ratio {ratio:.2f}")  # fmt: skip
    assert ratio <= BACKLOG_FACTOR


MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_bench_engine import conversation
simulation = conversation(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
simulation.run()
print(before // 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_bench_memory(benchmark: Any, shared_traces: Path) -> None:
    """Peak resident memory of a process that loads the conversation trace and runs it."""

    def peak() -> list[int]:
        here = str(Path(__file__).resolve().parent)
        out = subprocess.run(
            [sys.executable, "-c", MEMORY, str(shared_traces), here], check=True, capture_output=True, text=True
        )
        return [int(word) for word in out.stdout.split()]

    loaded, most = benchmark.pedantic(peak, rounds=1, iterations=1)
    benchmark.extra_info |= {"loaded_mb": loaded, "peak_mb": most}
    print(f"\n{loaded} MB once the trace is loaded, {most} MB at the peak")
    assert most <= PEAK_RSS_MB


def test_bench_against_dynamo(benchmark: Any, shared_traces: Path) -> None:
    """NVIDIA Dynamo's offline replay in Rust of the same trace, where it is installed, run in turn with ours.

    Its time includes reading the file (it has no other entry), its engine is another (one worker, its own timing
    model): what is compared is how long a user waits for a replay of this trace.
    """
    core = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed")
    simulation = conversation(shared_traces)
    path = str(shared_traces / "conversation_trace.jsonl")
    times: dict[str, list[tuple[float, float]]] = {"dynamo": [], "confsim": []}

    def theirs() -> None:
        core.run_mocker_trace_replay(
            [path],
            num_workers=1,
            trace_block_size=512,
            trace_format="mooncake",
            extra_engine_args={"engine": {"enable_prefix_caching": False}},
        )

    def both() -> None:
        for name, call in (("dynamo", theirs), ("confsim", simulation.run)):
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))

    both()
    benchmark.pedantic(both, rounds=ROUNDS, iterations=1)
    best = {name: tuple(min(column) for column in zip(*rows, strict=True)) for name, rows in times.items()}
    benchmark.extra_info |= {"seconds_wall_cpu": best}
    print(f"\nseconds (wall, CPU): {best}")
    assert best["confsim"][1] <= best["dynamo"][1], "confsim takes longer than the fastest peer"
