"""What the template of a sweep (templates/sweep.html) is given: warnings, and which figures over which axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from analysis.pages import html, theme
from analysis.pages.report.compare_runs import common_and_different, mismatches
from analysis.pages.report.load import LoadedRun, LoadedSearch, Results
from analysis.pages.report.page import setting
from analysis.pages.sweep import figures as draw
from analysis.pages.sweep.view import (
    GPUS,
    RATE,
    ROUTER,
    SEED,
    ResultRow,
    SweepView,
    goodput_rows,
    groups,
    is_numeric,
    label,
)
from analysis.pages.theme import Figure
from confsim.errors import InputError
from confsim.setup.configuration import did_you_mean

MAX_ROWS = 300  # of the table of results
MAX_PAIRS = 6  # of axes that figures are drawn for
MAX_FACETS = 6  # heat maps of one pair, one for each value of further axes
MAX_ROUTED = 8  # runs whose instances are drawn
MAX_WARNINGS = 20
MAX_SETTINGS = 6
NUMBERS = ("goodput", "goodput_per_gpu", "attainment", "ttft_s.p50", "ttft_s.p95", "gap_s.p95", "max_gap_s.p95")
COSTS = {  # what goodput per GPU is drawn against
    "slo.tbt_s": "the TBT limit",
    "slo.ttft_s": "the TTFT limit",
    GPUS: "the number of GPUs",
    "ttft_s.p95": "P95 TTFT at the goodput",
}


@dataclass(frozen=True)
class Choice:
    """What to draw: the axis of curves, the key that tells lines apart, and the column; None picks each."""

    x: str | None = None
    by: str | None = None
    metric: str | None = None


class Drawing(NamedTuple):
    """A figure (None: there is nothing to draw), the words over it, and the name of its image file."""

    figure: Figure | None
    caption: str
    name: str


def render(view: SweepView, choice: Choice, title: str | None = None) -> tuple[str, list[tuple[str, Figure]]]:
    """The page, and its figures with names.

    Raises:
        InputError: for a key that the sweep does not have.
    """
    _check(view, choice)
    drawn = html.Figures()
    plan = Plan(view, choice)
    results = _results(view)
    text = html.render(
        "sweep.html",
        drawn,
        title=title or f"Sweep of {view.command}: {' × '.join(map(theme.name, view.axes)) or 'one point'}",
        view=view,
        synthetic=[bool(row.get("synthetic")) for row in view.rows],
        settings=_settings(view),
        warnings=list(_warnings(view, results)),
        seeds=len(view.axes.get(SEED, ())),
        curves=list(plan.curves()),
        heat_maps=list(plan.heat_maps()),
        pareto=list(plan.pareto()),
        routed=_routed(view),
        instances=list(_instances(view)),
        columns=[key for key in NUMBERS if any(row.get(key) is not None for row in view.rows)],
        common=common_and_different(results)[0],
        max_rows=MAX_ROWS,
    )
    return text, [(_slug(number, name), figure) for number, (name, figure) in enumerate(drawn.named, start=1)]


def _slug(number: int, name: str) -> str:
    return f"{number:02d}-{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-').lower()}"[:80]


def _check(view: SweepView, choice: Choice) -> None:
    best = goodput_rows(view)
    for option, key in (("x", choice.x), ("by", choice.by), ("metric", choice.metric)):
        if key is not None and not any(key in row for row in [*view.rows, *best]):
            known, axes = list(view.rows[0]), ", ".join(view.axes) or "none"
            raise InputError(f"{option}={key}: no such column{did_you_mean(key, known)}; the sweep's axes are {axes}")
    values = [row.get(choice.metric) for row in [*view.rows, *best]] if choice.metric else []
    if not is_numeric(value for value in values if value is not None):
        raise InputError(f"metric={choice.metric}: not a number; try attainment, goodput or ttft_s.p95")


# --- head ------------------------------------------------------------------------------------------------------------


def _results(view: SweepView) -> Results:
    """The sweep's results as a report has them, by their names on the page."""
    names = {row["id"]: view.label_of(row) for row in view.rows}
    folder, contents = view.folders[0], view.contents.items()
    if view.command == "simulate":
        return Results((), tuple(LoadedRun(names[key], folder, dict(content)) for key, content in contents))
    return Results(tuple(LoadedSearch(names[key], folder, dict(content)) for key, content in contents), ())


