"""A sweep from plan to table: what is there is kept, the rest runs, what fails is recorded.

Workers may die. The runs that they leave are started again; a run whose worker dies twice, the second time with no
other run beside it, is recorded as failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from analysis.identity import Identifier
from analysis.sweep.expand import Grid, SweepRun
from analysis.sweep.folder import PLAN, TABLE, TRACEBACK, SweepFolder, failure_of
from analysis.sweep.launch import Launcher
from analysis.sweep.progress import Progress
from analysis.sweep.session import Session
from analysis.sweep.table import build_table
from confsim.errors import InputError
from confsim.outcome.result import write_json, write_table
from confsim.setup.configuration import one_line
from traces.files import is_full

INDEX = ".runs"  # in the output directory: where finished runs of all sweeps are


@dataclass(frozen=True)
class FailedRun:
    """A run that failed: its overrides, what it raised in one line, the file with all of it, if a user's mistake."""

    text: str
    error: str
    traceback: Path
    mistake: bool


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended: `planned` runs, of which `present` have a result and `reused` had one before."""

    folder: Path
    planned: int
    present: int
    reused: int
    failures: tuple[FailedRun, ...]
    table: pa.Table
    interrupted: bool = False
    disk_full: bool = False
    best: str = ""

    @property
    def complete(self) -> bool:
        """Whether every planned run has a result."""
        return self.present == self.planned


class Sweep:
    """One sweep of a grid. `run` may be called once."""

    def __init__(self, grid: Grid, console: Console | None = None) -> None:
        """Without a console nothing is said.

        Raises:
            InputError: for a launcher or a number of workers that cannot be.
        """
        workers = grid.option("sweep.workers", None)
        if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
            raise InputError(f"sweep.workers={workers}: use 1 or more, or null for as many as the launcher can run")
        self.grid = grid
        self.folder = SweepFolder(grid.folder, Path(str(grid.option("output.dir", "outputs"))).absolute() / INDEX)
        self.launcher = Launcher(grid.hydra, grid.folder, workers)
        self._console = console
        self._full = False

    def run(self) -> SweepOutcome:
        """Run what is missing.

        Raises:
            InputError: for a folder that cannot be written, or that another sweep writes to.
        """
        runs = self.grid.runs
        with self.folder.alone(), interruptible():
            self._tidy()
            plan = self._plan()
            todo = self._missing()
            self.progress = Progress(self.folder, todo, len(runs), self._console)
            absent = {run.id for run in todo}
            self._announce(len(todo), sum(run.id not in absent for run in runs))
            interrupted = False
            try:
                self._rounds(todo)
            except KeyboardInterrupt:
                interrupted = True
                self._tidy()  # a worker that is interrupted twice leaves the run that it was writing
            finally:
                self.progress.close()
            return self._outcome(plan, len({run.id for run in runs} - absent), interrupted)

    def _tidy(self) -> None:
        """End workers of a sweep of this folder whose parent is gone, and remove what was half-written."""
        for path in self.folder.work.iterdir():
            if path.is_dir():
                Session(path).end()
        self.folder.clean()

    def _plan(self) -> dict[str, Any]:
        """Name the runs and write sweep.json; returns its content."""
        identify = Identifier()
        for number, run in enumerate(self.grid.runs):
            identity = identify(self.grid.command, run.config)
            run.number, run.id, run.identity = number, identity.id, identity.parts
        entries = [
            {"run": run.number, "id": run.id, "axes": run.axes, "choices": run.choices, "text": run.text}
            for run in self.grid.runs
        ]
        shared = {"command": self.grid.command, "overrides": list(self.grid.common), "axes": self.grid.axes}
        plan = {"kind": "sweep", **shared, "planned": len(entries), "runs": entries}
        write_json(self.folder.path / PLAN, plan)
        return plan

    def _missing(self) -> list[SweepRun]:
        """The first run of each identity that has no whole result here or in another sweep."""
        if not self.grid.option("resume", True):
            for run in self.grid.runs:
                self.folder.forget(run.id)
        first = {run.id: run for run in reversed(self.grid.runs)}
        kept = {name for name in first if self.grid.option("resume", True) and self.folder.keep(name)}
        return [run for run in self.grid.runs if first[run.id] is run and run.id not in kept]

    def _announce(self, missing: int, present: int) -> None:
        if self._console is None:
            return
        planned, workers = len(self.grid.runs), self.launcher.count(missing)
        text = f"{planned} run{'s' if planned != 1 else ''} planned"
        text += f", {present} there already" if present else ""
        text += f", {workers} worker{'s' if workers != 1 else ''} ({self.launcher.name})" if missing else ""
        self._console.print(f"{text}: {self.folder.path}", markup=False, highlight=False)

    def _rounds(self, todo: list[SweepRun]) -> None:
        suspects: list[SweepRun] = []  # runs that were lost with a worker
        while todo and not self._full:
            batch = [run for run in todo if run not in suspects] or todo[:1]
            error, claimed = self._round(batch)
            if not claimed and not self._full:
                cause = one_line(str(error)) if error is not None else "none took a run"
                raise InputError(f"hydra/launcher={self.launcher.name}: no worker started: {cause}") from error
            lost = [run for run in batch if run.number in claimed and self.folder.state(run.id) == "missing"]
            if len(batch) == 1 and lost and not self._full:
                self._give_up(lost[0], error)
            suspects += lost
            todo = [run for run in todo if self.folder.state(run.id) == "missing"]

    def _round(self, batch: Sequence[SweepRun]) -> tuple[Exception | None, set[int]]:
        """Launch workers on some runs; returns what the launcher raised, and the runs that were taken."""
        owner = None if self.launcher.detached else (socket.gethostname(), os.getpid())
        about = {"command": self.grid.command, "index": str(self.folder.index), "owner": owner}
        session = Session.create(self.folder.work, about, batch)
        error: Exception | None = None
        try:
            with self.progress.following(session):
                try:
                    self._full = any(self.launcher.launch(session.path, len(batch)))
                except InputError:
                    raise
                except Exception as failure:
                    error, self._full = failure, is_full(failure)
                    session.wait()  # for those that live: the launcher gave up on all when one died
            return error, session.claimed()
        finally:
            session.end()

    def _give_up(self, run: SweepRun, error: Exception | None) -> None:
        cause = f" ({type(error).__name__})" if error is not None else ""
        message = f"its worker died twice{cause}: killed, out of memory, or ended by os._exit"
        about = {"command": self.grid.command, "text": run.text, "identity": run.identity, "config": run.config}
        self.folder.fail(run.id, {**about, "error": message, "mistake": False}, f"{message}\n{error}\n")
        self.progress.look({run.number})

    def _outcome(self, plan: dict[str, Any], reused: int, interrupted: bool) -> SweepOutcome:
        table = build_table(self.folder, plan)
        try:
            write_table(self.folder.path / TABLE, table)
        except OSError as error:
            if not is_full(error):
                raise
            self._full = True
        if not interrupted and not self._full:
            shutil.rmtree(self.folder.work, ignore_errors=True)
        failures = []
        for run in self.grid.runs:
            path = self.folder.run(run.id)
            if (record := failure_of(path)) is not None:
                failures.append(FailedRun(run.text, str(record["error"]), path / TRACEBACK, bool(record["mistake"])))
        present = sum(self.folder.state(run.id) == "done" for run in self.grid.runs)
        counts = len(self.grid.runs), present, reused
        return SweepOutcome(
            self.folder.path, *counts, tuple(failures), table, interrupted, self._full, self.progress.best
        )


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends a sweep as Ctrl-C does, where signals can be caught."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
