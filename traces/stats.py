"""What a trace is like: the figures that a team measures first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from rich.table import Table

from traces.arrivals.base import native_rate
from traces.prefix import reusable_blocks
from traces.select import session_keys
from traces.trace import Trace

Numbers = npt.NDArray[Any]
COARSE = 2.0  # mean requests a timestamp from which timestamps count as ticks


@dataclass(frozen=True)
class Spread:
    """A distribution; percentiles interpolate linearly between order statistics."""

    min: float
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    total: float


@dataclass(frozen=True)
class Burstiness:
    """How arrivals bunch. `gap_cv` is the coefficient of variation of the gaps (1: Poisson; null: no time passes).

    `ticks` counts distinct timestamps, `tick_s` is the median step between them; `coarse` says that requests share
    timestamps so widely that they are ticks of a clock and not arrival times.
    """

    gap_cv: float | None
    ticks: int
    tick_s: float | None
    requests_per_tick: float
    max_requests_per_tick: int
    coarse: bool


@dataclass(frozen=True)
class Prefixes:
    """Prompt blocks, and those whose whole prefix an earlier request had (the hits of an unbounded cache)."""

    block_tokens: int
    blocks: int
    reusable: int
    reusable_share: float


@dataclass(frozen=True)
class SessionStats:
    """Sessions of a trace that knows them."""

    sessions: int
    multi_turn: int
    mean_turns: float
    max_turns: int


@dataclass(frozen=True)
class TraceStats:
    """The description of a trace; `as_dict` is plain JSON data."""

    name: str
    synthetic: bool
    requests: int
    kept: str | None  # "k of n" when a part of the trace was taken
    span_s: float
    rate: float | None  # requests per second as recorded
    prompt_tokens: Spread
    output_tokens: Spread
    one_token_outputs: int
    kinds: dict[str, int]
    burstiness: Burstiness
    prefixes: Prefixes | None  # null: the trace has no block ids
    sessions: SessionStats | None  # null: the trace knows no sessions
    provenance: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def describe(trace: Trace) -> TraceStats:
    """Measure a trace; load it with block ids for the reusable share."""
    table = trace.table
    arrival = table["arrival_s"].to_numpy()
    output = table["output_tokens"].to_numpy()
    ids = table["block_ids"]
    return TraceStats(
        name=str(trace.provenance.get("name", "trace")),
        synthetic=bool(trace.provenance.get("synthetic", False)),
        requests=len(trace),
        kept=trace.provenance.get("selection", {}).get("kept"),
        span_s=float(arrival[-1] - arrival[0]),
        rate=native_rate(arrival),
        prompt_tokens=_spread(table["prompt_tokens"].to_numpy()),
        output_tokens=_spread(output),
        one_token_outputs=int((output == 1).sum()),
        kinds=_kinds(trace),
        burstiness=_burstiness(arrival),
        prefixes=None if ids.null_count == len(ids) else _prefixes(trace),
        sessions=None if table["session"].null_count == len(trace) else _sessions(trace),
        provenance=trace.provenance,
    )


def stats_table(stats: TraceStats) -> Table:
    """The description as a table for a terminal."""
    title = f"{stats.name}" if not stats.synthetic or "synthetic" in stats.name else f"{stats.name} (synthetic)"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in _lines(stats):
        table.add_row(name, value)
    return table


def _spread(values: Numbers) -> Spread:
    p50, p90, p95, p99 = (float(v) for v in np.percentile(values, (50, 90, 95, 99)))
    return Spread(
        float(values.min()), float(values.mean()), p50, p90, p95, p99, float(values.max()), float(values.sum())
    )


def _burstiness(arrival_s: Numbers) -> Burstiness:
    ticks, counts = np.unique(arrival_s, return_counts=True)
    gaps = np.diff(arrival_s)
    cv = float(gaps.std() / gaps.mean()) if gaps.size and gaps.mean() > 0 else None
    step = float(np.median(np.diff(ticks))) if ticks.size > 1 else None
    each = float(counts.mean())
    return Burstiness(cv, int(ticks.size), step, each, int(counts.max()), each >= COARSE and ticks.size > 1)


def _prefixes(trace: Trace) -> Prefixes:
    reusable, blocks = reusable_blocks(trace.table["block_ids"])
    return Prefixes(trace.block_tokens, blocks, reusable, reusable / max(blocks, 1))


def _sessions(trace: Trace) -> SessionStats:
    _, turns = np.unique(session_keys(trace.table), return_counts=True)
    return SessionStats(int(turns.size), int((turns > 1).sum()), float(turns.mean()), int(turns.max()))


def _kinds(trace: Trace) -> dict[str, int]:
    counted = pc.value_counts(trace.table["kind"]).to_pylist()
    named = {str(row["values"]): int(row["counts"]) for row in counted if row["values"] is not None}
    return dict(sorted(named.items(), key=lambda item: (-item[1], item[0])))


def _lines(stats: TraceStats) -> list[tuple[str, str]]:
    burst = stats.burstiness
    lines = [("requests", stats.kept or f"{stats.requests:,}")]
    lines.append(("span", f"{stats.span_s:,.1f} s"))
    lines.append(("rate", f"{stats.rate:.3f} req/s" if stats.rate is not None else "all at one instant"))
    for name, spread in (("prompt tokens", stats.prompt_tokens), ("output tokens", stats.output_tokens)):
        lines.append((name, _spread_text(spread)))
    lines.append(("one-token outputs", f"{stats.one_token_outputs:,}"))
    lines.append(("gap CV", f"{burst.gap_cv:.2f}  (Poisson: 1)" if burst.gap_cv is not None else "-"))
    per_tick = f"{burst.requests_per_tick:.1f} on average, {burst.max_requests_per_tick} at most"
    step = f"; ticks of {burst.tick_s:g} s, try arrivals=spread" if burst.coarse and burst.tick_s is not None else ""
    lines.append(("requests a timestamp", per_tick + step))
    if stats.prefixes is not None:
        found = stats.prefixes
        share = f"{found.reusable_share:.1%} of {found.blocks:,} blocks of {found.block_tokens} tokens"
        lines.append(("reusable prefix", share))
    if stats.sessions is not None:
        known = stats.sessions
        text = f"{known.sessions:,}, {known.multi_turn:,} of several turns, at most {known.max_turns}"
        lines.append(("sessions", text))
    if stats.kinds:
        lines.append(("kinds", ", ".join(f"{name} {count:,}" for name, count in stats.kinds.items())))
    lines.extend(_row_lines(stats.provenance.get("rows", {})))
    return lines + [(key, _detail(cut)) for key, cut in stats.provenance.get("selection", {}).items() if key != "kept"]


def _detail(cut: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in cut.items()) if isinstance(cut, dict) else str(cut)


def _row_lines(rows: dict[str, int]) -> list[tuple[str, str]]:
    names = {
        "dropped_zero_output": "dropped (no output)",
        "dropped_block_ids": "block ids dropped",
        "orphans": "orphaned turns",
        "out_of_order": "rows out of order",
    }
    return [(label, f"{rows[key]:,}") for key, label in names.items() if rows.get(key)]


def _spread_text(s: Spread) -> str:
    return (
        f"mean {s.mean:,.0f}  p50 {s.p50:,.0f}  p90 {s.p90:,.0f}  p95 {s.p95:,.0f}  p99 {s.p99:,.0f}  max {s.max:,.0f}"
    )
