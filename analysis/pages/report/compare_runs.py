"""What results of one report have in common, where they differ, and what makes them hard to compare."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from analysis.pages.html import listed
from analysis.pages.report.load import Results

COLUMNS = 8  # results that a table of differences shows
IDENTITY = {  # keys of a provenance that ought to agree, and how to name them
    "git_commit": "commits",
    "profile_hash": "latency profiles",
    "versions": "package versions",
}
QUIET_KEYS = ("output.", "goodput.workers", "quiet", "cache", "resume", "sweep.")  # settings that no result depends on


@dataclass(frozen=True)
class Differences:
    """A table: `names` of the results, and one row per setting, with the setting first."""

    names: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def mismatches(results: Results) -> list[str]:
    """Warnings on results that come from different code, latency profiles or package versions, or unsaved code."""
    origins = _origins(results)
    found = []
    for key, title in IDENTITY.items():
        by_value: dict[str, list[str]] = {}
        for name, origin in origins:
            if key == "profile_hash" and origin.get(key) is None:
                continue
            by_value.setdefault(_short(origin.get(key, "unknown")), []).append(name)
        if len(by_value) > 1:
            parts = "; ".join(f"{value}: {listed(list(dict.fromkeys(names)), 3)}" for value, names in by_value.items())
            found.append(f"results come from different {title} ({parts})")
    dirty = [name for name, origin in origins if origin.get("git_dirty") is True]
    if dirty:
        found.append(f"the source had uncommitted changes: {listed(list(dict.fromkeys(dirty)), 3)}")
    return found


def _origins(results: Results) -> list[tuple[str, dict[str, Any]]]:
    named = [(search.name, search.content) for search in results.searches]
    named += [(run.name, run.summary) for run in results.simulations]
    return [(name, content.get("provenance") or {}) for name, content in named]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {version}" for key, version in sorted(value.items()))
    return str(value)[:12]


def common_and_different(results: Results) -> tuple[dict[str, str], Differences]:
    """Settings that all results share, and a table of those that differ."""
    named = [(name, flatten(origin.get("config") or {})) for name, origin in _origins(results)]
    if not named:
        return {}, Differences()
    keys = sorted({key for _, settings in named for key in settings})
    common: dict[str, str] = {}
    rows: list[tuple[str, ...]] = []
    for key in keys:
        values = [settings.get(key, "–") for _, settings in named]
        if len(set(values)) == 1:
            common[key] = values[0]
        elif not key.startswith(QUIET_KEYS):
            rows.append((key, *values[:COLUMNS]))
    names = tuple(name for name, _ in named[:COLUMNS])
    return common, Differences(names, tuple(rows))


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Leaves of a tree of dicts by dotted key, as text."""
    if not isinstance(tree, dict):
        return {prefix: tree if isinstance(tree, str) else json.dumps(tree)}
    found: dict[str, str] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found
