"""Synthetic results with the columns that the simulator writes, for tests of what reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True)
class FakeResult:
    """As `confsim.outcome.result.Result`: `write` makes the same files."""

    summary: dict[str, Any]
    requests: pa.Table
    iterations: pa.Table

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps(self.summary, allow_nan=False))
        pq.write_table(self.requests, folder / "requests.parquet")
        pq.write_table(self.iterations, folder / "iterations.parquet")
        (folder / "timing.json").write_text(json.dumps({"wall_s": 1.0}))


def make_result(
    scheme: str = "conflux",
    rate: float = 2.0,
    requests: int = 200,
    iterations: int = 500,
    groups: int = 4,
    **changes: Any,
) -> FakeResult:
    """A result whose numbers are plausible and seeded; `changes` replace keys of the summary."""
    rng = np.random.default_rng(7)
    ttft = rng.lognormal(-1.0 + 0.2 * rate, 0.6, requests)
    gap = rng.lognormal(-3.3, 0.3, requests)
    attained = (ttft <= 2.0) & (gap <= 0.1)
    return FakeResult(
        {**make_summary(scheme, rate, ttft, gap, attained, iterations), **changes},
        make_requests(ttft, gap, attained, rate, rng),
        make_iterations(iterations, groups, rng),
    )


def _statistics(values: np.ndarray) -> dict[str, float]:
    numbers = [values.mean(), *np.quantile(values, [0.5, 0.9, 0.95, 0.99])]
    return dict(zip(STATISTICS, map(float, numbers), strict=True))


def make_summary(
    scheme: str, rate: float, ttft: np.ndarray, gap: np.ndarray, attained: np.ndarray, iterations: int
) -> dict[str, Any]:
    """`summary.json` of a simulation."""
    count = len(ttft)
    quantiles = np.linspace(0, 1, 101)
    return {
        "kind": "simulate",
        "label": f"toolagent (synthetic), spread at {rate:g} req/s",
        "scheme": scheme,
        "policy": "fcfs",
        "model": "qwen3_14b",
        "gpu": "h100_sxm",
        "cluster": {"gpus": 4, "tp": 1, "instances": 1},
        "kv": {"groups": 4, "capacity_tokens": 250_000, "block_tokens": 16, "terms": {"weights_gib": 27.5}},
        "slo": {"ttft_s": 2.0, "tbt_s": 0.1, "attainment": 0.95, "rule": "max_gap"},
        "requests": {"injected": count, "completed": count, "rejected": 0, "unfinished": 0, "preempted": 0},
        "attainment": float(attained.mean()),
        "ttft_s": _statistics(ttft),
        "gap_s": _statistics(gap),
        "max_gap_s": _statistics(gap * 1.4),
        "tpot_s": _statistics(gap),
        "e2e_s": _statistics(ttft + 100 * gap),
        "offered_rate": rate,
        "completed_rate": rate,
        "iterations": iterations,
        "simulated_s": count / rate,
        "missed_by": {"queueing": int((~attained).sum()), "prefill": 0, "gap": 0},
        "warnings": [],
        "distributions": {
            "ttft_s": [float(value) for value in np.quantile(ttft, quantiles)],
            "gap_s": [float(value) for value in np.quantile(gap, quantiles)],
            "max_gap_s": [float(value) for value in np.quantile(gap * 1.4, quantiles)],
        },
        "provenance": {
            "config": {
                "rate": rate,
                "scheme": {"_target_": f"confsim.schemes.{scheme}"},
                "model": {"name": "qwen3_14b"},
            },
            "seed": 0,
            "versions": {"python": "3.11", "confsim": "0.1.0"},
            "git_commit": "a" * 40,
            "git_dirty": False,
            "profile_hash": "p" * 64,
            "trace": {"format": "preset", "preset": "toolagent", "synthetic": True},
            "arrivals": {"mode": "spread", "rate": rate},
        },
    }


def make_requests(
    ttft: np.ndarray, gap: np.ndarray, attained: np.ndarray, rate: float, rng: np.random.Generator
) -> pa.Table:
    """`requests.parquet` (the columns that readers here use)."""
    count = len(ttft)
    return pa.table(
        {
            "request_id": pa.array(np.arange(count), pa.int64()),
            "arrival_s": np.sort(rng.uniform(0, count / rate, count)),
            "prompt_tokens": pa.array(rng.integers(100, 9000, count), pa.int32()),
            "output_tokens": pa.array(rng.integers(1, 400, count), pa.int32()),
            "status": pa.array(["completed"] * count),
            "ttft_s": ttft,
            "max_gap_s": gap * 1.4,
            "attained": attained,
        }
    )


def make_iterations(count: int, groups: int, rng: np.random.Generator, loop: str = "main") -> pa.Table:
    """`iterations.parquet` of one loop."""
    durations = rng.uniform(0.02, 0.09, count)
    ends = np.cumsum(durations)
    prefill = rng.integers(0, 2000, (count, groups)).astype(np.int32)
    decode = rng.integers(0, 40, (count, groups)).astype(np.int32)
    zeros = np.zeros(count)
    return pa.table(
        {
            "loop": pa.array([loop] * count),
            "instance": pa.array(np.zeros(count), pa.int16()),
            "start_s": ends - durations,
            "end_s": ends,
            "prefill_tokens": pa.array(prefill.sum(axis=1), pa.int32()),
            "decode_tokens": pa.array(decode.sum(axis=1), pa.int32()),
            "prefill_per_group": pa.array(prefill.tolist(), pa.list_(pa.int32())),
            "decode_per_group": pa.array(decode.tolist(), pa.list_(pa.int32())),
            "linear_s": durations * 0.6,
            "prefill_attention_s": durations * 0.3,
            "decode_attention_s": durations * 0.2,
            "communication_s": zeros,
            "head_s": zeros,
            "overhead_s": zeros,
            "predicted_s": durations,
            "queued": pa.array(rng.integers(0, 9, count), pa.int32()),
            "kv_used_blocks": pa.array(rng.integers(0, 60_000, count), pa.int64()),
            "context_tokens": pa.array(rng.integers(0, 900_000, count), pa.int64()),
        }
    )
