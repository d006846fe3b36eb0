"""Figures of a report: goodputs, attainment against rate, distributions of latency, iterations over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.pages.report.load import LoadedRun, LoadedSearch, Series
from analysis.pages.theme import (
    COLOURS,
    DASHES,
    LIMIT_COLOUR,
    SHARE_FORMAT,
    Figure,
    Trace,
    attainment_axis,
    bar,
    figure,
    limit,
    numbers,
    scatter,
    title,
)

MAX_TICKS = 5  # labels of a narrow log axis

Palette = dict[str, str]
RATE_HOVER = "%{x} req/s: %{y:.1%}<extra>%{fullData.name}</extra>"


# --- goodput ---------------------------------------------------------------------------------------------------------


def goodput_bars(searches: Sequence[LoadedSearch], palette: Palette) -> Figure:
    """One bar per scheme, one group of bars per search."""
    several = len(searches) > 1
    data = []
    for scheme, colour in palette.items():
        entries = [search.content["schemes"].get(scheme) for search in searches]
        if not any(entries):
            continue
        values = [entry["goodput"] if entry else None for entry in entries]
        more: dict[str, Any] = {
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "constraintext": "none",
        }
        more |= {"textfont": {"color": "#ffffff", "size": 14}, "error_y": _band_bars(entries, values)}
        more |= {"text": [_bar_text(entry) for entry in entries], "width": None if several else 0.5}
        more["hovertemplate"] = "%{fullData.name}: %{y} req/s<extra></extra>"
        data.append(bar(scheme, [search.name for search in searches] if several else [scheme], values, colour, **more))
    return figure(data, "", title("goodput"), 320, yaxis={"rangemode": "tozero"}, barmode="group", showlegend=several)


def _band_bars(entries: Sequence[dict[str, Any] | None], values: Sequence[float | None]) -> dict[str, Any]:
    """How far each goodput moves with the error of the latency model."""
    bands = [(entry or {}).get("band") for entry in entries]
    highs, lows = [], []
    for band, value in zip(bands, values, strict=True):
        highs.append(band["high"]["goodput"] - value if band and value is not None else 0.0)
        lows.append(value - band["low"]["goodput"] if band and value is not None else 0.0)
    shown = {"type": "data", "symmetric": False, "array": numbers(highs), "arrayminus": numbers(lows)}
    return {**shown, "visible": any(bands), "thickness": 1.5, "width": 8, "color": LIMIT_COLOUR}


def _bar_text(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    if entry.get("structural"):
        return "0 (structural)"
    return f"{entry['goodput']:.3g}"


def attainment_curves(search: LoadedSearch, palette: Palette) -> Figure:
    """Attainment against rate: exact points joined, bounds of runs that were decided early as bars, the target."""
    data: list[Trace] = []
    schemes = search.content["schemes"]
    for scheme, entry in schemes.items():
        look = {"legendgroup": scheme, "marker": {"color": palette[scheme], "size": 7}}
        exact = [probe for probe in entry["probes"] if not probe["decided_early"]]
        rates, attained = ([probe[key] for probe in exact] for key in ("rate", "attainment_low"))
        line = {"line": {"color": palette[scheme], "width": 2.5}, "hovertemplate": RATE_HOVER}
        data.append(scatter(scheme, rates, attained, "lines+markers", **look, **line))
        early = [probe for probe in entry["probes"] if probe["decided_early"]]
        if early:
            data.append(_bounds(scheme, early, palette[scheme]))
        if entry["goodput"]:
            look["marker"] = {"color": palette[scheme], "size": 15, "symbol": "star"}
            hover = {"showlegend": False, "hovertemplate": "goodput %{x} req/s<extra>%{fullData.name}</extra>"}
            data.append(scatter(scheme, [entry["goodput"]], [entry["attainment"]], "markers", **look, **hover))
    rates = [probe["rate"] for entry in schemes.values() for probe in entry["probes"]]
    highest = max(entry["goodput"] for entry in schemes.values())
    high = 1.6 * highest if highest else max(rates, default=1.0)
    low = min((rate for rate in rates if rate <= high), default=0.0)
    room = 0.03 * (high - low) or 0.1 * high
    axis = attainment_axis(_exact_attainments(search, high), search.content["target"])
    rate_axis = {"range": numbers([max(0.0, low - room), high])}
    return figure(data, title("rate"), "requests that keep the SLO", 430, xaxis=rate_axis, **axis)


def _exact_attainments(search: LoadedSearch, high: float) -> list[float]:
    """Attainments of complete runs at rates up to a limit."""
    probes = [probe for entry in search.content["schemes"].values() for probe in entry["probes"]]
    return [p["attainment_low"] for p in probes if p["rate"] <= high and not p["decided_early"]]


def _bounds(scheme: str, probes: Sequence[dict[str, Any]], colour: str) -> Trace:
    low, high = (np.array([probe[f"attainment_{end}"] for probe in probes]) for end in ("low", "high"))
    symbols = ["circle-open" if probe["passed"] else "x-thin-open" for probe in probes]
    return scatter(
        f"{scheme}, decided early (bounds)",
        [probe["rate"] for probe in probes],
        (low + high) / 2,
        "markers",
        legendgroup=scheme,
        showlegend=False,
        opacity=0.55,
        error_y={"type": "data", "array": numbers((high - low) / 2), "color": colour, "thickness": 1.2, "width": 3},
        marker={"size": 6, "color": colour, "symbol": symbols},
        customdata=[[f"{a:.1%} to {b:.1%}"] for a, b in zip(low, high, strict=True)],
        hovertemplate="%{x} req/s: %{customdata[0]}<extra>%{fullData.name}</extra>",
    )


def simulated_attainment(runs: Sequence[LoadedRun], palette: Palette) -> Figure | None:
    """Attainment against rate over simulations, one line per scheme and policy; None unless a line has two points."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in runs:
        if run.summary.get("offered_rate") is not None and run.summary["attainment"] is not None:
            key = (str(run.summary.get("scheme")), str(run.summary.get("policy")))
            lines.setdefault(key, []).append((run.summary["offered_rate"], run.summary["attainment"]))
    if not any(len({rate for rate, _ in points}) > 1 for points in lines.values()):
        return None
    data = []
    for number, ((scheme, policy), points) in enumerate(lines.items()):
        rates, attained = zip(*sorted(points), strict=True)
        look = {"color": palette[scheme], "width": 2.5, "dash": DASHES[number % len(DASHES)]}
        name = f"{scheme}, {policy}"
        data.append(scatter(name, rates, attained, "lines+markers", line=look, hovertemplate=RATE_HOVER))
    targets = [run.summary["slo"]["attainment"] for run in runs if run.summary["slo"]]
    axis = attainment_axis((y for line in data for y in line["y"]), targets[0])
    return figure(data, title("rate"), "requests that keep the SLO", **axis)


