"""Figures that need no browser: a small part of plotly's figures, drawn as SVG.

A figure is plain plotly.js data, `{"data": [...], "layout": {...}}`. Drawn are bars (grouped, or stacked with
`barmode: stack`) and lines (`scatter`), over categories or numbers; dashed horizontal lines (`shapes`); axis titles,
logarithmic x axes and the legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from analysis.pages.report.figures import COLOURS, LIMIT_COLOUR
from traces.files import write_whole

Figure = dict[str, Any]

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, BOTTOM, TOP = 70, 20, 58, 14
LEGEND_ROW = 20  # height of a row of the legend
LETTER = 6.4  # width of a letter at the size of labels
TICKS = 6
INK, GRID, PAPER = "#1f2328", "#d8dee4", "#ffffff"
DASHES = {"dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3"}


def bars(
    x: Sequence[Any], series: dict[str, Sequence[float | None]], x_title: str, y_title: str, stacked: bool = False
) -> Figure:
    """A bar of each series over each category of `x`."""
    data = [{"type": "bar", "name": name, "x": list(map(str, x)), "y": list(y)} for name, y in series.items()]
    return {"data": data, "layout": _layout(x_title, y_title, barmode="stack" if stacked else "group")}


def lines(
    x: Sequence[float],
    series: dict[str, Sequence[float | None]],
    x_title: str,
    y_title: str,
    log_x: bool = False,
    limit: float | None = None,
) -> Figure:
    """A line of each series over the numbers `x`; `limit` is drawn as a dashed line."""
    data = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": list(y)}
        for name, y in series.items()
    ]
    layout = _layout(x_title, y_title)
    if log_x:
        layout["xaxis"] |= {"type": "log", "tickvals": list(x)}
    if limit is not None:
        layout["shapes"] = [{"type": "line", "y0": limit, "y1": limit, "line": {"dash": "dash"}}]
    return {"data": data, "layout": layout}


def _layout(x_title: str, y_title: str, **more: Any) -> dict[str, Any]:
    axes = {"xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}, "rangemode": "tozero"}}
    return {**axes, **more}


def write_svg(figure: Figure, path: Path) -> None:
    """Write a figure as SVG.

    Raises:
        ValueError: for a kind of trace that is not drawn.
    """
    write_whole(path, svg(figure))


def svg(figure: Figure) -> str:
    """A figure as an SVG document."""
    return _Drawing(figure).render()


@dataclass(frozen=True)
class _Scale:
    """Values `low` to `high` on pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


