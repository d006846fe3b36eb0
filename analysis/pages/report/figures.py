"""Figures of a report as plain plotly.js data: small, rounded, and coloured by the page's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from analysis.pages.report.load import Goodput, Results, Run, Series

# Colour-blind safe (Okabe and Ito), and readable on white and on near-black.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C8C3A", "#7B61C9", "#6B7280", "#9B2335")
LIMIT_COLOUR = "#D0342C"
LEGEND_ABOVE = 3  # lines that a legend above a narrow figure can name
MOST_TICKS = 7  # labels of a narrow log axis
DASHES = ("solid", "dash", "dot", "dashdot")
SHARE_AXIS = {"tickformat": ".0%", "rangemode": "tozero"}

Figure = dict[str, Any]


def colours(results: Results) -> dict[str, str]:
    """A colour for each scheme, the same in every figure."""
    names = [name for goodput in results.goodputs for name in goodput.content["schemes"]]
    names += [str(run.summary.get("scheme")) for run in results.simulations]
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(dict.fromkeys(names))}


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Plain numbers of five digits: what a screen shows, at half the size."""
    return [None if value is None else float(f"{value:.5g}") for value in values]


def _layout(x: str, y: str, height: int = 380, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 64, "r": 20, "t": 14, "b": 52},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return base


def _limit(axis: str, value: float, text: str) -> dict[str, Any]:
    """A shape and its label for a limit on an axis; values on a log axis are given as they are."""
    other = "y" if axis == "x" else "x"
    line = {"color": LIMIT_COLOUR, "width": 1.5, "dash": "dash"}
    label = {
        "text": text,
        "textposition": "end" if axis == "y" else "start",
        "textangle": 0,
        "font": {"color": LIMIT_COLOUR, "size": 12},
    }
    label |= {"xanchor": "right", "yanchor": "bottom"}
    ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    return {"type": "line", "line": line, "label": label, **ends}


# --- goodput ---------------------------------------------------------------------------------------------------------


def goodput_bars(results: Results, palette: dict[str, str]) -> Figure:
    """A bar a scheme; one group of bars a search."""
    searches = results.goodputs
    ticks = [search.name for search in searches]
    data = []
    for scheme, colour in palette.items():
        entries = [search.content["schemes"].get(scheme) for search in searches]
        if not any(entries):
            continue
        values = [entry["goodput"] if entry else None for entry in entries]
        data.append(
            {
                "type": "bar",
                "name": scheme,
                "x": ticks if len(searches) > 1 else [scheme],
                "y": numbers(values),
                "text": [_bar_text(entry) for entry in entries],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textfont": {"color": "#ffffff", "size": 14},
                "cliponaxis": False,
                "marker": {"color": colour},
                "error_y": _band_bars(entries, values),
                "width": 0.5 if len(searches) == 1 else None,
                "hovertemplate": "%{fullData.name}: %{y} req/s<extra></extra>",
            }
        )
    layout = _layout("", "goodput (req/s)", 320, yaxis={"rangemode": "tozero"}, margin={"t": 30})
    return {"data": data, "layout": {**layout, "barmode": "group", "showlegend": len(searches) > 1}}


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
    return f"{entry['goodput']:.3g}" + (f" · {entry['goodput_per_gpu']:.3g} a GPU" if entry["goodput"] else "")


def attainment_curves(goodput: Goodput, palette: dict[str, str]) -> Figure:
    """Attainment against rate: exact points joined, bounds of runs that were decided early as bars, the target."""
    data: list[dict[str, Any]] = []
    highest = 0.0
    for scheme, entry in goodput.content["schemes"].items():
        colour = palette[scheme]
        highest = max(highest, entry["goodput"])
        exact = [probe for probe in entry["probes"] if not probe["decided_early"]]
        early = [probe for probe in entry["probes"] if probe["decided_early"]]
        data.append(_exact_points(scheme, exact, colour))
        if early:
            data.append(_bounds(scheme, early, colour))
        if entry["goodput"]:
            data.append(_star(scheme, entry, colour))
    rates = [probe["rate"] for entry in goodput.content["schemes"].values() for probe in entry["probes"]]
    limit = 1.6 * highest if highest else max(rates, default=1.0)
    target = goodput.content["target"]
    layout = _layout(
        "request rate (req/s)",
        "requests that keep the SLO",
        430,
        xaxis={"range": [0, float(f"{limit:.4g}")]},
        yaxis={"tickformat": ".0%", "range": [_floor(goodput.content["schemes"].values(), limit), 1.03]},
    )
    return {"data": data, "layout": {**layout, "shapes": [_limit("y", target, f"target {target:.0%}")]}}


