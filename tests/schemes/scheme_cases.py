"""Small loads of hand-picked requests on a latency law with one coefficient a term."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from confsim.api import Simulation, build, compose
from confsim.outcome.result import Result
from traces.load import Load
from traces.trace import SCHEMA, Trace

LAW = {
    "linear_base_s": 0.008,
    "linear_token_s": 40e-6,
    "decode_base_s": 0.001,
    "decode_sequence_s": 0.0,
    "decode_token_s": 1e-6,
    "prefill_base_s": 0.0,
    "prefill_pair_s": 4e-9,
    "all_to_all_base_s": 0.002,
    "all_to_all_token_s": 4e-6,
    "head_base_s": 0.0005,
    "head_token_s": 2e-6,
    "iteration_overhead_s": 0.0,
    "sequence_overhead_s": 0.0,
}


def simulation(*overrides: str, **law: float) -> Simulation:
    """A simulation with `LAW`, changed by `law`; its own trace is not used."""
    coefficients = [f"latency.{key}={value!r}" for key, value in {**LAW, **law}.items()]
    return build(compose(["latency=affine", "trace=fixed", "trace.requests=1", *coefficients, *overrides]))


def replay(sim: Simulation, rows: list[tuple[float, int, int]]) -> Result:
    """Run requests given as (arrival, prompt, output), audited after every event."""
    columns: dict[str, Any] = {field.name: [None] * len(rows) for field in SCHEMA}
    columns["request_id"] = list(range(len(rows)))
    columns["arrival_s"] = [row[0] for row in rows]
    columns["prompt_tokens"] = [row[1] for row in rows]
    columns["output_tokens"] = [row[2] for row in rows]
    trace = Trace(pa.table(columns, schema=SCHEMA), 0, {"name": "hand-made"})
    arrivals = np.array([row[0] for row in rows])
    return sim.replay(Load(trace, arrivals, "recorded", None, label="hand-made"), check=True)


def column(result: Result, name: str) -> list[Any]:
    """A column of the requests."""
    values: list[Any] = result.requests[name].to_pylist()
    return values


def loop_rows(result: Result, loop: str) -> list[dict[str, Any]]:
    """The iterations of one loop."""
    return [row for row in result.iterations.to_pylist() if row["loop"] == loop]