def _settings(view: SweepView) -> list[str]:
    """Loads, models, GPUs and SLOs of all runs, where those are few; what they have in common stands below."""
    labels = list(dict.fromkeys(str(content.get("label", "")) for content in view.contents.values()))
    found = list(dict.fromkeys(setting({**content, "label": ""}) for content in view.contents.values()))
    if len(labels) > 1:
        labels = [f"{labels[0]} and {len(labels) - 1} more loads"]
    return [*filter(None, labels), *found][:MAX_SETTINGS]


def _warnings(view: SweepView, results: Results) -> Iterator[tuple[str, str]]:
    """Where, and what; the same warning with other numbers once."""
    lines: dict[str, tuple[str, list[str]]] = {line: (line, []) for line in mismatches(results)}
    for row in view.rows:
        for line in filter(None, (row.get("warnings") or "").split("; ")):
            if not line.startswith("the trace is synthetic"):
                alike = re.sub(r"\d[\d.,]*", "#", line)
                lines.setdefault(alike, (line, []))[1].append(view.label_of(row))
    for line, names in list(lines.values())[:MAX_WARNINGS]:
        distinct = list(dict.fromkeys(names))
        more = f" and {len(distinct) - 1} more runs, with other numbers" if len(distinct) > 1 else ""
        yield (distinct[0] + more if distinct else ""), line
    if len(lines) > MAX_WARNINGS:
        yield "", f"and {len(lines) - MAX_WARNINGS} more, in results.parquet"


# --- curves, heat maps and trades ------------------------------------------------------------------------------------


