"""Speed of sweeps: `pytest tests/benchmarks/test_bench_sweep.py --benchmark-only -s`.

Two workers on two cores. On a machine that others use, seconds of CPU time say what a sweep costs and wall-clock what
was to be had: both are printed, the bars are on CPU time (two cores give 120 s of it in a minute).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

RUNS_CPU_S = 120.0  # 200 runs of 1,000 requests in under 60 s on 2 cores
START_CPU_S = 1.5
ROOT = Path(__file__).resolve().parents[2]


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed(*words: str, cwd: Path) -> tuple[float, float]:
    """CPU and wall-clock seconds of a process and its children."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CONFSIM_CACHE": str(cwd / "cache")}
    before, began = children_s(), time.perf_counter()
    subprocess.run((sys.executable, *words), cwd=cwd, env=env, check=True, capture_output=True, timeout=600)
    return children_s() - before, time.perf_counter() - began


def test_200_runs(benchmark: Any, shared_traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    trace = shared_traces / "conversation_trace.jsonl"
    words = ["-m", "confsim", "simulate", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=s"]
    words += ["trace=mooncake", f"trace.path={trace}", "trace.limit=1000", "quiet=true"]
    axes = ["rate=range(1,51)", "scheme=conflux,chunked_prefill", "seed=0,1"]
    cpu_s, wall_s = benchmark.pedantic(lambda: timed(*words, *axes, cwd=tmp_path), rounds=1)
    table = pq.read_table(tmp_path / "s" / "results.parquet")
    assert table.num_rows == 200 and set(table["status"].to_pylist()) == {"done"}
    again_cpu_s, again_s = timed(*words, *axes, cwd=tmp_path)
    print(f"\n200 runs: {cpu_s:.1f} s of CPU, {wall_s:.1f} s; all there already: {again_cpu_s:.1f} s, {again_s:.1f} s")
    assert cpu_s < RUNS_CPU_S
    assert again_cpu_s < 10


def test_a_worker_starts(benchmark: Any, tmp_path: Path) -> None:
    """Python, imports and latencies of a first run, with a filled cache; the simulation itself is 20 requests."""
    code = (
        "import json, pathlib; from analysis.sweep.worker import simulate\n"
        "simulate(json.load(open('config.json')), pathlib.Path('out'))"
    )
    config = (
        "import json; import confsim; from omegaconf import OmegaConf\n"
        "cfg = confsim.compose(['trace.limit=20', 'output.timeline=false', 'output.band=false'])\n"
        "json.dump(OmegaConf.to_container(cfg, resolve=True), open('config.json', 'w'))"
    )
    timed("-c", config, cwd=tmp_path)
    timed("-c", code, cwd=tmp_path)
    cpu_s, wall_s = benchmark.pedantic(lambda: timed("-c", code, cwd=tmp_path), rounds=1)
    print(f"\na worker's first run is done after {cpu_s:.2f} s of CPU, {wall_s:.2f} s")
    assert cpu_s < START_CPU_S


def test_planning(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From overrides to 1,000 resolved configurations and identities."""
    from analysis.identity import Identifier
    from analysis.sweep.expand import expand

    words = ["rate=range(1,101)", "slo.tbt_s=0.05,0.1", "seed=range(0,5)", f"hydra.sweep.dir={tmp_path}"]

    def plan() -> int:
        began = time.process_time()
        grid = expand("simulate", words)
        assert grid is not None
        identify = Identifier()
        assert len({identify("simulate", point.config).id for point in grid.runs}) == 1000
        return round((time.process_time() - began) * 1000)

    took_ms = benchmark.pedantic(plan, rounds=1)
    print(f"\n1,000 runs planned in {took_ms} ms of CPU")
    assert took_ms < 10_000
