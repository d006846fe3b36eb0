"""All results of a sweep as one Parquet file that pandas, DuckDB or a notebook opens directly.

One row a run, in the order of the plan: the swept keys first, then the choice of every group, then every number of
the result, then every other key of the configuration. A goodput search compares several schemes and gives a row for
each. Nothing in it depends on wall clock or on the number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from analysis.identity import relevant
from analysis.pages.report.load import read_json
from analysis.sweep.folder import RUN, SweepFolder, failure_of, is_complete
from confsim.setup.cache import leaves

META = b"confsim"
FIRST = ("run", "id", "status", "error")
# Parts of a result that are no columns: descriptions, curves, and what the configuration says already.
LEFT_OUT = ("provenance", "distributions", "probes", "candidates", "config", "slo", "cluster", "instances", "schemes")
NAMES = ("scheme", "policy", "model", "gpu")  # of a summary: the names of configured objects, not of choices
SPREAD = ("requests", "attainment", "utilisation")  # of the instances: least and most


def build_table(folder: SweepFolder, plan: Mapping[str, Any]) -> pa.Table:
    """The dataset of the runs that the plan names and that are there, failed ones included."""
    axes = list(plan["axes"])
    rows = [row for entry in plan["runs"] for row in _rows(folder, entry, axes, str(plan["command"]))]
    return to_table(rows, axes)


def _rows(folder: SweepFolder, entry: Mapping[str, Any], axes: Sequence[str], command: str) -> Iterator[dict[str, Any]]:
    path = folder.run(entry["id"])
    head = {"run": entry["run"], "id": entry["id"]}
    base = {axis: _scalar(entry["axes"].get(axis)) for axis in axes} | dict(entry["choices"])
    failure = failure_of(path)
    if failure is not None:
        yield {**head, "status": "failed", "error": failure["error"], **base, **_settings(failure["config"])}
        return
    if not is_complete(path, entry["id"], ".json"):
        return
    settings = _settings(read_json(path / RUN)["config"])
    for metrics in _results(path, command):
        row = {**head, "status": "done", "error": None, **base, **metrics}
        yield row | {key: value for key, value in settings.items() if key not in row}


def _results(path: Path, command: str) -> Iterator[dict[str, Any]]:
    if command == "simulate":
        summary = read_json(path / "summary.json")
        yield _simulated(summary)
        return
    content = read_json(path / "goodput.json")
    shared = {key: content.get(key) for key in ("kind", "label", "synthetic", "target", "tolerance")}
    shared["profile_hash"] = content.get("provenance", {}).get("profile_hash")
    for name, entry in content["schemes"].items():
        own = _flat({key: value for key, value in entry.items() if key not in (*LEFT_OUT, "folder", "warnings")})
        yield {**shared, **own, "scheme": name, "warnings": _warnings(entry)}


def _simulated(summary: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in summary.items() if key not in (*LEFT_OUT, *NAMES, "warnings")}
    row = _flat(own)
    for key in SPREAD:
        values = [part[key] for part in summary.get("instances") or () if part.get(key) is not None]
        if values:
            row |= {f"instances.{key}.least": min(values), f"instances.{key}.most": max(values)}
    row["profile_hash"] = summary.get("provenance", {}).get("profile_hash")
    row["warnings"] = _warnings(summary)
    return row


def _warnings(content: Mapping[str, Any]) -> str | None:
    return "; ".join(content.get("warnings") or ()) or None


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _scalar(value) for key, value in leaves(tree)}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in relevant(config).items() if key != "output"}
    return {key: value for key, value in _flat(own).items() if not key.endswith("_target_")}


def _scalar(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


# --- columns ---------------------------------------------------------------------------------------------------------


def to_table(rows: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> pa.Table:
    """Rows of plain values as a table; a column's type is the narrowest that holds all of its values."""
    names = list(
        dict.fromkeys([*FIRST[:3], *axes, *(key for row in rows for key in row if key not in FIRST), FIRST[3]])
    )
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    table = pa.table(columns)
    return table.replace_schema_metadata({META: json.dumps({"kind": "sweep", "axes": list(axes)}).encode()})


def _column(values: Sequence[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pa.array(values, pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int}:
        return pa.array(values, pa.int64())
    if kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([_text(value) for value in values], pa.string())


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
