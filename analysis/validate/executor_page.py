"""The HTML report of a validation against our own executor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.commands.shared import seconds, share
from analysis.pages.report.figures import COLOURS, LIMIT_COLOUR, Figure, numbers
from analysis.pages.report.page import Page
from traces.files import write_whole

MOST_POINTS = 4000  # of a scatter; more are thinned evenly
REQUEST_NAMES = {
    "ttft_s": "time to first token",
    "max_gap_s": "largest gap",
    "tpot_s": "time per output token",
    "e2e_s": "end to end",
}
WORST = 12


def write_page(content: Mapping[str, Any], iterations: pa.Table, requests: pa.Table, path: Path) -> Path:
    """Write the page in one step and return its path."""
    text = render(content, iterations, requests)
    return write_whole(path, text)


def render(content: Mapping[str, Any], iterations: pa.Table, requests: pa.Table) -> str:
    """The page."""
    page = Page()
    page.add("<h1>Simulated against measured: our own executor</h1>")
    page.add(f'<p class="soft">{escape(_setting(content))}</p>')
    tone = "good" if content["met"] else "bad"
    page.add(f'<p><span class="{tone}">{escape(content["verdict"])}</span></p>')
    _cards(page, content)
    page.warnings(content["warnings"])
    _errors(page, content)
    _iterations(page, iterations)
    _requests(page, content, requests)
    _goodput(page, content["goodput"])
    _plans(page, content)
    _worst(page, iterations)
    return page.html("Simulated against measured")


def _setting(content: Mapping[str, Any]) -> str:
    live = content["live"]
    return (
        f"{content['label']} · {content['scheme']}, {content['policy']} · ranks: {live['layout']}, attention paths "
        f"{live['attention_paths']} · every plan executed {content['repeats'] + 1} times"
    )


def _cards(page: Page, content: Mapping[str, Any]) -> None:
    mixed = next((row for row in content["errors"] if row["name"] == "mixed"), content["errors"][-1])
    ttft = next(row for row in content["requests"] if row["name"] == "ttft_s")
    plans = content["plans"]
    cards = (
        (share(mixed["mean"]), f"mean absolute error of {mixed['name']} iterations"),
        (share(mixed["noise_median"]), "noise: medians of half the executions apart"),
        (share(ttft["mean"]), "mean absolute error of TTFT, request by request"),
        (f"{plans['same_on_measured_times']:,} of {plans['live']:,}", "plans the same on measured times"),
    )
    boxes = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    page.add(f'<div class="cards">{boxes}</div>')


def _errors(page: Page, content: Mapping[str, Any]) -> None:
    page.heading(
        "Errors of whole iterations",
        "|predicted / measured - 1| against the median of all executions of a plan. Noise: medians of half the "
        "executions against those of the other half, and a single execution against the median.",
    )
    head = ["iterations", "rows", "mean", "median", "P95", "bias", "all seconds", "noise of medians", "noise of one"]
    keys = ("mean", "median", "p95", "bias", "total", "noise_median", "noise_single")
    page.table(
        head,
        [
            [
                escape(row["name"] + (" tokens" if row["by"] == "tokens" else "")),
                f"{row['rows']:,}",
                *(_signed(row[key]) if key in ("bias", "total") else share(row[key]) for key in keys),
            ]
            for row in content["errors"]
        ],
    )


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _iterations(page: Page, table: pa.Table) -> None:
    rows = _thinned(table).to_pylist()
    if not rows:
        return
    page.heading("Parity and error", "On the line prediction and measurement are equal; the dotted ones are 10% off.")
    page.add('<div class="pair">')
    page.figure(_parity(rows, "measured_s", "predicted_s", "iteration"), "Predicted against measured")
    page.figure(_by_kind(rows), "Error by kind of batch")
    page.figure(_error_against(rows, _tokens, "tokens of the iteration", "log"), "Error by size")
    page.figure(_error_against(rows, lambda row: row["start_s"], "simulated time (s)", "linear"), "Error over time")
    page.add("</div>")


def _thinned(table: pa.Table) -> pa.Table:
    if len(table) <= MOST_POINTS:
        return table
    return table.take(pa.array(np.linspace(0, len(table) - 1, MOST_POINTS).astype(np.int64)))


def _tokens(row: Mapping[str, Any]) -> float:
    return float(row["prefill_tokens"] + row["decode_tokens"])


def _kinds(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, list[Mapping[str, Any]]]]:
    names = [name for name in ("prefill only", "decode only", "mixed") if any(row["kind"] == name for row in rows)]
    return {name: (COLOURS[n], [row for row in rows if row["kind"] == name]) for n, name in enumerate(names)}


def _parity(rows: Sequence[Mapping[str, Any]], x: str, y: str, what: str) -> Figure:
    data = [
        _points(
            name, colour, [row[x] * 1e3 for row in some], [row[y] * 1e3 for row in some], [_about(row) for row in some]
        )
        for name, (colour, some) in _kinds(rows).items()
    ]
    values = [row[key] * 1e3 for row in rows for key in (x, y) if row[key] > 0]
    return _parity_layout(data, values, f"measured {what} (ms)", f"predicted {what} (ms)")


def _parity_layout(data: list[dict[str, Any]], values: list[float], x: str, y: str) -> Figure:
    low, high = min(values) / 1.2, max(values) * 1.2
    layout = _layout(x, y)
    layout["shapes"] = [_line(low, high, factor) for factor in (1.0, 1.1, 0.9)]
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "log", "range": [math.log10(low), math.log10(high)]}
    return {"data": data, "layout": layout}


def _layout(x: str, y: str) -> dict[str, Any]:
    return {
        "height": 400,
        "margin": {"l": 64, "r": 20, "t": 14, "b": 52},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True},
    }


def _points(name: str, colour: str, x: Sequence[float], y: Sequence[float], text: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": numbers(x),
        "y": numbers(y),
        "text": list(text),
        "marker": {"color": colour, "size": 5, "opacity": 0.65},
        "hovertemplate": "%{text}<br>%{x}, %{y}<extra>%{fullData.name}</extra>",
    }


def _about(row: Mapping[str, Any]) -> str:
    return f"{row['prefill_tokens']} prefill, {row['decode_tokens']} decode, context {row['context_tokens']}"


def _line(low: float, high: float, factor: float) -> dict[str, Any]:
    style = {"color": LIMIT_COLOUR, "width": 1, "dash": "solid" if factor == 1.0 else "dot"}
    ends = {"x0": low, "x1": high, "y0": low * factor, "y1": high * factor}
    return {"type": "line", "line": style, "layer": "below", **ends}


def _error(row: Mapping[str, Any]) -> float:
    return float(row["predicted_s"] / row["measured_s"] - 1.0)


def _by_kind(rows: Sequence[Mapping[str, Any]]) -> Figure:
    data = [
        {
            "type": "box",
            "name": name,
            "y": numbers([_error(row) for row in some]),
            "marker": {"color": colour, "size": 3},
            "boxpoints": "outliers",
            "hoverinfo": "y",
        }
        for name, (colour, some) in _kinds(rows).items()
    ]
    layout = _layout("", "predicted / measured - 1")
    layout["yaxis"] |= {"tickformat": ".0%"}
    return {"data": data, "layout": {**layout, "showlegend": False}}


def _error_against(rows: Sequence[Mapping[str, Any]], x: Any, title: str, scale: str) -> Figure:
    data = [
        _points(name, colour, [x(row) for row in some], [_error(row) for row in some], [_about(row) for row in some])
        for name, (colour, some) in _kinds(rows).items()
    ]
    layout = _layout(title, "predicted / measured - 1")
    layout["xaxis"] |= {"type": scale}
    layout["yaxis"] |= {"tickformat": ".0%"}
    return {"data": data, "layout": layout}


def _requests(page: Page, content: Mapping[str, Any], requests: pa.Table) -> None:
    page.heading(
        "Requests", "Each request live beside itself simulated; the two runs plan for themselves, so queues may differ."
    )
    head = ["latency", "requests", "mean error", "median", "P95", "bias"]
    head += ["live P50", "simulated P50", "live P95", "simulated P95"]
    rows = [
        [
            REQUEST_NAMES[row["name"]],
            f"{row['rows']:,}",
            *(share(row[key]) for key in ("mean", "median", "p95")),
            _signed(row["bias"]),
            *(seconds(row[key]) for key in ("live_p50", "simulated_p50", "live_p95", "simulated_p95")),
        ]
        for row in content["requests"]
    ]
    page.table(head, rows)
    attained = content["attainments"]
    page.add(f"<p>Attainment: live {share(attained['live'])}, simulated {share(attained['simulated'])}.</p>")
    page.add('<div class="pair">')
    for key in ("ttft_s", "tpot_s"):
        page.figure(_request_parity(requests, key), REQUEST_NAMES[key].capitalize())
    page.add("</div>")


def _request_parity(requests: pa.Table, key: str) -> Figure | None:
    pairs = zip(requests[f"live_{key}"].to_pylist(), requests[f"simulated_{key}"].to_pylist(), strict=True)
    found = [(a * 1e3, b * 1e3, n) for n, (a, b) in enumerate(pairs) if a and b]
    if not found:
        return None
    live, simulated, number = (list(column) for column in zip(*found, strict=True))
    data = [_points("requests", COLOURS[0], live, simulated, [f"request {n}" for n in number])]
    return _parity_layout(data, live + simulated, "live (ms)", "simulated (ms)")


def _goodput(page: Page, goodput: Mapping[str, Any] | None) -> None:
    if goodput is None:
        return
    page.heading(
        "Goodput",
        f"The highest of these rates with {share(goodput['attainment'])} attainment: live {goodput['live']:g} req/s, "
        f"simulated {goodput['simulated']:g} req/s.",
    )
    rows = [[f"{row['rate']:g}", share(row["live"]), share(row["simulated"])] for row in goodput["rates"]]
    page.table(["rate, req/s", "live attainment", "simulated attainment"], rows)


def _plans(page: Page, content: Mapping[str, Any]) -> None:
    plans, tokens, live = content["plans"], content["tokens"], content["live"]
    page.heading("Plans, tokens and the driver")
    lines = [
        f"On measured times {plans['same_on_measured_times']:,} of {plans['live']:,} plans are the same "
        f"({_first(plans['first_difference_on_measured_times'])}); on the model's own times "
        f"{plans['same_on_model_times']:,} ({_first(plans['first_difference_on_model_times'])}).",
        f"Ranks produced {tokens['produced']:,} tokens, requests got {tokens['emitted']:,}.",
        f"{live['warmup_iterations']} warm-up iterations were executed and excluded.",
    ]
    exposed = live.get("exposed_schedule_s")
    if exposed:
        lines.append(
            f"Ranks waited for the schedule {seconds(exposed['p50'])} an iteration (median; P95 "
            f"{seconds(exposed['p95'])}), and messages between driver and ranks took "
            f"{seconds(live['driver_s']['p50'])}; neither is on the simulated clock."
        )
    page.add("".join(f"<p>{escape(line)}</p>" for line in lines))


def _first(number: int | None) -> str:
    return "no difference" if number is None else f"first difference at iteration {number:,}"


def _worst(page: Page, table: pa.Table) -> None:
    rows = sorted(table.to_pylist(), key=lambda row: -abs(_error(row)))[:WORST]
    page.add(f"<details><summary>The {len(rows)} iterations predicted worst</summary>")
    cells = [
        [
            escape(row["kind"]),
            f"{row['prefill_tokens']:,}",
            f"{row['decode_tokens']:,}",
            f"{row['context_tokens']:,}",
            seconds(row["measured_s"]),
            seconds(row["predicted_s"]),
            _signed(_error(row)),
        ]
        for row in rows
    ]
    page.table(["kind", "prefill", "decode", "context", "measured", "predicted", "error"], cells)
    page.add("</details>")
