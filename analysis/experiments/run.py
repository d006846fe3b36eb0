"""Runs cells in processes and keeps every result on disk, so that a run may be interrupted and taken up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from analysis.experiments.base import ExperimentCell
from analysis.experiments.work import compute
from analysis.search.pool import Pool
from confsim.setup.cache import Store, cached_json, code_digest
from confsim.setup.provenance import digest, file_digest

KIND = "experiments"  # of the entries in the store
CODE = ("confsim", "traces", "analysis.search", "analysis.experiments.work")
DATA = ("conf", "confsim.latency")  # packages whose other files matter


@cache
def sources() -> str:
    """SHA-256 of everything that a result depends on besides its cell."""
    return digest([code_digest(*CODE), *(_data_digest(package) for package in DATA)])


def _data_digest(package: str) -> str:
    root = Path(str(resources.files(package)))
    files = sorted(path for path in root.rglob("*") if path.suffix in (".yaml", ".json"))
    return digest([[str(path.relative_to(root)), file_digest(path)] for path in files])


def parts(cell: ExperimentCell) -> list[Any]:
    """What names a cell's result: the code, its parameters, the traces that they name."""
    words = [word for word in cell.params.get("trace", ()) if word.startswith("trace.path=")]
    files = [file_digest(Path(word.partition("=")[2].strip("'"))) for word in words]
    return [sources(), cell.kind, cell.params, files]


def run(
    cells: Mapping[str, ExperimentCell], workers: int, store: Store | None = None, console: Console | None = None
) -> dict[str, dict[str, Any]]:
    """The result of every cell by its key, in the order of the cells, computed where the store has none.

    Raises:
        KeyboardInterrupt: if interrupted; the results so far are kept.
    """
    found = {key: _known(cell, store) for key, cell in cells.items()}
    todo = {key: (cell,) for key, cell in cells.items() if found[key] is None}
    longest_first = dict(sorted(todo.items(), key=lambda item: -item[1][0].size))
    with _progress(console, len(cells), len(cells) - len(todo)) as tell, Pool(compute, workers) as pool:
        for key, result in pool.completed(longest_first):
            found[key] = _kept(cells[key], result, store)
            tell(cells[key].label)
    return {key: result for key, result in found.items() if result is not None}


def _kept(cell: ExperimentCell, result: dict[str, Any], store: Store | None) -> dict[str, Any]:
    kept: dict[str, Any] = cached_json(KIND, parts(cell), lambda: result, store)
    return kept


def _known(cell: ExperimentCell, store: Store | None) -> dict[str, Any] | None:
    def none() -> Any:
        raise LookupError

    try:
        known: dict[str, Any] = cached_json(KIND, parts(cell), none, store)
    except LookupError:
        return None
    return known


@contextmanager
def _progress(console: Console | None, total: int, known: int) -> Iterator[Callable[[str], None]]:
    """Takes the label of each cell that is done: moves a live bar on a terminal, prints a line anywhere else."""
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    label = TextColumn("{task.description}", markup=False)
    live = console is not None and console.is_terminal
    bar = Progress(*columns, label, console=console, disable=not live)
    task = bar.add_task("", total=total, completed=known)

    def say(line: str) -> None:
        if console is not None and not live:
            console.print(Text(line), soft_wrap=True)

    def tell(label: str) -> None:
        bar.update(task, advance=1, description=label)
        say(f"[{bar.tasks[0].completed:.0f}/{total}] {label}")

    if known:
        say(f"{known} of {total} cells are there already")
    with bar:
        yield tell
