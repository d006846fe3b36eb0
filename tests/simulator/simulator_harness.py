"""Small simulations built by hand, for tests of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from confsim.latency.affine import AffineLatencyConfig
from confsim.outcome.result import Result
from confsim.outcome.slo import Slo
from confsim.policies import Policy
from confsim.run.backend import Stepwise
from confsim.run.engine import Simulation, Window
from confsim.run.model_backend import Cost, ModelBackend, ModelBackendConfig, Noise
from confsim.run.plan import IterationPlan, IterationTiming
from confsim.schemes.chunked_prefill import ChunkedPrefill
from confsim.schemes.conflux import Conflux
from confsim.specs import ClusterSpec, GpuSpec, KvConfig, ModelSpec
from traces.arrivals import Recorded
from traces.load import Load
from traces.trace import SCHEMA, Trace

GPU = GpuSpec("test_gpu", 85_520_809_984, 3.35e12, 9.89e14, 4.5e11, 132)
SCHEMES = ("conflux", "chunked_prefill")
ORDERS = ("fcfs", "srpf", "deadline")

# Rows of a test trace: (arrival_s, prompt_tokens, output_tokens) or with block ids as a fourth entry.
Rows = list[tuple[Any, ...]]


def tiny_model(kv_heads: int = 8, max_context_tokens: int | None = None) -> ModelSpec:
    """A model whose heads divide by 1, 2, 4 and 8."""
    return ModelSpec("tiny", 64, 2, 8, kv_heads, 8, 128, 256, max_context_tokens=max_context_tokens)


def latency(**changes: float) -> AffineLatencyConfig:
    """A law of which every term is zero unless given."""
    zeros = dict.fromkeys((name for name in AffineLatencyConfig.__dataclass_fields__ if name.endswith("_s")), 0.0)
    return AffineLatencyConfig(**{**zeros, "prefill_slowdown": 1.0, "decode_slowdown": 1.0, **changes})


def make_trace(rows: Rows, block_tokens: int = 0, sessions: list[tuple[int, int, int]] | None = None) -> Trace:
    """A trace of rows; `sessions` gives (session, turn, parent or -1) of each row."""
    count = len(rows)
    blocks = [list(row[3]) if len(row) > 3 else None for row in rows]
    columns: dict[str, Any] = {
        "request_id": range(count),
        "arrival_s": [float(row[0]) for row in rows],
        "prompt_tokens": [row[1] for row in rows],
        "output_tokens": [row[2] for row in rows],
        "block_ids": blocks,
        "session": [s[0] for s in sessions] if sessions else [None] * count,
        "turn": [s[1] for s in sessions] if sessions else [None] * count,
        "parent_id": [s[2] if s[2] >= 0 else None for s in sessions] if sessions else [None] * count,
        "kind": [None] * count,
    }
    arrays = [pa.array(list(columns[item.name]), item.type) for item in SCHEMA]
    return Trace(pa.Table.from_arrays(arrays, schema=SCHEMA), block_tokens, {"name": "rows"})


def open_load(trace: Trace) -> Load:
    """The rows at their own times, the first one's offset included."""
    return Load(trace, trace.table["arrival_s"].to_numpy(), "recorded", None, label="recorded")


def closed_load(trace: Trace, concurrency: int) -> Load:
    """A closed loop."""
    return Load(trace, np.zeros(len(trace)), "closed_loop", None, concurrency=concurrency, label="closed loop")