class Plan:
    """Which figures a page draws, over which axes."""

    def __init__(self, view: SweepView, choice: Choice) -> None:
        self.view, self.choice = view, choice
        self.best = goodput_rows(view)
        targets = {(content.get("slo") or {}).get("attainment") for content in view.contents.values()}
        self.target: float | None = targets.pop() if len(targets) == 1 else None

    def rows(self, metric: str) -> list[ResultRow]:
        """The rows that have a metric: those of goodputs for a goodput, those of runs for anything else."""
        return self.best if metric.startswith("goodput") else self.view.rows

    def metrics(self) -> list[str]:
        """The columns to draw."""
        if self.choice.metric:
            return [self.choice.metric]
        if self.view.command == "goodput":
            return ["goodput"]
        return ["attainment", *(["goodput"] if self.best else [])]

    def free(self, metric: str) -> list[str]:
        """Axes of a metric; a goodput of simulations has none for the rate."""
        return [axis for axis in self.view.free if not (metric.startswith("goodput") and axis == RATE)]

    def pick(self, metric: str) -> tuple[str | None, str | None]:
        """Axis and key of lines for a metric, as chosen or the ones that fit best."""
        free, axes = self.free(metric), self.view.axes
        numeric = sorted((axis for axis in free if is_numeric(axes[axis])), key=lambda axis: -len(axes[axis]))
        x = self.choice.x or (RATE if RATE in free else numeric[0] if numeric else free[0] if free else None)
        rest = [axis for axis in free if axis != x]
        words = [axis for axis in rest if not is_numeric(axes[axis])]
        by = self.choice.by or ("scheme" if "scheme" in rest else words[0] if words else rest[0] if rest else None)
        return x, by

    def curves(self) -> Iterator[dict[str, Any]]:
        """For each metric the main curve, and those over other pairs of axes."""
        for metric in self.metrics():
            x, by = self.pick(metric)
            if x is not None:
                free = self.free(metric)
                pairs = [(a, b) for a in free for b in free if a != b and (a, b) != (x, by)][:MAX_PAIRS]
                drawn = [drawing for a, b in pairs if (drawing := self._curve(metric, a, b)).figure]
                yield {"main": self._curve(metric, x, by), "others": drawn}

    def _curve(self, metric: str, x: str, by: str | None) -> Drawing:
        others = [axis for axis in self.free(metric) if axis not in (x, by)]
        words = f"{theme.name(metric)} by {theme.name(x)}" + (f", a colour for each {theme.name(by)}" if by else "")
        figure = draw.curves(self.rows(metric), metric, x, by, others, self.target)
        return Drawing(figure, _capital(words), f"{metric} by {x}" + (f" and {by}" if by else ""))

    def heat_maps(self) -> Iterator[list[Drawing]]:
        """For each metric and pair of axes a heat map for each value of the others, or one over all."""
        for metric in self.metrics():
            rows, free = self.rows(metric), self.free(metric)
            highest = max((float(row[metric]) for row in rows if row.get(metric) is not None), default=None)
            for pair in list(combinations(free, 2))[:MAX_PAIRS]:
                x, y = (pair[1], pair[0]) if pair[1] == RATE or not is_numeric(self.view.axes[pair[0]]) else pair
                others = [axis for axis in free if axis not in pair]
                facets = list(groups(rows, others).items())
                if len(facets) > MAX_FACETS:
                    facets = [((), list(rows))]
                drawn = []
                for values, own in facets:
                    within = f" ({label(others, values)})" if values else ""
                    figure = draw.heat_map(own, metric, x, y, highest)
                    caption = _capital(theme.name(metric)) + within
                    drawn.append(Drawing(figure, caption, f"{metric} by {x} and {y}{within}"))
                yield drawn

    def pareto(self) -> Iterator[Drawing]:
        """Goodput per GPU against each cost that varies."""
        if not any(row.get("goodput_per_gpu") for row in self.best):
            return
        free = self.free("goodput")
        by = self.choice.by or ("scheme" if "scheme" in free else None)
        for x, what in COSTS.items():
            if x in free or x in (GPUS, "ttft_s.p95"):
                figure = draw.pareto(self.best, x, True, by, free)
                if figure:
                    yield Drawing(figure, f"Goodput per GPU against {what}", f"pareto of goodput per gpu and {x}")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- routers ---------------------------------------------------------------------------------------------------------


def _rows_with_instances(view: SweepView) -> list[ResultRow]:
    return [row for row in view.rows if view.contents[row["id"]].get("instances")]


def _routed(view: SweepView) -> list[dict[str, Any]]:
    """Runs over several instances as the table has them."""
    found = []
    for row in _rows_with_instances(view):
        prompt, hits = row.get("tokens.prompt") or 0, row.get("prefix_hit_tokens") or 0
        found.append(
            {
                "name": view.label_of(row),
                "router": row.get(ROUTER),
                "instances": view.contents[row["id"]]["instances"],
                "attainment": row.get("attainment"),
                "ttft_p95": row.get("ttft_s.p95"),
                "hits": hits / prompt if prompt else None,
            }
        )
    return found


def _instances(view: SweepView) -> Iterator[Drawing]:
    """Numbers of every instance: of all runs if they are few, else of the most loaded one of each router."""
    rows: Sequence[ResultRow] = _rows_with_instances(view)
    if len(rows) > MAX_ROUTED:
        loaded = [max(own, key=lambda row: row.get("offered_rate") or 0.0) for own in groups(rows, [ROUTER]).values()]
        rows = loaded[:MAX_ROUTED]
    runs = [(view.label_of(row), view.contents[row["id"]]["instances"]) for row in rows]
    for key in ("requests", "attainment", "utilisation"):
        yield Drawing(draw.instance_bars(runs, key), f"{key.capitalize()} of each instance", f"{key} of instances")
