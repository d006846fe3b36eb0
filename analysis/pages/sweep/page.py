"""The page of a sweep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any

from analysis.commands.shared import rate, seconds, share
from analysis.pages.report.compare_runs import mismatches
from analysis.pages.report.figures import Figure
from analysis.pages.report.load import Goodput, Results, Run
from analysis.pages.report.page import Page
from analysis.pages.sweep import figures as draw
from analysis.pages.sweep.view import (
    GPUS,
    RATE,
    ROUTER,
    SEED,
    Row,
    View,
    goodput_rows,
    groups,
    is_numeric,
    label,
    shown,
)
from confsim.errors import InputError
from confsim.setup.configuration import did_you_mean

MOST_ROWS = 300  # of the table of results
MOST_PAIRS = 6  # of axes that figures are drawn for
MOST_FACETS = 6  # heat maps of one pair, one for each value of further axes
MOST_ROUTED = 8  # runs whose instances are drawn


@dataclass(frozen=True)
class Choice:
    """What to draw: the axis of curves, the key that tells lines apart, and the column; None picks each."""

    x: str | None = None
    by: str | None = None
    metric: str | None = None


class Figures:
    """A page, and its figures by name for image files."""

    def __init__(self) -> None:
        self.page = Page()
        self.named: list[tuple[str, Figure]] = []

    def add(self, name: str, figure: Figure | None, caption: str = "") -> bool:
        """Draw a figure if there is one."""
        if figure is None:
            return False
        self.page.figure(figure, caption)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
        self.named.append((f"{len(self.named) + 1:02d}-{slug}"[:80], figure))
        return True


def render(view: View, choice: Choice, title: str | None = None) -> tuple[str, list[tuple[str, Figure]]]:
    """The page, and its figures with names.

    Raises:
        InputError: for a key that the sweep does not have.
    """
    _check(view, choice)
    out = Figures()
    heading = title or f"Sweep of {view.command}: {' × '.join(view.axes) or 'one point'}"
    _head(out.page, view, heading)
    _warnings(out.page, view)
    best = goodput_rows(view)
    _curves(out, view, best, choice)
    _heat_maps(out, view, best, choice)
    _pareto(out, view, best, choice)
    _routers(out, view)
    _results(out.page, view)
    _failures(out.page, view)
    return out.page.html(heading), out.named


def _check(view: View, choice: Choice) -> None:
    known = list(view.rows[0])
    for option, key in (("x", choice.x), ("by", choice.by), ("metric", choice.metric)):
        if key is not None and not any(key in row for row in view.rows) and not _is_derived(view, key):
            axes = ", ".join(view.axes) or "none"
            raise InputError(f"{option}={key}: no such column{did_you_mean(key, known)}; the sweep's axes are {axes}")
    if choice.metric is not None and not is_numeric(
        row[choice.metric] for row in [*view.rows, *goodput_rows(view)] if row.get(choice.metric) is not None
    ):
        raise InputError(f"metric={choice.metric}: not a number; try attainment, goodput or ttft_s.p95")


def _is_derived(view: View, key: str) -> bool:
    return key in ("goodput", "goodput_per_gpu") and bool(goodput_rows(view))


def _head(page: Page, view: View, heading: str) -> None:
    synthetic = [bool(row.get("synthetic")) for row in view.rows]
    badge = ""
    if any(synthetic):
        badge = f' <span class="badge">synthetic trace{"" if all(synthetic) else " in some results"}</span>'
    page.add(f"<h1>{escape(heading)}{badge}</h1>")
    parts = [f"{view.present} of {view.planned} planned results are here"]
    if view.failures:
        parts.append(f"{len(view.failures)} failed")
    absent = view.planned - view.present - len(view.failures)
    if absent:
        parts.append(f"{absent} missing: start the sweep again to make them")
    page.add(f'<p class="soft" id="counts">{escape(", ".join(parts))}</p>')
    for axis, values in view.axes.items():
        text = ", ".join(shown(value) for value in values[:12]) + (" …" if len(values) > 12 else "")
        page.add(f'<p class="soft" style="margin:0">{escape(axis)}: {escape(text)}</p>')


def _warnings(page: Page, view: View) -> None:
    names = {row["id"]: _name(view, row) for row in view.rows}
    if view.command == "simulate":
        runs = tuple(Run(names[key], view.folders[0], dict(content)) for key, content in view.contents.items())
        results = Results((), runs)
    else:
        found = tuple(Goodput(names[key], view.folders[0], dict(content)) for key, content in view.contents.items())
        results = Results(found, ())
    lines: dict[str, tuple[str, list[str]]] = {line: (line, []) for line in mismatches(results)}
    for row in view.rows:
        for line in filter(None, (row.get("warnings") or "").split("; ")):
            if not line.startswith("the trace is synthetic"):
                alike = re.sub(r"\d[\d.,]*", "#", line)  # the same warning with other numbers
                lines.setdefault(alike, (line, []))[1].append(_name(view, row))
    if not lines:
        return
    items = [f"<li>{_where(where)}{escape(line)}</li>" for line, where in list(lines.values())[:20]]
    if len(lines) > 20:
        items.append(f"<li>and {len(lines) - 20} more, in results.parquet</li>")
    page.add(f'<section class="warnings"><h2>Warnings</h2><ul>{"".join(items)}</ul></section>')


def _where(names: Sequence[str]) -> str:
    if not names:
        return ""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - 1} more runs, with other numbers" if len(distinct) > 1 else ""
    return f"<b>{escape(distinct[0] + more)}</b>: "


def _name(view: View, row: Row) -> str:
    return label(list(view.axes), [row.get(axis) for axis in view.axes]) or "the run"


# --- curves and heat maps --------------------------------------------------------------------------------------------


def _series(view: View, best: Sequence[Row], metric: str) -> list[Row]:
    """The rows that have a metric: those of goodputs for a goodput, those of runs for anything else."""
    return list(best) if metric.startswith("goodput") else view.rows


def _metrics(view: View, best: Sequence[Row], choice: Choice) -> list[str]:
    if choice.metric:
        return [choice.metric]
    if view.command == "goodput":
        return ["goodput"]
    return ["attainment", *(["goodput"] if best else [])]


def _free(view: View, metric: str) -> list[str]:
    """Axes of a metric; a goodput of simulations has none for the rate."""
    return [axis for axis in view.free if not (metric.startswith("goodput") and axis == RATE)]


def _pick(view: View, metric: str, choice: Choice) -> tuple[str | None, str | None]:
    """Axis and key of lines for a metric, as chosen or the ones that fit best."""
    free = _free(view, metric)
    numeric = sorted((axis for axis in free if is_numeric(view.axes[axis])), key=lambda axis: -len(view.axes[axis]))
    x = choice.x or (RATE if RATE in free else numeric[0] if numeric else free[0] if free else None)
    rest = [axis for axis in free if axis != x]
    words = [axis for axis in rest if not is_numeric(view.axes[axis])]
    by = choice.by or ("scheme" if "scheme" in rest else words[0] if words else rest[0] if rest else None)
    return x, by


def _curves(out: Figures, view: View, best: Sequence[Row], choice: Choice) -> None:
    begun = False
    for metric in _metrics(view, best, choice):
        rows = _series(view, best, metric)
        free = _free(view, metric)
        x, by = _pick(view, metric, choice)
        if x is None:
            continue
        if not begun:
            seeds = len(view.axes.get(SEED, ()))
            note = f"Lines are medians over {seeds} seeds, bands the range of the seeds." if seeds else ""
            out.page.heading("Curves", note)
            begun = True
        others = [axis for axis in free if axis not in (x, by)]
        out.add(f"{metric} by {x}", draw.curves(rows, metric, x, by, others), _caption(metric, x, by))
        pairs = [(a, b) for a in free for b in free if a != b and (a, b) != (x, by)]
        if pairs:
            out.page.add("<details><summary>The same over other axes</summary>")
            for a, b in pairs[:MOST_PAIRS]:
                others = [axis for axis in free if axis not in (a, b)]
                out.add(f"{metric} by {a} and {b}", draw.curves(rows, metric, a, b, others), _caption(metric, a, b))
            out.page.add("</details>")


def _caption(metric: str, x: str, by: str | None) -> str:
    return f"{metric} by {x}" + (f", a colour for each {by}" if by else "")


def _heat_maps(out: Figures, view: View, best: Sequence[Row], choice: Choice) -> None:
    begun = False
    for metric in _metrics(view, best, choice):
        rows = _series(view, best, metric)
        free = _free(view, metric)
        highest = max((float(row[metric]) for row in rows if row.get(metric) is not None), default=None)
        for pair in list(combinations(free, 2))[:MOST_PAIRS]:
            x, y = (pair[1], pair[0]) if pair[1] == RATE or not is_numeric(view.axes[pair[0]]) else pair
            others = [axis for axis in free if axis not in pair]
            facets = list(groups(rows, others).items())
            if not begun:
                out.page.heading("Heat maps", "Medians where several runs share a cell.")
                begun = True
            if len(facets) > MOST_FACETS:
                facets = [((), list(rows))]
            out.page.add('<div class="pair">')
            for values, own in facets:
                within = f" ({label(others, values)})" if values else ""
                figure = draw.heat_map(own, metric, x, y, highest)
                out.add(f"{metric} by {x} and {y}{within}", figure, f"{metric}{within}")
            out.page.add("</div>")


def _pareto(out: Figures, view: View, best: Sequence[Row], choice: Choice) -> None:
    if not any(row.get("goodput_per_gpu") for row in best):
        return
    free = _free(view, "goodput")
    by = choice.by or ("scheme" if "scheme" in free else None)
    figures = []
    for x, less, what in (
        ("slo.tbt_s", True, "the TBT limit"),
        ("slo.ttft_s", True, "the TTFT limit"),
        (GPUS, True, "the number of GPUs"),
        ("ttft_s.p95", True, "P95 TTFT at the goodput"),
    ):
        if x in free or x in (GPUS, "ttft_s.p95"):
            figures.append((x, what, draw.pareto(best, x, less, by, free)))
    if not any(figure for _, _, figure in figures):
        return
    out.page.heading("Goodput per GPU, and what it costs", "Stars are runs that no other run beats in both.")
    out.page.add('<div class="pair">')
    for x, what, figure in figures:
        out.add(f"pareto of goodput per gpu and {x}", figure, f"Goodput per GPU against {what}")
    out.page.add("</div>")


# --- routers ---------------------------------------------------------------------------------------------------------


def _routers(out: Figures, view: View) -> None:
    routed = [row for row in view.rows if (view.contents[row["id"]].get("instances"))]
    if not routed:
        return
    page = out.page
    page.heading("Instances and routers", "How the router spread requests, and what that did to each instance.")
    head = [
        "run",
        "router",
        "instances",
        "attainment",
        "P95 TTFT",
        "prefix hits",
        "requests",
        "utilisation",
        "attained",
    ]
    page.table(head, [_router_row(view, row) for row in routed[:MOST_ROWS]], [0, 1])
    picked = _one_a_router(routed)
    runs = [(_name(view, row), view.contents[row["id"]]["instances"]) for row in picked]
    page.add('<div class="pair">')
    for key in ("requests", "attainment", "utilisation"):
        out.add(f"{key} of instances", draw.instance_bars(runs, key, key), f"{key.capitalize()} of each instance")
    page.add("</div>")


def _one_a_router(rows: Sequence[Row]) -> list[Row]:
    """Runs to draw: all if they are few, else the most loaded one of each router."""
    if len(rows) <= MOST_ROUTED:
        return list(rows)
    loaded = [max(own, key=lambda row: row.get("offered_rate") or 0.0) for own in groups(rows, [ROUTER]).values()]
    return loaded[:MOST_ROUTED]


def _router_row(view: View, row: Row) -> list[str]:
    instances: list[dict[str, Any]] = view.contents[row["id"]]["instances"]
    prompt = row.get("tokens.prompt") or 0
    hits = row.get("prefix_hit_tokens") or 0
    cells = [
        escape(_name(view, row)),
        escape(shown(row.get(ROUTER))),
        str(len(instances)),
        share(row.get("attainment")),
    ]
    cells += [seconds(row.get("ttft_s.p95")), share(hits / prompt if prompt else None)]
    for key, form in (("requests", lambda v: f"{v:,}"), ("utilisation", share), ("attainment", share)):
        values = [part[key] for part in instances if part.get(key) is not None]
        cells.append(f"{form(min(values))} to {form(max(values))}" if values else "–")
    return cells


# --- tables ----------------------------------------------------------------------------------------------------------


def _results(page: Page, view: View) -> None:
    total = len(view.rows)
    note = "" if total <= MOST_ROWS else f"{MOST_ROWS} of {total} rows; all are in results.parquet."
    page.heading("Results", note)
    axes = list(view.axes)
    numbers = ["goodput", "goodput_per_gpu", "attainment", "ttft_s.p50", "ttft_s.p95", "gap_s.p95", "max_gap_s.p95"]
    columns = [key for key in numbers if any(row.get(key) is not None for row in view.rows)]
    page.add("<details open><summary>All results</summary>")
    rows = (
        [*(escape(shown(row.get(axis))) for axis in axes), *(_cell(key, row.get(key)) for key in columns)]
        for row in view.rows[:MOST_ROWS]
    )
    page.table([*axes, *columns], rows, range(len(axes)))
    page.add("</details>")


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key == "attainment":
        return share(value)
    return rate(value) if key.startswith("goodput") else seconds(value)


def _failures(page: Page, view: View) -> None:
    if not view.failures:
        return
    page.heading("Failed runs", "Tracebacks are in runs/ID/error.txt.")
    rows = [
        [escape(_name(view, row)), escape(str(row["error"])), f"<code>{row['id']}</code>"]
        for row in view.failures[:MOST_ROWS]
    ]
    page.table(["run", "error", "ID"], rows, [0, 1, 2])