# --- distributions ---------------------------------------------------------------------------------------------------


def distribution(runs: Sequence[LoadedRun], key: str, limit_key: str, palette: Palette) -> Figure | None:
    """Share of values at or below x, from the 101 quantiles in each summary; None where no run has them."""
    data = []
    for number, run in enumerate(runs):
        quantiles = (run.summary.get("distributions") or {}).get(key)
        if not quantiles:
            continue
        shares = np.linspace(0, 1, len(quantiles))
        kept = [(max(x, 1e-6), float(y)) for x, y in zip(quantiles, shares, strict=True) if x is not None]
        scheme = run.summary.get("scheme")
        same = sum(other.summary.get("scheme") == scheme for other in runs[:number])
        look = {"color": palette.get(str(scheme), COLOURS[0]), "width": 2, "dash": DASHES[same % len(DASHES)]}
        hover = "%{y:.0%} within %{x:.4g} s<extra>%{fullData.name}</extra>"
        xs, ys = [x for x, _ in kept], [y for _, y in kept]
        data.append(scatter(run.name, xs, ys, "lines", line=look, hovertemplate=hover))
    if not data:
        return None
    limits = sorted({run.summary["slo"][limit_key] for run in runs if (run.summary["slo"] or {}).get(limit_key)})
    shown = [value for line in data for value in line["x"]] + limits
    axes = {"xaxis": _time_axis(min(shown), max(shown)), "yaxis": {"tickformat": SHARE_FORMAT, "range": [0, 1.02]}}
    shapes = [limit("x", value, f"SLO {_time(value)} ") for value in limits]
    return figure(data, title(key), "share at or below", **axes, shapes=shapes)


def _time_axis(low: float, high: float) -> dict[str, Any]:
    """A log axis of seconds with ticks at 1, 2 and 5 of each decade, or at fewer where those are many."""
    low, high = low / 1.1, high * 1.7  # room for the label of a limit
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        values = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(values) <= MAX_TICKS:
            break
    ends = numbers([math.log10(low), math.log10(high)])
    return {"type": "log", "range": ends, "tickvals": numbers(values), "ticktext": [_time(value) for value in values]}


def _time(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"


# --- over time -------------------------------------------------------------------------------------------------------


def tokens_over_time(series: Series) -> Figure:
    """Mean prefill tokens (below) and decode tokens (above) of an iteration."""
    lines = (("prefill", series.prefill_tokens, COLOURS[0], "y"), ("decode", series.decode_tokens, COLOURS[1], "y2"))
    hover = "%{x} s: %{y} tokens<extra>%{fullData.name}</extra>"
    data = [
        scatter(name, series.time_s, y, "lines", yaxis=axis, line={"color": colour, "width": 1.5}, hovertemplate=hover)
        for name, y, colour, axis in lines
    ]
    upper = {"title": {"text": "decode"}, "automargin": True, "rangemode": "tozero", "domain": [0.56, 1]}
    lower = {"rangemode": "tozero", "domain": [0, 0.46]}
    return figure(data, "simulated time, s", "prefill", 300, yaxis=lower, yaxis2={**upper, "anchor": "x"})


def kv_over_time(run: LoadedRun) -> Figure:
    """KV in use, mean and peak of each bin, as a share of all groups where the capacity is known."""
    series, capacity_blocks = run.series, _capacity_blocks(run.summary)
    assert series is not None
    unit = capacity_blocks or 1.0
    lines = (("peak", series.kv_peak_blocks, 1.0, "dot"), ("mean", series.kv_used_blocks, 1.8, "solid"))
    data = []
    for name, values, width, dash in lines:
        look = {"line": {"color": COLOURS[2], "width": width, "dash": dash}}
        hover = "%{x} s: %{y}<extra>%{fullData.name}</extra>"
        data.append(scatter(name, series.time_s, values / unit, "lines", **look, hovertemplate=hover))
    axis = {"rangemode": "tozero", **({"tickformat": SHARE_FORMAT} if capacity_blocks else {})}
    return figure(data, "simulated time, s", "KV in use" if capacity_blocks else "KV in use, blocks", 300, yaxis=axis)


def _capacity_blocks(summary: dict[str, Any]) -> float | None:
    kv = summary.get("kv") or {}
    tokens, groups, block = kv.get("capacity_tokens"), kv.get("groups"), kv.get("block_tokens")
    return tokens * groups / block if tokens and groups and block else None
