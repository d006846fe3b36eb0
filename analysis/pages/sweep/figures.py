"""Figures of a sweep: curves with seed bands, heat maps, a Pareto view, instances."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from analysis.pages.sweep.view import SEED, ResultRow, groups, is_numeric, label
from analysis.pages.theme import (
    COLOURS,
    DASHES,
    SHARE_FORMAT,
    Figure,
    Trace,
    attainment_axis,
    bar,
    cycled,
    figure,
    is_share,
    name,
    numbers,
    palette,
    scatter,
    shown,
    title,
)

MAX_LINES = 24
FRONT = "not beaten in both"


def curves(
    rows: Sequence[ResultRow],
    metric: str,
    x: str,
    by: str | None,
    others: Sequence[str],
    target: float | None = None,
) -> Figure | None:
    """A line for each value of `by` and of the `others`: the median over seeds, with their range as a band.

    Colours tell `by` apart, dashes the rest. None where no line has a point. Attainments get the `target` as a line.
    """
    keys = ([by] if by else []) + list(others)
    lines = {key: own for key, own in groups(rows, keys).items() if any(row.get(metric) is not None for row in own)}
    if not lines:
        return None
    first = 1 if by else 0
    colour = _colours(key[0] if by else None for key in lines)
    dash = cycled((key[first:] for key in lines), DASHES)
    numeric = is_numeric(row.get(x) for row in rows)
    data: list[Trace] = []
    for key, own in list(lines.items())[:MAX_LINES]:
        look = {"color": colour[key[0] if by else None], "dash": dash[key[first:]], "width": 2.5}
        points, called = _points(own, metric, x), label(keys, key) or name(metric)
        data += _line(points, x, called, look) if numeric else [_bars(points, x, called, look["color"] if by else None)]
    layout: dict[str, Any] = {"xaxis": {"type": "linear" if numeric else "category"}, "yaxis": _tick_format(metric)}
    if metric == "attainment" and numeric:
        layout |= attainment_axis((row.get(metric) for row in rows), target)
    elif not numeric or metric.startswith("goodput"):
        layout["yaxis"] |= {"rangemode": "tozero"}
    return figure(data, title(x), title(metric), 400, showlegend=len(lines) > 1, barmode="group", **layout)


def _colours(values: Iterable[Any]) -> Mapping[Any, str]:
    """A colour for each value of a key: schemes have their own."""
    found = {value: shown(value) for value in values}
    colours = palette(found.values())
    return {value: colours[text] for value, text in found.items()}


def _tick_format(metric: str) -> dict[str, Any]:
    return {"tickformat": SHARE_FORMAT} if is_share(metric) else {}


class SeedRange(NamedTuple):
    """Values of the runs at a place of an axis that differ in their seeds."""

    at: Any
    median: float
    low: float
    high: float
    runs: int

    @property
    def about(self) -> str:
        """The range in words."""
        return f"{self.low:.4g} to {self.high:.4g}, {self.runs} runs"


def _points(rows: Sequence[ResultRow], metric: str, x: str) -> list[SeedRange]:
    points = []
    for (at,), own in groups(rows, [x]).items():
        values = [float(row[metric]) for row in own if row.get(metric) is not None]
        if values:
            points.append(SeedRange(at, statistics.median(values), min(values), max(values), len(values)))
    return sorted(points, key=lambda point: point.at) if is_numeric(point.at for point in points) else points


def _hover(points: Sequence[SeedRange], x: str) -> dict[str, Any]:
    text = f"{name(x)} %{{x}}: %{{y}} (%{{customdata[0]}})<extra>%{{fullData.name}}</extra>"
    return {"customdata": [[point.about] for point in points], "hovertemplate": text}


def _bars(points: Sequence[SeedRange], x: str, called: str, colour: str | None) -> Trace:
    """Bars of one colour, or without one each of its own."""
    error = {
        "type": "data",
        "symmetric": False,
        "array": numbers(point.high - point.median for point in points),
        "arrayminus": numbers(point.median - point.low for point in points),
        "visible": any(point.low < point.high for point in points),
    }
    places, heights = [shown(point.at) for point in points], [point.median for point in points]
    return bar(called, places, heights, colour or list(palette(places).values()), error_y=error, **_hover(points, x))


def _line(points: Sequence[SeedRange], x: str, called: str, look: dict[str, Any]) -> list[Trace]:
    xs = [point.at for point in points]
    medians = [point.median for point in points]
    line = scatter(called, xs, medians, "lines+markers", legendgroup=called, line=look, **_hover(points, x))
    if all(point.low == point.high for point in points):
        return [line]
    edge = {"line": {"width": 0}, "hoverinfo": "skip", "legendgroup": called, "showlegend": False}
    red, green, blue = (int(look["color"][i : i + 2], 16) for i in (1, 3, 5))
    shade = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.18)"}
    low = scatter(f"{called}, lowest", xs, [point.low for point in points], "lines", **edge)
    high = scatter(f"{called}, range", xs, [point.high for point in points], "lines", **edge, **shade)
    return [low, high, line]


def heat_map(rows: Sequence[ResultRow], metric: str, x: str, y: str, highest: float | None = None) -> Figure | None:
    """The median of a metric by two keys; None where there is none. Colours end at `highest`, shares at 100%."""
    cells = {
        key: statistics.median(values)
        for key, own in groups(rows, [x, y]).items()
        if (values := [float(row[metric]) for row in own if row.get(metric) is not None])
    }
    if not cells:
        return None
    xs, ys = _ordered(key[0] for key in cells), _ordered(key[1] for key in cells)
    z = [numbers(cells.get((a, b)) for a in xs) for b in ys]
    percent = is_share(metric)
    data = {
        "type": "heatmap",
        "x": [shown(value) for value in xs],
        "y": [shown(value) for value in ys],
        "z": z,
        "text": [["" if v is None else f"{v:.0%}" if percent else f"{v:.3g}" for v in row] for row in z],
        "texttemplate": "%{text}",
        "colorscale": "Viridis",
        "showscale": False,
        "zmin": 0,
        "zmax": float(f"{1.0 if percent else highest or max(cells.values()):.5g}"),
        "hovertemplate": f"{name(x)} %{{x}}, {name(y)} %{{y}}: %{{text}}<extra></extra>",
    }
    category = {"type": "category"}
    height = max(240, 90 + 34 * len(ys))
    return figure([data], title(x), title(y), height, xaxis=category, yaxis=category)


def _ordered(values: Iterable[Any]) -> list[Any]:
    found = list(dict.fromkeys(values))
    return sorted(found) if is_numeric(found) else found


class Trade(NamedTuple):
    """A run's goodput per GPU and what it costs, with the value of the key that colours tell apart."""

    cost: float
    value: float
    of: Any
    about: str