def _floor(entries: Iterable[dict[str, Any]], limit: float) -> float:
    """Where an axis of attainment starts so that the exact points up to the limit show, in steps of 10%."""
    shown = [
        probe["attainment_low"]
        for entry in entries
        for probe in entry["probes"]
        if probe["rate"] <= limit and not probe["decided_early"]
    ]
    lowest = min(shown, default=0.0)
    return max(0, int(lowest * 10 - 0.5)) / 10


def _exact_points(scheme: str, probes: Sequence[dict[str, Any]], colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": scheme,
        "legendgroup": scheme,
        "x": numbers(probe["rate"] for probe in probes),
        "y": numbers(probe["attainment_low"] for probe in probes),
        "line": {"color": colour, "width": 2.5},
        "marker": {"size": 7},
        "hovertemplate": "%{x} req/s: %{y:.1%}<extra>%{fullData.name}</extra>",
    }


def _bounds(scheme: str, probes: Sequence[dict[str, Any]], colour: str) -> dict[str, Any]:
    middles = [(probe["attainment_low"] + probe["attainment_high"]) / 2 for probe in probes]
    halves = [(probe["attainment_high"] - probe["attainment_low"]) / 2 for probe in probes]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{scheme}, decided early (bounds)",
        "legendgroup": scheme,
        "opacity": 0.55,
        "x": numbers(probe["rate"] for probe in probes),
        "y": numbers(middles),
        "error_y": {"type": "data", "array": numbers(halves), "color": colour, "thickness": 1.2, "width": 3},
        "marker": {
            "size": 6,
            "color": colour,
            "symbol": ["circle-open" if p["passed"] else "x-thin-open" for p in probes],
        },
        "customdata": [[f"{p['attainment_low']:.1%} to {p['attainment_high']:.1%}"] for p in probes],
        "hovertemplate": "%{x} req/s: %{customdata[0]}<extra>%{fullData.name}</extra>",
    }


def _star(scheme: str, entry: dict[str, Any], colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "legendgroup": scheme,
        "showlegend": False,
        "name": scheme,
        "x": numbers([entry["goodput"]]),
        "y": numbers([entry["attainment"]]),
        "text": [f"{entry['goodput']:.3g}"],
        "textposition": "top right",
        "textfont": {"color": colour},
        "marker": {"symbol": "star", "size": 14, "color": colour},
        "hovertemplate": "goodput %{x} req/s<extra>%{fullData.name}</extra>",
    }


