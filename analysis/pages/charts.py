"""Static figures for documents: bars and lines as SVG, drawn by matplotlib. Equal figures give equal bytes."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.pages.theme import LIMIT_COLOUR, Figure, bar, figure, palette, scatter
from confsim.errors import InputError
from traces.files import write_whole

INCHES = (7.6, 4.0)
STYLE = {
    "svg.hashsalt": "confsim",
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#1f2328",
    "axes.axisbelow": True,
    "grid.color": "#d8dee4",
    "legend.frameon": False,
}
DASHES = {"dash": "--", "dot": ":", "dashdot": "-."}


def bars(
    x: Sequence[Any], series: Mapping[str, Sequence[float | None]], x_title: str, y_title: str, stacked: bool = False
) -> Figure:
    """A bar of each series over each category of `x`."""
    colours, names = palette(series), list(map(str, x))
    data = [bar(name, names, y, colours[name]) for name, y in series.items()]
    axes = {"xaxis": {"type": "category"}, "yaxis": {"rangemode": "tozero"}}
    return figure(data, x_title, y_title, barmode="stack" if stacked else "group", bargap=0.2, **axes)


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    x_title: str,
    y_title: str,
    log_x: bool = False,
    limit: float | None = None,
) -> Figure:
    """A line of each series over the numbers `x`; `limit` is drawn as a dashed line."""
    colours = palette(series)
    data = [scatter(name, x, y, "lines+markers", line={"color": colours[name]}) for name, y in series.items()]
    axes: dict[str, Any] = {"yaxis": {"rangemode": "tozero"}}
    if log_x:
        axes["xaxis"] = {"type": "log", "tickvals": list(x)}
    if limit is not None:
        line = {"dash": "dash", "color": LIMIT_COLOUR}
        axes["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit, "line": line}]
    return figure(data, x_title, y_title, **axes)


def missing() -> str | None:
    """A line that says what to install where SVG cannot be drawn; None where it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "figures as SVG need matplotlib: pip install 'confsim[docs]'"
    return None


def write_svg(drawing: Figure, path: Path) -> None:
    """Write a figure of `bars` or `lines` as SVG.

    Raises:
        InputError: where matplotlib is not installed.
    """
    write_whole(path, svg(drawing))


def svg(drawing: Figure) -> str:
    """A figure of `bars` or `lines` as an SVG document.

    Raises:
        InputError: where matplotlib is not installed.
    """
    with _canvas() as (canvas, axes):
        draw = _draw_bars if drawing["data"][0]["type"] == "bar" else _draw_lines
        draw(axes, drawing["data"], drawing["layout"])
        _finish(axes, drawing)
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        return text.getvalue()


@contextmanager
def _canvas() -> Iterator[tuple[Any, Any]]:
    """An empty figure and its axes, in this module's style; no window and no global state."""
    if line := missing():
        raise InputError(line)
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        canvas = Canvas(INCHES, layout="constrained")
        yield canvas, canvas.subplots()


def _draw_bars(axes: Any, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
    categories = traces[0]["x"]
    stacked = layout["barmode"] == "stack"
    width = 0.8 / (1 if stacked else len(traces))
    below = [0.0] * len(categories)
    for number, trace in enumerate(traces):
        places = [place + (0.0 if stacked else (number + 0.5) * width - 0.4) for place in range(len(categories))]
        heights = [value or 0.0 for value in trace["y"]]
        colour = trace["marker"]["color"]
        axes.bar(places, heights, width * 0.96, below if stacked else 0.0, color=colour, label=trace["name"])
        below = [low + height for low, height in zip(below, heights, strict=True)]
    step = 1 + (len(categories) - 1) // 20  # so that labels do not collide
    axes.set_xticks(range(0, len(categories), step), categories[::step])


def _draw_lines(axes: Any, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
    for trace in traces:
        points = [(x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
        look = trace["line"]
        style = {"color": look["color"], "linestyle": DASHES.get(look.get("dash"), "-"), "label": trace["name"]}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.8, **style)
    if ticks := layout["xaxis"].get("tickvals"):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    for shape in layout.get("shapes", ()):
        axes.axhline(shape["y0"], color=LIMIT_COLOUR, linestyle="--", linewidth=1.3)


def _finish(axes: Any, drawing: Figure) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(axis="y" if drawing["data"][0]["type"] == "bar" else "both")
    axes.set_xlabel(drawing["layout"]["xaxis"]["title"]["text"])
    axes.set_ylabel(drawing["layout"]["yaxis"]["title"]["text"])
    if len(drawing["data"]) > 1:
        columns = max(1, min(len(drawing["data"]), 110 // (8 + max(len(trace["name"]) for trace in drawing["data"]))))
        axes.figure.legend(loc="outside upper left", ncols=columns)
