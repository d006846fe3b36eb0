"""Runs cells in processes and keeps every result on disk, so that a run may be interrupted and taken up again."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from analysis.experiments.base import Cell
from analysis.experiments.work import compute
from confsim.setup.cache import Store, cached_json, code_digest
from confsim.setup.provenance import digest, file_digest

KIND = "experiments"  # of the entries in the store
CODE = (
    "confsim",
    "traces",
    "analysis.search.cases",
    "analysis.search.goodput",
    "analysis.search.runner",
    "analysis.experiments.work",
)
DATA = ("conf", "confsim.latency")  # packages whose other files matter


@cache
def sources() -> str:
    """SHA-256 of everything that a result depends on besides its cell."""
    return digest([code_digest(*CODE), *(_data_digest(package) for package in DATA)])


def _data_digest(package: str) -> str:
    root = Path(str(resources.files(package)))
    files = sorted(path for path in root.rglob("*") if path.suffix in (".yaml", ".json"))
    return digest([[str(path.relative_to(root)), file_digest(path)] for path in files])


def parts(cell: Cell) -> list[Any]:
    """What names a cell's result: the code, its parameters, the traces that they name."""
    words = [word for word in cell.params.get("trace", ()) if word.startswith("trace.path=")]
    files = [file_digest(Path(word.partition("=")[2].strip("'"))) for word in words]
    return [sources(), cell.kind, cell.params, files]


class Runner:
    """Results of cells, computed by `workers` processes where the store has none."""

    def __init__(self, workers: int, store: Store | None = None, console: Console | None = None) -> None:
        self.workers = workers
        self.store = store or Store()
        self.console = console

    def run(self, cells: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
        """The result of every cell by its key, in the order of the cells.

        Raises:
            KeyboardInterrupt: if interrupted; the results so far are kept.
        """
        found = {key: self._known(cell) for key, cell in cells.items()}
        todo = {key: cell for key, cell in cells.items() if found[key] is None}
        with self._progress(len(cells), len(cells) - len(todo)) as tell:
            for key, result in self._computed(todo):
                found[key] = cached_json(KIND, parts(cells[key]), lambda value=result: value, self.store)
                tell(cells[key].label)
        return {key: result for key, result in found.items() if result is not None}

    def _known(self, cell: Cell) -> dict[str, Any] | None:
        missing: dict[str, Any] = {}

        def none() -> Any:
            raise LookupError

        try:
            missing = cached_json(KIND, parts(cell), none, self.store)
        except LookupError:
            return None
        return missing

    def _computed(self, cells: Mapping[str, Cell]) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.workers == 1 or len(cells) < 2:
            for key, cell in cells.items():
                yield key, compute(cell)
            return
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_leave_interrupts)
        try:
            waiting = {pool.submit(compute, cell): key for key, cell in cells.items()}
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.kill()
            raise
        pool.shutdown()

    def _progress(self, total: int, known: int) -> _Bar | _Lines:
        console = self.console
        if console is None:
            return _Lines(None, total, known)
        return _Bar(console, total, known) if console.is_terminal else _Lines(console, total, known)


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the parent alone acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Lines:
    """A line a cell."""

    def __init__(self, console: Console | None, total: int, known: int) -> None:
        self._console, self._total, self._done = console, total, known

    def __enter__(self) -> _Lines:
        if self._done and self._console is not None:
            self._console.print(Text(f"{self._done} of {self._total} cells are there already"), soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def __call__(self, label: str) -> None:
        self._done += 1
        if self._console is not None:
            self._console.print(Text(f"[{self._done}/{self._total}] {label}"), soft_wrap=True)


class _Bar:
    """A live bar."""

    def __init__(self, console: Console, total: int, known: int) -> None:
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.description}", markup=False), console=console)
        self._task = self._progress.add_task("", total=total, completed=known)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, label: str) -> None:
        self._progress.update(self._task, advance=1, description=label)
