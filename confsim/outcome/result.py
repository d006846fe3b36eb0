"""What a run leaves behind: a summary, two tables, and wall-clock figures in a file of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from confsim.run.record import Track, iterations_table
from traces.files import write_whole

REQUESTS = pa.schema(
    [
        ("request_id", pa.int64()),
        ("arrival_s", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("instance", pa.int16()),
        ("group", pa.int16()),
        ("status", pa.string()),  # completed, rejected, unfinished
        ("reason", pa.string()),  # why it was rejected
        ("queueing_s", pa.float64()),
        ("prefill_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("max_gap_s", pa.float64()),
        ("tpot_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("first_token_s", pa.float64()),
        ("finish_s", pa.float64()),
        ("emitted_tokens", pa.int32()),
        ("preemptions", pa.int32()),
        ("prefix_hit_tokens", pa.int32()),  # of the prompt, each token at most once
        ("recomputed_tokens", pa.int32()),  # computed again after preemptions
        ("attained", pa.bool_()),
        ("missed_by", pa.string()),
        ("session", pa.int64()),
        ("turn", pa.int32()),
    ]
)


class Verdict(NamedTuple):
    """Whether the attainment target is met, with bounds where the run ended as soon as that was certain."""

    passed: bool
    attainment_low: float
    attainment_high: float
    decided_early: bool


@dataclass(frozen=True)
class Result:
    """A run's outcome. `requests` and `iterations` are tables for notebooks; `summary` is strict JSON data."""

    kind: str
    summary: dict[str, Any]
    requests: pa.Table
    tracks: tuple[Track, ...] = ()
    timing: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None

    @cached_property
    def iterations(self) -> pa.Table:
        """One row an iteration of any loop; built when it is first asked for."""
        return iterations_table(self.tracks)

    def write(self, folder: Path) -> None:
        """Write summary.json, requests.parquet, iterations.parquet and timing.json, each whole or not at all."""
        write_table(folder / "requests.parquet", self.requests)
        write_table(folder / "iterations.parquet", self.iterations)
        write_json(folder / "timing.json", self.timing)
        write_json(folder / "summary.json", self.summary)


def write_json(path: Path, data: Any) -> None:
    """Strict JSON (no NaN), whole or not at all."""
    write_whole(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_table(path: Path, table: pa.Table) -> None:
    """Parquet, whole or not at all."""
    write_whole(path, lambda draft: pq.write_table(table, draft, compression="zstd"))