def simulated_attainment(runs: Sequence[Run], palette: dict[str, str]) -> Figure | None:
    """Attainment against rate over simulations, a line a scheme and policy; None unless a line has two points."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in runs:
        if run.summary.get("offered_rate") is not None:
            key = (str(run.summary.get("scheme")), str(run.summary.get("policy")))
            lines.setdefault(key, []).append((run.summary["offered_rate"], run.summary["attainment"]))
    if not any(len({rate for rate, _ in points}) > 1 for points in lines.values()):
        return None
    data = []
    for number, ((scheme, policy), points) in enumerate(lines.items()):
        points.sort()
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{scheme}, {policy}",
                "x": numbers(rate for rate, _ in points),
                "y": numbers(attained for _, attained in points),
                "line": {"color": palette[scheme], "width": 2.5, "dash": DASHES[number % len(DASHES)]},
                "hovertemplate": "%{x} req/s: %{y:.1%}<extra>%{fullData.name}</extra>",
            }
        )
    target = runs[0].summary["slo"]["attainment"]
    layout = _layout(
        "request rate (req/s)",
        "requests that keep the SLO",
        yaxis={"tickformat": ".0%", "range": [0, 1.04]},
        xaxis={"rangemode": "tozero"},
    )
    return {"data": data, "layout": {**layout, "shapes": [_limit("y", target, f"target {target:.0%}")]}}


# --- distributions ---------------------------------------------------------------------------------------------------


def distribution(runs: Sequence[Run], key: str, title: str, limit_key: str, palette: dict[str, str]) -> Figure | None:
    """Share of values at or below x, from the 101 quantiles in each summary; None where no run has them."""
    data = []
    for number, run in enumerate(runs):
        quantiles = (run.summary.get("distributions") or {}).get(key)
        if not quantiles:
            continue
        shares = np.linspace(0, 1, len(quantiles))
        kept = [
            (max(value, 1e-6), float(share))
            for value, share in zip(quantiles, shares, strict=True)
            if value is not None
        ]
        same = sum(other.summary.get("scheme") == run.summary.get("scheme") for other in runs[:number])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": run.name,
                "x": numbers(value for value, _ in kept),
                "y": numbers(share for _, share in kept),
                "line": {
                    "color": palette.get(str(run.summary.get("scheme")), COLOURS[0]),
                    "width": 2,
                    "dash": DASHES[same % len(DASHES)],
                },
                "hovertemplate": "%{y:.0%} within %{x:.4g} s<extra>%{fullData.name}</extra>",
            }
        )
    if not data:
        return None
    limits = sorted({run.summary["slo"][limit_key] for run in runs if run.summary["slo"].get(limit_key)})
    shown = [value for line in data for value in line["x"]] + limits
    layout = _layout(
        title,
        "share at or below",
        xaxis=_time_axis(min(shown), max(shown)),
        yaxis={"tickformat": ".0%", "range": [0, 1.02]},
    )
    if len(data) > LEGEND_ABOVE:
        layout["legend"] = {"x": 1.02, "y": 1}
    shapes = [_limit("x", limit, f"SLO {_time(limit)} ") for limit in limits]
    return {"data": data, "layout": {**layout, "shapes": shapes}}


def _time_axis(low: float, high: float) -> dict[str, Any]:
    """A log axis of seconds with ticks at 1, 2 and 5 of each decade, or at fewer where those are many."""
    low, high = low / 1.1, high * 1.7  # room for the label of a limit
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        values = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(values) <= MOST_TICKS:
            break
    ends = numbers([math.log10(low), math.log10(high)])
    return {"type": "log", "range": ends, "tickvals": numbers(values), "ticktext": [_time(value) for value in values]}


def _time(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"


# --- over time -------------------------------------------------------------------------------------------------------


def tokens_over_time(series: Series) -> Figure:
    """Mean prefill (left axis) and decode tokens (right axis) of an iteration."""
    time_s = numbers(series.time_s)
    lines = (("prefill", series.prefill_tokens, COLOURS[0], "y"), ("decode", series.decode_tokens, COLOURS[1], "y2"))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": time_s,
            "y": numbers(values),
            "yaxis": axis,
            "line": {"color": colour, "width": 1.5},
            "hovertemplate": "%{x} s: %{y} tokens<extra>%{fullData.name}</extra>",
        }
        for name, values, colour, axis in lines
    ]
    layout = _layout("simulated time (s)", "prefill tokens", 280, yaxis={"rangemode": "tozero"})
    right = {"title": {"text": "decode tokens"}, "automargin": True, "rangemode": "tozero"}
    layout["yaxis2"] = {**right, "overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto"}
    return {"data": data, "layout": layout}


def kv_over_time(series: Series, capacity_blocks: float | None) -> Figure:
    """KV in use, mean and peak of each bin, as a share of all groups where the capacity is known."""
    unit = capacity_blocks or 1.0
    time_s = numbers(series.time_s)
    lines = (("peak", series.kv_peak_blocks, 1.0, "dot"), ("mean", series.kv_used_blocks, 1.8, "solid"))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": time_s,
            "y": numbers(values / unit),
            "line": {"color": COLOURS[2], "width": width, "dash": dash},
            "hovertemplate": "%{x} s: %{y}<extra>%{fullData.name}</extra>",
        }
        for name, values, width, dash in lines
    ]
    axis = SHARE_AXIS if capacity_blocks else {"rangemode": "tozero"}
    title = "KV in use" if capacity_blocks else "KV blocks in use"
    return {"data": data, "layout": _layout("simulated time (s)", title, 280, yaxis=axis)}
