"""How all figures look: colours, names of quantities, axes. A figure is plain plotly.js data, small and rounded.

Text, grid and background are the page's own (templates/plot.js): they follow its light or dark theme.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Colour-blind safe (after Okabe and Ito), and readable on white and on near-black.
SCHEMES = {
    "conflux": "#0072B2",
    "chunked_prefill": "#E69F00",
    "data_parallel": "#009E73",
    "disaggregated": "#CC79A7",
    "muxwise": "#D55E00",
    "loongserve": "#56B4E9",
    "uniform_sp": "#8C8C3A",
}
SPARE = ("#7B61C9", "#6B7280", "#9B2335", "#2A7F7F", "#B07A4A")
COLOURS = (*SCHEMES.values(), *SPARE)
LIMIT_COLOUR = "#D0342C"
DASHES = ("solid", "dash", "dot", "dashdot")

QUANTITIES = {  # columns and settings: name and unit
    "goodput": ("goodput", "req/s"),
    "goodput_per_gpu": ("goodput per GPU", "req/s"),
    "rate": ("request rate", "req/s"),
    "offered_rate": ("offered rate", "req/s"),
    "completed_rate": ("completed rate", "req/s"),
    "slo.ttft_s": ("TTFT limit", "s"),
    "slo.tbt_s": ("TBT limit", "s"),
    "slo.attainment": ("attainment target", ""),
    "gpus": ("GPUs", ""),
    "cluster.gpus": ("GPUs per instance", ""),
    "cluster.instances": ("instances", ""),
    "cluster.router": ("router", ""),
    "policy.order": ("queue order", ""),
    "prefix_hit_tokens": ("prefix hits", "tokens"),
}
LATENCIES = {
    "ttft_s": "TTFT",
    "gap_s": "TBT",
    "max_gap_s": "largest gap",
    "tpot_s": "time per output token",
    "e2e_s": "end-to-end latency",
}
SHARE_FORMAT = "~%"  # of an axis: as many digits as its steps need
SHARES = ("attainment", "attained", "utilisation")

Figure = dict[str, Any]
Trace = dict[str, Any]


def palette(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name. Schemes have theirs on every page; other names beside them take spare ones."""
    wanted = list(dict.fromkeys(names))
    own = {name: SCHEMES.get(_scheme(name)) for name in wanted}
    if not any(own.values()):
        return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(wanted)}
    found: dict[str, str] = {}
    for name in sorted(wanted, key=lambda name: (own[name] is None, name not in SCHEMES)):
        taken = set(found.values())
        colour, first = own[name], zlib.crc32(name.encode())
        if colour is None or colour in taken:
            turns = [SPARE[(first + turn) % len(SPARE)] for turn in range(len(SPARE))]
            colour = next((spare for spare in turns if spare not in taken), turns[0])
        found[name] = colour
    return {name: found[name] for name in wanted}


def _scheme(name: str) -> str:
    """The scheme that a label such as `chunked prefill, tuned` or `disaggregated 1+3` begins with."""
    found = re.match(r"[a-z_ ]+", name.lower())
    return found[0].strip().replace(" ", "_") if found else ""


def quantity(key: str) -> tuple[str, str]:
    """Name and unit of a column or setting."""
    if key in QUANTITIES:
        return QUANTITIES[key]
    stem, _, statistic = key.partition(".")
    if stem in LATENCIES:
        return f"{LATENCIES[stem]} {statistic.upper() if statistic.startswith('p') else statistic}".strip(), "s"
    return (key[:-2].replace("_", " "), "s") if key.endswith("_s") else (key.replace("_", " "), "")


def name(key: str) -> str:
    """Name of a column or setting, without its unit."""
    return quantity(key)[0]


def title(key: str) -> str:
    """Name and unit of a column or setting, as an axis says them: `TTFT P95, s`."""
    return ", ".join(filter(None, quantity(key)))


def is_share(key: str) -> bool:
    """Whether a column is a share of 1."""
    return key.split(".")[-1] in SHARES


def shown(value: Any) -> str:
    """A value as text."""
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Plain numbers of five digits: what a screen shows, at half the size."""
    return [None if value is None else float(f"{value:.5g}") for value in values]


# --- traces ----------------------------------------------------------------------------------------------------------


def scatter(name: str, x: Iterable[float | None], y: Iterable[float | None], mode: str, **more: Any) -> Trace:
    """Points, lines or both over numbers."""
    return {"type": "scatter", "mode": mode, "name": name, "x": numbers(x), "y": numbers(y), **more}


def bar(name: str, x: Sequence[Any], y: Iterable[float | None], colour: str | list[str], **more: Any) -> Trace:
    """A bar over each category, of one colour or each of its own."""
    return {"type": "bar", "name": name, "x": list(x), "y": numbers(y), "marker": {"color": colour}, **more}


# --- layout ----------------------------------------------------------------------------------------------------------


def figure(data: Sequence[Trace], x: str, y: str, height: int = 380, **layout: Any) -> Figure:
    """A figure with titles on its axes; keyword arguments add to the layout or, as dicts, to its parts."""
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 60, "r": 44, "t": 12, "b": 48},  # the toolbar stands in the right one
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y, "standoff": 10}, "automargin": True},
        "bargap": 0.35,
    }
    for key, value in layout.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return {"data": list(data), "layout": base}


def attainment_axis(values: Iterable[float | None], target: float | None = None) -> dict[str, Any]:
    """A y axis of shares from 90%, or from below the lowest value, to 100%, with the target as a line."""
    lowest = min((value for value in values if value is not None), default=0.9)
    low = min(0.9, math.floor(lowest * 10) / 10)
    axis = {"tickformat": SHARE_FORMAT, "range": [low, round(1.0 + 0.04 * (1.0 - low), 4)]}
    return {"yaxis": axis, "shapes": [] if target is None else [limit("y", target, f"target {target:.0%}")]}


def limit(axis: str, value: float, text: str) -> dict[str, Any]:
    """A line and its label for a limit on an axis; values on a log axis are given as they are."""
    other = "y" if axis == "x" else "x"
    label = {"text": text, "textangle": 0, "font": {"color": LIMIT_COLOUR, "size": 12}}
    label |= {"xanchor": "right", "yanchor": "bottom", "textposition": "end" if axis == "y" else "start"}
    ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    return {"type": "line", "line": {"color": LIMIT_COLOUR, "width": 1.5, "dash": "dash"}, "label": label, **ends}


def parity(data: Sequence[Trace], x: str, y: str, height: int = 400) -> Figure:
    """Logarithmic axes of equal range over all points, with the lines of equality and of 10% off."""
    values = [value for trace in data for key in ("x", "y") for value in trace[key] if value and value > 0]
    low, high = min(values) / 1.2, max(values) * 1.2
    axis: dict[str, Any] = {"type": "log", "range": numbers([math.log10(low), math.log10(high)])}
    if high > 10 * low:
        axis["dtick"] = "D2"  # labels at 1, 2 and 5 of each decade
    shapes = [
        {
            "type": "line",
            "line": {"color": LIMIT_COLOUR, "width": 1, "dash": "solid" if factor == 1.0 else "dot"},
            "layer": "below",
            "x0": low, "x1": high, "y0": low * factor, "y1": high * factor,
        }
        for factor in (1.0, 1.1, 0.9)
    ]  # fmt: skip
    return figure(data, x, y, height, xaxis=axis, yaxis=axis, shapes=shapes)


def cycled(values: Iterable[Any], looks: Sequence[str]) -> Mapping[Any, str]:
    """A look for each different value."""
    return {value: looks[number % len(looks)] for number, value in enumerate(dict.fromkeys(values))}