class _Drawing:
    """One figure on its way to SVG."""

    def __init__(self, figure: Figure) -> None:
        self.traces: list[dict[str, Any]] = figure["data"]
        self.layout: dict[str, Any] = figure["layout"]
        for trace in self.traces:
            if trace["type"] not in ("bar", "scatter"):
                raise ValueError(f"cannot draw a trace of type {trace['type']}")
        self.parts: list[str] = []
        rows = self._legend()
        self.top = TOP + rows * LEGEND_ROW
        self.bottom = HEIGHT - BOTTOM
        self.y = self._y_scale()
        self.categories = self._categories()

    def render(self) -> str:
        """The document."""
        self._y_axis()
        if self.categories:
            self._category_axis()
            self._bars()
        else:
            self._lines()
        self._limits()
        self._titles()
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        head += f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12">'
        paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>'
        return "\n".join([head, paper, *self.parts, "</svg>", ""])

    # Elements

    def _line(self, x0: float, y0: float, x1: float, y1: float, colour: str, more: str = "") -> None:
        ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
        self.parts.append(f'<line {ends} stroke="{colour}"{more}/>')

    def _text(self, x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> None:
        where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text {where} fill="{INK}"{more}>{escape(text)}</text>')

    def _rect(self, x: float, y: float, width: float, height: float, colour: str, title: str) -> None:
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {box} fill="{colour}"><title>{escape(title)}</title></rect>')

    def _colour(self, index: int) -> str:
        trace = self.traces[index]
        given = (trace.get("marker") or {}).get("color") or (trace.get("line") or {}).get("color")
        return str(given or COLOURS[index % len(COLOURS)])

    # Parts of a figure

    def _legend(self) -> int:
        """Names in as many rows as they need; returns the rows."""
        names = [str(trace["name"]) for trace in self.traces]
        if len(names) < 2:
            return 0
        x, row = float(LEFT), 0
        for index, name in enumerate(names):
            width = 22 + LETTER * len(name) + 14
            if x + width > WIDTH - RIGHT and x > LEFT:
                x, row = float(LEFT), row + 1
            y = TOP + row * LEGEND_ROW
            self._rect(x, y - 2, 12, 12, self._colour(index), name)
            self._text(x + 17, y + 8, name, "start")
            x += width
        return row + 1

    def _values(self) -> list[float]:
        if self.layout.get("barmode") == "stack":
            columns = zip(*[trace["y"] for trace in self.traces], strict=True)
            return [sum(value or 0.0 for value in column) for column in columns]
        return [value for trace in self.traces for value in trace["y"] if value is not None]

    def _y_scale(self) -> _Scale:
        limits = [shape["y0"] for shape in self.layout.get("shapes", ())]
        top = max([*self._values(), *limits], default=1.0) or 1.0
        step = nice_step(top / TICKS)
        return _Scale(0.0, math.ceil(top / step - 1e-9) * step, self.bottom, self.top)

    def _y_axis(self) -> None:
        step = nice_step(self.y.high / TICKS)
        for index in range(round(self.y.high / step) + 1):
            value = index * step
            self._line(LEFT, self.y(value), WIDTH - RIGHT, self.y(value), GRID)
            self._text(LEFT - 8, self.y(value) + 4, f"{value:.6g}", "end")

    def _categories(self) -> list[str]:
        if any(trace["type"] != "bar" for trace in self.traces):
            return []
        return list(dict.fromkeys(str(x) for trace in self.traces for x in trace["x"]))

    def _category_axis(self) -> None:
        slot = (WIDTH - RIGHT - LEFT) / len(self.categories)
        for index, name in enumerate(self.categories):
            room = max(3, int(slot / LETTER))
            for line, text in enumerate(_wrapped(name, room)):
                self._text(LEFT + (index + 0.5) * slot, self.bottom + 16 + 14 * line, text)

    def _bars(self) -> None:
        stacked = self.layout.get("barmode") == "stack"
        slot = (WIDTH - RIGHT - LEFT) / len(self.categories)
        width = slot * 0.8 / (1 if stacked else len(self.traces))
        below = dict.fromkeys(self.categories, 0.0)
        for number, trace in enumerate(self.traces):
            for name, value in zip(map(str, trace["x"]), trace["y"], strict=True):
                if value is None:
                    continue
                x = LEFT + (self.categories.index(name) + 0.1) * slot + (0 if stacked else number * width)
                base = below[name] if stacked else 0.0
                height = self.y(base) - self.y(base + value)
                title = f"{trace['name']}, {name}: {value:.4g}"
                self._rect(x, self.y(base + value), width * 0.96, height, self._colour(number), title)
                below[name] += value

    def _lines(self) -> None:
        axis = self.layout["xaxis"]
        xs = [x for trace in self.traces for x in trace["x"]]
        low, high = min(xs), max(xs)
        log = axis.get("type") == "log"
        high = high if high > low else low + 1
        scale = _Scale(low, high, LEFT + 10, WIDTH - RIGHT - 10, log)
        for value in axis.get("tickvals") or _ticks(low, high):
            self._line(scale(value), self.top, scale(value), self.bottom, GRID)
            self._text(scale(value), self.bottom + 16, f"{value:.6g}")
        for index, trace in enumerate(self.traces):
            points = [(scale(x), self.y(y)) for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
            self._polyline(points, self._colour(index), (trace.get("line") or {}).get("dash"))

    def _polyline(self, points: Sequence[tuple[float, float]], colour: str, dash: str | None) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f' stroke-dasharray="{DASHES[dash]}"' if dash in DASHES else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{stroke}/>')
        self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]

    def _limits(self) -> None:
        for shape in self.layout.get("shapes", ()):
            y = self.y(shape["y0"])
            self._line(LEFT, y, WIDTH - RIGHT, y, LIMIT_COLOUR, ' stroke-width="1.5" stroke-dasharray="6 4"')

    def _titles(self) -> None:
        self._line(LEFT, self.bottom, WIDTH - RIGHT, self.bottom, INK)
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, self.layout["xaxis"]["title"]["text"])
        middle = (self.top + self.bottom) / 2
        turn = f' transform="rotate(-90 16 {middle:.1f})"'
        self._text(16, middle, self.layout["yaxis"]["title"]["text"], more=turn)


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is at least `least`."""
    scale = 10.0 ** math.floor(math.log10(least))
    return next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= least * (1 - 1e-9))


def _ticks(low: float, high: float) -> list[float]:
    step = nice_step((high - low) / TICKS)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _wrapped(text: str, room: int) -> list[str]:
    """At most two lines of about `room` letters, broken at blanks."""
    if len(text) <= room or " " not in text:
        return [text]
    words = text.split()
    cut = next((n for n in range(len(words), 0, -1) if len(" ".join(words[:n])) <= room), 1)
    return [" ".join(words[:cut]), " ".join(words[cut:])]
