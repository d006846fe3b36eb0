"""The HTML report of a validation against our own executor, and its figures (templates/validate_executor.html)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.pages import html
from analysis.pages.theme import COLOURS, SHARE_FORMAT, Figure, Trace, figure, numbers, parity, scatter
from traces.files import write_whole

MAX_POINTS = 4000  # of a scatter; more are thinned evenly
WORST = 12
KINDS = ("prefill only", "decode only", "mixed")

Iteration = Mapping[str, Any]


def write_page(content: Mapping[str, Any], iterations: pa.Table, requests: pa.Table, path: Path) -> Path:
    """Write the page in one step and return its path."""
    return write_whole(path, render(content, iterations, requests))


def render(content: Mapping[str, Any], iterations: pa.Table, requests: pa.Table) -> str:
    """The page of a summary and its tables."""
    return html.render(
        "validate_executor.html",
        title="Simulated against measured",
        content=content,
        warnings=[("", line) for line in content["warnings"]],
        iterations=_thinned(iterations).to_pylist(),
        requests=requests,
        worst=sorted(iterations.to_pylist(), key=lambda row: -abs(error(row)))[:WORST],
        draw=sys.modules[__name__],
    )


def _thinned(table: pa.Table) -> pa.Table:
    if len(table) <= MAX_POINTS:
        return table
    return table.take(pa.array(np.linspace(0, len(table) - 1, MAX_POINTS).astype(np.int64)))


def error(row: Iteration) -> float:
    """Relative error of a prediction."""
    return float(row["predicted_s"] / row["measured_s"] - 1.0)


def _milliseconds(key: str) -> Callable[[Iteration], float]:
    return lambda row: row[key] * 1e3


def _by_kind(
    rows: Sequence[Iteration], x: Callable[[Iteration], float], y: Callable[[Iteration], float]
) -> list[Trace]:
    """Points of two numbers of each iteration, a colour for each kind of batch."""
    traces = []
    for kind, (colour, some) in _kinds(rows).items():
        about = [
            f"{r['prefill_tokens']} prefill, {r['decode_tokens']} decode, context {r['context_tokens']}" for r in some
        ]
        traces.append(_points(kind, colour, [x(row) for row in some], [y(row) for row in some], about))
    return traces


def _kinds(rows: Sequence[Iteration]) -> dict[str, tuple[str, list[Iteration]]]:
    found = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    return {kind: (COLOURS[number], some) for number, (kind, some) in enumerate(found.items()) if some}


def _points(name: str, colour: str, x: Sequence[float], y: Sequence[float], about: Sequence[str]) -> Trace:
    look = {"marker": {"color": colour, "size": 5, "opacity": 0.65}, "text": list(about)}
    return scatter(name, x, y, "markers", **look, hovertemplate="%{text}<br>%{x}, %{y}<extra>%{fullData.name}</extra>")


def iteration_parity(rows: Sequence[Iteration]) -> Figure:
    """Predicted against measured time of each iteration."""
    data = _by_kind(rows, _milliseconds("measured_s"), _milliseconds("predicted_s"))
    return parity(data, "measured iteration, ms", "predicted iteration, ms")


def error_by_kind(rows: Sequence[Iteration]) -> Figure:
    """A box of errors for each kind of batch."""
    look = {"type": "box", "boxpoints": "outliers", "hoverinfo": "y"}
    data = [
        {**look, "name": kind, "y": numbers(map(error, some)), "marker": {"color": colour, "size": 3}}
        for kind, (colour, some) in _kinds(rows).items()
    ]
    return _errors(data, "", showlegend=False)


def error_by_size(rows: Sequence[Iteration]) -> Figure:
    """Errors against the tokens of an iteration."""
    data = _by_kind(rows, lambda row: float(row["prefill_tokens"] + row["decode_tokens"]), error)
    return _errors(data, "tokens of the iteration", xaxis={"type": "log"})


def error_over_time(rows: Sequence[Iteration]) -> Figure:
    """Errors against simulated time."""
    return _errors(_by_kind(rows, lambda row: float(row["start_s"]), error), "simulated time, s")


def _errors(data: Sequence[Trace], x: str, **layout: Any) -> Figure:
    return figure(data, x, "predicted / measured - 1", 400, yaxis={"tickformat": SHARE_FORMAT}, **layout)


def request_parity(requests: pa.Table, key: str) -> Figure | None:
    """A latency of each request simulated against live; None where no request has both."""
    pairs = zip(requests[f"live_{key}"].to_pylist(), requests[f"simulated_{key}"].to_pylist(), strict=True)
    found = [
        (live * 1e3, simulated * 1e3, f"request {n}") for n, (live, simulated) in enumerate(pairs) if live and simulated
    ]
    if not found:
        return None
    live, simulated, about = (list(column) for column in zip(*found, strict=True))
    return parity([_points("requests", COLOURS[0], live, simulated, about)], "live, ms", "simulated, ms")
