"""Figures of a sweep as plain plotly.js data: curves with seed bands, heat maps, a Pareto view, instances."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from analysis.pages.report.figures import COLOURS, DASHES, Figure, numbers
from analysis.pages.sweep.view import SEED, Row, groups, is_numeric, label, shown

MOST_LINES = 24
SHARES = ("attainment", "attained", "utilisation")
UNITS = {"goodput": "goodput (req/s)", "goodput_per_gpu": "goodput per GPU (req/s)", "rate": "request rate (req/s)"}


def axis_title(key: str) -> str:
    """A key with its unit, as an axis says it."""
    if key in UNITS:
        return UNITS[key]
    stem, _, rest = key.rpartition(".")
    if (rest or key).endswith("_s") or (stem.endswith("_s") and rest.startswith("p")):
        return f"{key} (s)"
    return "attainment" if key == "attainment" else key


def layout(x: str, y: str, height: int = 400, **more: Any) -> dict[str, Any]:
    """Axes with titles and a legend above."""
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 16, "b": 54},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
    }
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return base


def _is_share(metric: str) -> bool:
    return metric.split(".")[-1] in SHARES


def _format(metric: str) -> dict[str, Any]:
    return {"tickformat": ".0%"} if _is_share(metric) else {}


def curves(rows: Sequence[Row], metric: str, x: str, by: str | None, others: Sequence[str]) -> Figure | None:
    """A line for each value of `by` and of the `others`: the median over seeds, with their range as a band.

    Colours tell `by` apart, dashes the rest. None where no line has a point.
    """
    keys = ([by] if by else []) + list(others)
    lines = {key: own for key, own in groups(rows, keys).items() if any(row.get(metric) is not None for row in own)}
    if not lines:
        return None
    first = 1 if by else 0
    colour = _cycled((key[:first] for key in lines), COLOURS)
    dash = _cycled((key[first:] for key in lines), DASHES)
    numeric = is_numeric(row.get(x) for row in rows)
    data: list[dict[str, Any]] = []
    for key, own in list(lines.items())[:MOST_LINES]:
        look = {"color": colour[key[:first]], "dash": dash[key[first:]], "width": 2.5}
        points = _points(own, metric, x)
        name = label(keys, key) or metric
        data += _line(points, x, name, look) if numeric else [_bars(points, x, name, look["color"])]
    kind = {"type": "linear", "rangemode": "tozero"} if numeric else {"type": "category"}
    shares = {"range": [0, 1.04]} if _is_share(metric) else {}
    figure = layout(axis_title(x), axis_title(metric), xaxis=kind, yaxis={**_format(metric), **shares})
    return {"data": data, "layout": {**figure, "showlegend": len(lines) > 1, "barmode": "group"}}


def _cycled(values: Iterable[tuple[Any, ...]], looks: Sequence[str]) -> dict[tuple[Any, ...], str]:
    """A look for each different value."""
    return {value: looks[number % len(looks)] for number, value in enumerate(dict.fromkeys(values))}


class Point(NamedTuple):
    """Where on the axis, and the runs there: over seeds."""

    at: Any
    median: float
    low: float
    high: float
    runs: int

    @property
    def about(self) -> str:
        """The range in words."""
        return f"{self.low:.4g} to {self.high:.4g}, {self.runs} runs"


def _points(rows: Sequence[Row], metric: str, x: str) -> list[Point]:
    points = []
    for (at,), own in groups(rows, [x]).items():
        values = [float(row[metric]) for row in own if row.get(metric) is not None]
        if values:
            points.append(Point(at, statistics.median(values), min(values), max(values), len(values)))
    return sorted(points, key=lambda point: point.at) if is_numeric(point.at for point in points) else points


def _bars(points: Sequence[Point], x: str, name: str, colour: str) -> dict[str, Any]:
    error = {
        "type": "data",
        "symmetric": False,
        "array": numbers(point.high - point.median for point in points),
        "arrayminus": numbers(point.median - point.low for point in points),
        "visible": any(point.low < point.high for point in points),
    }
    return {
        "type": "bar",
        "name": name,
        "x": [shown(point.at) for point in points],
        "y": numbers(point.median for point in points),
        "error_y": error,
        "marker": {"color": colour},
        "customdata": [[point.about] for point in points],
        "hovertemplate": f"{x} %{{x}}: %{{y}} (%{{customdata[0]}})<extra>%{{fullData.name}}</extra>",
    }


def _line(points: Sequence[Point], x: str, name: str, look: dict[str, Any]) -> list[dict[str, Any]]:
    xs = [point.at for point in points]
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "x": xs,
        "y": numbers(point.median for point in points),
        "line": look,
        "marker": {"size": 7},
        "customdata": [[point.about] for point in points],
        "hovertemplate": f"{x} %{{x}}: %{{y}} (%{{customdata[0]}})<extra>%{{fullData.name}}</extra>",
    }
    if all(point.low == point.high for point in points):
        return [line]
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "legendgroup": name}
    shade = _shade(look["color"])
    low = {**edge, "name": f"{name}, lowest", "x": xs, "y": numbers(p.low for p in points), "showlegend": False}
    high = {**edge, "name": f"{name}, range", "x": xs, "y": numbers(p.high for p in points), "showlegend": False}
    return [low, {**high, "fill": "tonexty", "fillcolor": shade}, line]


def _shade(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def heat_map(rows: Sequence[Row], metric: str, x: str, y: str, highest: float | None = None) -> Figure | None:
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
    percent = _is_share(metric)
    text = [["" if v is None else f"{v:.0%}" if percent else f"{v:.3g}" for v in row] for row in z]
    top = 1.0 if percent else highest if highest else max(cells.values())
    data = {
        "type": "heatmap",
        "x": [shown(value) for value in xs],
        "y": [shown(value) for value in ys],
        "z": z,
        "text": text,
        "texttemplate": "%{text}",
        "colorscale": "Viridis",
        "zmin": 0,
        "zmax": float(f"{top:.5g}"),
        "colorbar": {"title": {"text": axis_title(metric)}, **_format(metric)},
        "hovertemplate": f"{x} %{{x}}, {y} %{{y}}: %{{text}}<extra></extra>",
    }
    category = {"type": "category"}
    height = max(260, 110 + 34 * len(ys))
    return {"data": [data], "layout": layout(axis_title(x), axis_title(y), height, xaxis=category, yaxis=category)}


def _ordered(values: Any) -> list[Any]:
    found = list(dict.fromkeys(values))
    return sorted(found) if is_numeric(found) else found


def pareto(rows: Sequence[Row], x: str, lower_is_better: bool, by: str | None, axes: Sequence[str]) -> Figure | None:
    """Goodput per GPU against a cost or a strictness, with the runs that no other run beats in both."""
    others = [axis for axis in axes if axis not in (SEED, by)]
    points = []
    for key, own in groups(rows, [*([by] if by else []), *others]).items():
        pairs = [(row[x], row["goodput_per_gpu"]) for row in own if row.get(x) is not None and row["goodput_per_gpu"]]
        if pairs:
            cost, value = (statistics.median(part) for part in zip(*pairs, strict=True))
            points.append((float(cost), float(value), key[0] if by else None, label(others, key[1 if by else 0 :])))
    if len({point[0] for point in points}) < 2:
        return None
    sign = 1 if lower_is_better else -1
    front, best = [], 0.0
    for point in sorted(points, key=lambda point: (sign * point[0], -point[1])):
        if point[1] > best:
            front.append(point)
            best = point[1]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "not beaten in both",
            "x": numbers(point[0] for point in front),
            "y": numbers(point[1] for point in front),
            "line": {"color": "#888888", "width": 1.5, "dash": "dot", "shape": "hv" if sign > 0 else "vh"},
            "hoverinfo": "skip",
        }
    ]
    for number, value in enumerate(dict.fromkeys(point[2] for point in points)):
        own_points = [point for point in points if point[2] == value]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": shown(value) if by else "runs",
                "x": numbers(point[0] for point in own_points),
                "y": numbers(point[1] for point in own_points),
                "text": [point[3] for point in own_points],
                "marker": {
                    "size": [12 if point in front else 8 for point in own_points],
                    "color": COLOURS[number % len(COLOURS)],
                    "symbol": ["star" if point in front else "circle-open" for point in own_points],
                },
                "hovertemplate": "%{y} req/s a GPU at %{x}<br>%{text}<extra>%{fullData.name}</extra>",
            }
        )
    return {"data": data, "layout": layout(axis_title(x), UNITS["goodput_per_gpu"])}


def instance_bars(runs: Sequence[tuple[str, Sequence[dict[str, Any]]]], key: str, title: str) -> Figure | None:
    """A number of every instance, a group of bars a run."""
    data = []
    width = max((len(instances) for _, instances in runs), default=0)
    for number, (name, instances) in enumerate(runs):
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [f"instance {part['instance']}" for part in instances],
                "y": numbers(part.get(key) for part in instances),
                "marker": {"color": COLOURS[number % len(COLOURS)]},
                "hovertemplate": "%{x}: %{y}<extra>%{fullData.name}</extra>",
            }
        )
    if not width:
        return None
    return {"data": data, "layout": {**layout("", title, 320, yaxis=_format(key)), "barmode": "group"}}