@dataclass(frozen=True)
class Case:
    """Everything that a small simulation depends on."""

    rows: Rows
    scheme: str = "conflux"
    order: str = "fcfs"
    gpus: int = 4
    tp: int = 1
    kv_heads: int = 8
    block_tokens: int = 16
    capacity_tokens: int | None = 1_000_000
    admission: str = "prompt"
    prefix_cache: bool = False
    trace_block_tokens: int = 0
    latency: AffineLatencyConfig = field(default_factory=AffineLatencyConfig)
    slo: Slo = field(default_factory=lambda: Slo(2.0, 0.1))
    chunk_tokens: int | str = "auto"
    max_batched_tokens: int = 8192
    max_partial_prefills: int = 4
    async_schedule: bool = True
    max_running: int | None = None
    placement_threshold: float = 0.8
    max_context_tokens: int | None = None
    instances: int = 1
    router: str = "round_robin"
    horizon_s: float | None = None
    window: Window = field(default_factory=Window)
    seed: int = 0
    dispatch: str | None = None
    placement: str | None = None

    @property
    def groups(self) -> int:
        """Decode groups."""
        return self.gpus // self.tp if self.scheme == "conflux" else 1

    def trace(self) -> Trace:
        """The rows as a trace."""
        return make_trace(self.rows, self.trace_block_tokens)

    def simulation(self, backend: Any = None) -> Simulation:
        """The engine on this case."""
        common = {
            "max_batched_tokens": self.max_batched_tokens,
            "max_partial_prefills": self.max_partial_prefills,
            "async_schedule": self.async_schedule,
            "max_running": self.max_running,
        }
        scheme: Any = Conflux(**common)
        if self.scheme == "chunked_prefill":
            scheme = ChunkedPrefill(chunk_tokens=self.chunk_tokens, **common)
        return Simulation(
            trace=self.trace(),
            arrivals=Recorded(),
            model=tiny_model(self.kv_heads, self.max_context_tokens),
            gpu=GPU,
            cluster=ClusterSpec(self.gpus, self.tp, self.instances, self.router),
            scheme=scheme,
            policy=Policy(self.order, self.dispatch, self.placement, self.placement_threshold),
            kv=KvConfig(self.block_tokens, self.capacity_tokens, 0.9, self.prefix_cache, self.admission),
            slo=self.slo,
            latency=self.latency,
            backend=ModelBackendConfig() if backend is None else backend,
            seed=self.seed,
            horizon_s=self.horizon_s,
            window=self.window,
        )

    def run(self, probe: bool = False, check: bool = False, backend: Any = None) -> Result:
        """Replay the rows at their own times."""
        return self.simulation(backend).replay(open_load(self.trace()), probe=probe, check=check)


@dataclass(frozen=True)
class PlannedChunk:
    """A prefill chunk as it was submitted."""

    request: int
    start: int
    tokens: int
    last: bool
    group: int
    shards: tuple[int, ...] = ()


@dataclass(frozen=True)
class Planned:
    """An iteration as it was submitted: chunks in queue order, and per group the requests that decode."""

    chunks: tuple[PlannedChunk, ...]
    decode: tuple[tuple[int, ...], ...]
    context: tuple[int, ...]


class RecordingBackend(Stepwise):
    """Times plans by the model and keeps them, iteration by iteration."""

    def __init__(self, inner: ModelBackend, plans: list[Planned]) -> None:
        self._inner = inner
        self._plans = plans

    def submit(self, plan: IterationPlan) -> None:
        chunks = tuple(PlannedChunk(c.request.id, c.start, c.tokens, c.last, c.group, c.shards) for c in plan.prefill)
        for batch in plan.decode:
            assert batch.count == len(batch.members)
        self._plans.append(
            Planned(
                chunks,
                tuple(tuple(sorted(batch.members)) for batch in plan.decode),
                tuple(batch.context_tokens for batch in plan.decode),
            )
        )
        self._inner.submit(plan)

    def result(self) -> IterationTiming:
        return self._inner.result()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class RecordingBackendConfig:
    """A backend factory that collects the plans of every loop in `plans`."""

    plans: list[Planned] = field(default_factory=list)

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> RecordingBackend:
        return RecordingBackend(ModelBackend(cost, noise), self.plans)


def column(result: Result, name: str) -> list[Any]:
    """A column of the requests table, in the order of request ids."""
    ids = result.requests["request_id"].to_pylist()
    values = result.requests[name].to_pylist()
    return [value for _, value in sorted(zip(ids, values, strict=True), key=lambda pair: pair[0])]
