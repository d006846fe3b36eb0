"""Reading result folders: what a report needs of them, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from confsim.errors import InputError

SERIES_COLUMNS = ("start_s", "end_s", "prefill_tokens", "decode_tokens", "kv_used_blocks", "queued")
BINS = 300  # points of a line over time
DRAWN_RUNS = 24  # runs whose curves are drawn; tables list all

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Iterations over simulated time: means in `len(time_s)` bins of equal width that hold any, and peaks."""

    time_s: Floats
    prefill_tokens: Floats
    decode_tokens: Floats
    kv_used_blocks: Floats
    kv_peak_blocks: Floats
    queued: Floats
    iterations: int


@dataclass(frozen=True)
class LoadedRun:
    """One simulation. `series` is read only for runs that are drawn."""

    name: str
    folder: Path
    summary: dict[str, Any]
    series: Series | None = None


@dataclass(frozen=True)
class LoadedSearch:
    """A goodput search, named by its load; `runs` are the full runs at each scheme's goodput, by scheme."""

    name: str
    folder: Path
    content: dict[str, Any]
    runs: dict[str, LoadedRun] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """All results of a report; `skipped` says what was found and is not shown."""

    searches: tuple[LoadedSearch, ...]
    simulations: tuple[LoadedRun, ...]
    skipped: tuple[str, ...] = ()

    @property
    def runs(self) -> list[LoadedRun]:
        """Every simulation, those of searches included."""
        return [run for search in self.searches for run in search.runs.values()] + list(self.simulations)

    @property
    def drawn(self) -> list[LoadedRun]:
        """Those whose iterations were read."""
        return [run for run in self.runs if run.series is not None]


def load_results(folders: Sequence[Path]) -> Results:
    """Read the results in `folders`, or in folders inside them, each once.

    Raises:
        InputError: if a folder does not exist or holds no result, or a file of it cannot be read.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        entries = list(_find(folder))
        if not entries:
            raise InputError(f"{folder}: no result in it (no goodput.json, no summary.json)")
        found |= {path.resolve(): path for path in entries}
    return _load(list(found.values()))


def _find(folder: Path) -> Iterator[Path]:
    """The JSON files of results at or below a folder; what lies inside a search belongs to it."""
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder; give the output folder of a run")
    for name in ("goodput.json", "summary.json"):
        if (folder / name).is_file():
            yield folder / name
            return
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and not inner.name.startswith("."):
            yield from _find(inner)


def _load(paths: Sequence[Path]) -> Results:
    searches: list[LoadedSearch] = []
    simulations: list[LoadedRun] = []
    skipped: list[str] = []
    budget = DRAWN_RUNS
    several = sum(path.name == "goodput.json" for path in paths) > 1
    for path in paths:
        content = read_json(path)
        if path.name == "goodput.json":
            prefix = f"{len(searches) + 1}: " if several else ""
            search = _search(path, content, budget, prefix)
            budget -= len(search.runs)
            searches.append(search)
        elif "attainment" not in content:
            skipped.append(f"{path.parent}: results of kind {content.get('kind')} are not drawn")
        else:
            simulations.append(_run(path.parent, content, budget > 0))
            budget -= 1
    if skipped and not searches and not simulations:
        raise InputError(f"{skipped[0]} by this command; see report.html in that folder")
    return Results(tuple(searches), tuple(simulations), tuple(skipped))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        InputError: if it cannot be read as one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); run it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object; run it again")
    return content


def _search(path: Path, content: dict[str, Any], budget: int, prefix: str) -> LoadedSearch:
    """A search; where there are several, names begin with its number."""
    if not isinstance(content.get("schemes"), dict):
        raise InputError(f"{path}: has no schemes; it is not a goodput result")
    runs: dict[str, LoadedRun] = {}
    for name, scheme in content["schemes"].items():
        folder = path.parent / (scheme.get("folder") or name)
        if (folder / "summary.json").is_file():
            summary = read_json(folder / "summary.json")
            runs[name] = _run(folder, summary, len(runs) < budget, prefix + name)
    label = str(content.get("label") or path.parent.name)
    return LoadedSearch(prefix + label, path.parent, content, runs)


def _run(folder: Path, summary: dict[str, Any], drawn: bool, scheme: str | None = None) -> LoadedRun:
    name = f"{scheme or summary.get('scheme', folder.name)}, {summary.get('policy', '?')}"
    rate = summary.get("offered_rate")
    if rate is not None:
        name += f", {rate:.3g} req/s"
    file = folder / "iterations.parquet"
    return LoadedRun(name, folder, summary, read_series(file) if drawn and file.is_file() else None)


def read_series(path: Path, bins: int = BINS) -> Series | None:
    """Iterations of a Parquet file over time, in at most `bins` points; None where there are none.

    Raises:
        InputError: if the file is no such table.
    """
    try:
        file = pq.ParquetFile(path)
        span = _span(file)
        if span is None:
            return None
        sums, peaks = np.zeros((6, bins)), np.zeros(bins)
        for batch in file.iter_batches(columns=list(SERIES_COLUMNS)):
            columns = {name: batch[name].to_numpy(zero_copy_only=False) for name in SERIES_COLUMNS}
            _accumulate(columns, span, sums, peaks)
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a table of iterations ({error}); run it again") from error
    return _series(sums, peaks, file.metadata.num_rows)


def _span(file: pq.ParquetFile) -> tuple[float, float] | None:
    low, high = np.inf, -np.inf
    for batch in file.iter_batches(columns=["start_s", "end_s"]):
        if batch.num_rows:
            low = min(low, float(np.min(batch["start_s"].to_numpy())))
            high = max(high, float(np.max(batch["end_s"].to_numpy())))
    return (low, high) if high > -np.inf else None


def _accumulate(columns: dict[str, Any], span: tuple[float, float], sums: Floats, peaks: Floats) -> None:
    """Add a batch of iterations to the bins of their ends; rows of `sums`: count, end, then the values."""
    bins = sums.shape[1]
    width = max(span[1] - span[0], 1e-12) / bins
    index = np.minimum(((columns["end_s"] - span[0]) / width).astype(np.int64), bins - 1)
    values = [np.ones(len(index)), *(columns[name] for name in SERIES_COLUMNS[1:])]
    for row, value in enumerate(values):
        sums[row] += np.bincount(index, weights=value, minlength=bins)
    np.maximum.at(peaks, index, columns["kv_used_blocks"])


def _series(sums: Floats, peaks: Floats, iterations: int) -> Series:
    kept = sums[0] > 0
    means = sums[1:, kept] / sums[0, kept]
    return Series(means[0], means[1], means[2], means[3], peaks[kept], means[4], iterations)
