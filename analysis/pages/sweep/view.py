"""The rows of one or more sweeps as the report's figures want them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.pages.report.load import read_json
from analysis.pages.theme import quantity, shown
from analysis.sweep.folder import SweepFolder, read_plan
from analysis.sweep.table import build_table
from confsim.errors import InputError

SEED = "seed"
RATE = "rate"
ROUTER = "cluster.router"
GPUS = "gpus"  # of all instances together; this name goes in figures too
LATENCIES = ("ttft_s.", "max_gap_s.", "gap_s.")  # of a run; a goodput of 0 has none

ResultRow = dict[str, Any]


@dataclass(frozen=True)
class SweepView:
    """Rows that have a result (`rows`) and those that failed, with the axes' values in order of appearance."""

    command: str
    axes: dict[str, list[Any]]
    rows: list[ResultRow]
    failures: list[ResultRow]
    planned: int
    present: int
    folders: list[Path] = field(default_factory=list)
    contents: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # summary or goodput.json, by identity

    @property
    def free(self) -> list[str]:
        """Axes that figures can spread over: all but the seed."""
        return [axis for axis in self.axes if axis != SEED]

    @property
    def missing(self) -> int:
        """Planned results that are neither here nor failed."""
        return self.planned - self.present - len(self.failures)

    def label_of(self, row: ResultRow) -> str:
        """A row by its values of the axes."""
        return label(list(self.axes), [row.get(axis) for axis in self.axes]) or "the run"


def load_view(folders: Sequence[Path]) -> SweepView:
    """Read sweeps; those that did not finish too.

    Raises:
        InputError: for a folder that is no sweep or has no result, or sweeps of different subcommands.
    """
    rows: list[ResultRow] = []
    axes: dict[str, list[Any]] = {}
    contents: dict[str, Mapping[str, Any]] = {}
    planned, done, command = 0, 0, ""
    for path in folders:
        plan = read_plan(path)
        if plan is None:
            raise InputError(f"{path}: no sweep (it has no sweep.json); a report has sweeps or runs, not both")
        if command and plan["command"] != command:
            raise InputError(f"{path}: a sweep of {plan['command']}, the others are of {command}: report them apart")
        command = str(plan["command"])
        folder = SweepFolder(path)
        own = build_table(folder, plan).to_pylist()
        rows += own
        planned += int(plan["planned"])
        done += len({row["run"] for row in own if row["status"] == "done"})
        for axis in plan["axes"]:
            axes.setdefault(axis, [])
        name = "summary.json" if command == "simulate" else "goodput.json"
        for identity in dict.fromkeys(row["id"] for row in own if row["status"] == "done"):
            contents[identity] = read_json(folder.run(identity) / name)
    good = [_completed(row) for row in rows if row["status"] == "done"]
    if not good:
        raise InputError(f"{folders[0]}: no result yet of {planned} planned ones: start the sweep again")
    failures = [row for row in rows if row["status"] == "failed"]
    return SweepView(command, _axes(axes, good), good, failures, planned, done, list(folders), contents)


def _completed(row: ResultRow) -> ResultRow:
    """With the number of GPUs, and per-GPU figures by that."""
    own = {**row}
    if row.get(GPUS) is None:
        own[GPUS] = int(row.get("cluster.gpus") or 1) * int(row.get("cluster.instances") or 1)
    return own


def _axes(named: Iterable[str], rows: Sequence[ResultRow]) -> dict[str, list[Any]]:
    """Axes with more than one value; `schemes` of a goodput search shows as the scheme of each row."""
    names = ["scheme" if name == "schemes" else name for name in named]
    if len({row.get("scheme") for row in rows}) > 1 and "scheme" not in names:
        names.append("scheme")
    found = {name: list(dict.fromkeys(row.get(name) for row in rows)) for name in dict.fromkeys(names)}
    axes = {name: values for name, values in found.items() if len(values) > 1}
    return {name: sorted(values) if all(_is_number(v) for v in values) else values for name, values in axes.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_numeric(values: Iterable[Any]) -> bool:
    """Whether all values are numbers."""
    return all(_is_number(value) for value in values)


def groups(rows: Iterable[ResultRow], keys: Sequence[str]) -> dict[tuple[Any, ...], list[ResultRow]]:
    """Rows by their values of some keys, in order of appearance."""
    found: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return found


def label(keys: Sequence[str], values: Sequence[Any]) -> str:
    """Values with their names and units, as a legend says them: `TBT limit 0.1 s, conflux`."""
    return ", ".join(_said(key, value) for key, value in zip(keys, values, strict=True))


def _said(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    name, unit = quantity(key)
    return f"{name} {shown(value)}" + (f" {unit}" if unit and value is not None else "")


def goodput_rows(view: SweepView) -> list[ResultRow]:
    """Rows with a `goodput`: those of searches, or of simulations at several rates, one for each other combination.

    From simulations it is the highest simulated rate below the first one that misses the target.
    """
    if view.command == "goodput":
        return view.rows
    if RATE not in view.axes:
        return []
    others = [axis for axis in view.axes if axis != RATE]
    found = []
    for rows in groups(view.rows, others).values():
        best: ResultRow | None = None
        for row in sorted(rows, key=lambda row: row[RATE] or row.get("offered_rate") or 0.0):
            if not row.get("attained"):
                break
            best = row
        base = best or rows[0]
        goodput = float(base[RATE] or base.get("offered_rate") or 0.0) if best else 0.0
        own = {key: value for key, value in base.items() if best or not key.startswith(LATENCIES)}
        found.append({**own, "goodput": goodput, "goodput_per_gpu": goodput / base[GPUS]})
    return found