def pareto(
    rows: Sequence[ResultRow], x: str, lower_is_better: bool, by: str | None, axes: Sequence[str]
) -> Figure | None:
    """Goodput per GPU against a cost or a strictness, with the runs that no other run beats in both."""
    trades = _trades(rows, x, by, [axis for axis in axes if axis not in (SEED, by)])
    if len({trade.cost for trade in trades}) < 2:
        return None
    sign = 1 if lower_is_better else -1
    front: list[Trade] = []
    for trade in sorted(trades, key=lambda trade: (sign * trade.cost, -trade.value)):
        if trade.value > (front[-1].value if front else 0.0):
            front.append(trade)
    steps = {"color": "#888888", "width": 1.5, "dash": "dot", "shape": "hv" if sign > 0 else "vh"}
    costs, values = [trade.cost for trade in front], [trade.value for trade in front]
    data = [scatter(FRONT, costs, values, "lines", line=steps, hoverinfo="skip")]
    for value, colour in _colours(trade.of for trade in trades).items():
        own = [trade for trade in trades if trade.of == value]
        best = [trade in front for trade in own]
        look = {"size": [13 if b else 8 for b in best], "symbol": ["star" if b else "circle-open" for b in best]}
        data.append(
            scatter(
                shown(value) if by else "runs",
                [trade.cost for trade in own],
                [trade.value for trade in own],
                "markers",
                text=[trade.about for trade in own],
                marker={"color": colour, **look},
                hovertemplate="%{y} req/s per GPU at %{x}<br>%{text}<extra>%{fullData.name}</extra>",
            )
        )
    return figure(data, title(x), title("goodput_per_gpu"), 400)


def _trades(rows: Sequence[ResultRow], x: str, by: str | None, others: Sequence[str]) -> list[Trade]:
    """Medians over the seeds of every combination that has both numbers."""
    found = []
    for key, own in groups(rows, [*([by] if by else []), *others]).items():
        pairs = [(row[x], row["goodput_per_gpu"]) for row in own if row.get(x) is not None and row["goodput_per_gpu"]]
        if pairs:
            cost, value = (statistics.median(part) for part in zip(*pairs, strict=True))
            about = label(others, key[1 if by else 0 :])
            found.append(Trade(float(cost), float(value), key[0] if by else None, about))
    return found


def instance_bars(runs: Sequence[tuple[str, Sequence[dict[str, Any]]]], key: str) -> Figure | None:
    """A number of every instance, one group of bars per run."""
    if not any(instances for _, instances in runs):
        return None
    data = []
    for number, (called, instances) in enumerate(runs):
        places = [f"instance {part['instance']}" for part in instances]
        hover = {"hovertemplate": "%{x}: %{y}<extra>%{fullData.name}</extra>"}
        data.append(bar(called, places, (part.get(key) for part in instances), COLOURS[number % len(COLOURS)], **hover))
    return figure(data, "", title(key), 320, yaxis=_tick_format(key), barmode="group")
