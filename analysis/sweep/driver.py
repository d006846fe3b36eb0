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
from analysis.sweep.expand import Grid
from analysis.sweep.folder import PLAN, TABLE, TRACEBACK, SweepFolder, failure_of
from analysis.sweep.launch import Launcher
from analysis.sweep.progress import Progress
from analysis.sweep.session import Orders, PlannedRun, Session
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
            InputError: for a number of workers that cannot be.
        """
        workers = grid.option("sweep.workers", None)
        if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
            raise InputError(f"sweep.workers={workers}: use 1 or more, or null for as many as the launcher can run")
        index = Path(str(grid.option("output.dir", "outputs"))).absolute() / INDEX
        self.grid = grid
        self.folder = SweepFolder(grid.folder, index)
        self.launcher = Launcher(grid.hydra, workers)
        self._console = console
        self._full = False

    def run(self) -> SweepOutcome:
        """Run what is missing.

        Raises:
            InputError: for a launcher that does not exist, or a folder that cannot be written or another sweep uses.
        """
        self.capacity = self.launcher.check(self.folder.path)
        with self.folder.alone(), interruptible():
            self._tidy()
            plan, runs = self._plan()
            resume = bool(self.grid.option("resume", True))
            todo = [run for run in {run.id: run for run in runs[::-1]}.values() if not self._kept(run, resume)][::-1]
            reused = len({run.id for run in runs}) - len(todo)
            absent = {run.id for run in todo}
            self.progress = Progress(self.folder, todo, len(runs), self._console)
            self._announce(len(runs), len(todo), sum(run.id not in absent for run in runs))
            interrupted = False
            try:
                self._rounds(todo)
            except KeyboardInterrupt:
                interrupted = True
                self._tidy()  # a worker that is interrupted twice leaves the run that it was writing
            finally:
                self.progress.close()
            return self._outcome(plan, runs, reused, interrupted)

    def _tidy(self) -> None:
        """End workers of a sweep of this folder whose parent is gone, and remove what was half-written."""
        for path in self.folder.work.iterdir():
            if path.is_dir():
                Session(path).end()
        self.folder.clean()

    def _plan(self) -> tuple[dict[str, Any], list[PlannedRun]]:
        """The content of sweep.json, and the runs."""
        identify = Identifier()
        runs = []
        for number, point in enumerate(self.grid.points):
            identity = identify(self.grid.command, point.config)
            runs.append(PlannedRun(number, identity.id, point.text, point.config, identity.parts, point.mistake))
        entries = [
            {"run": run.number, "id": run.id, "axes": point.axes, "choices": point.choices, "text": point.text}
            for run, point in zip(runs, self.grid.points, strict=True)
        ]
        shared = {"command": self.grid.command, "overrides": list(self.grid.common), "axes": self.grid.axes}
        plan = {"kind": "sweep", **shared, "planned": len(runs), "runs": entries}
        write_json(self.folder.path / PLAN, plan)
        return plan, runs

    def _kept(self, run: PlannedRun, resume: bool) -> bool:
        if not resume:
            self.folder.forget(run.id)
        return resume and self.folder.keep(run.id)

    def _announce(self, planned: int, missing: int, present: int) -> None:
        if self._console is None:
            return
        text = f"{planned} run{'s' if planned != 1 else ''} planned"
        if present:
            text += f", {present} there already"
        if missing:
            workers = self.launcher.count(missing, self.capacity)
            text += f", {workers} worker{'s' if workers != 1 else ''} ({self.capacity.name})"
        self._console.print(f"{text}: {self.folder.path}", markup=False, highlight=False)

    def _rounds(self, todo: Sequence[PlannedRun]) -> None:
        suspects: set[str] = set()  # runs that were lost with a worker
        while todo and not self._full:
            batch = [run for run in todo if run.id not in suspects] or todo[:1]
            error, claimed = self._round(batch)
            if not claimed and not self._full:
                cause = one_line(str(error)) if error is not None else "none took a run"
                raise InputError(f"hydra/launcher={self.capacity.name}: no worker started: {cause}") from error
            todo = [run for run in todo if self.folder.state(run.id) == "missing"]
            lost = [run for run in batch if run in todo and run.number in claimed]
            if len(batch) == 1 and lost and not self._full:
                self._give_up(lost[0], error)
                todo = [run for run in todo if run is not lost[0]]
            suspects |= {run.id for run in lost}

    def _round(self, batch: Sequence[PlannedRun]) -> tuple[Exception | None, set[int]]:
        """Launch workers on some runs; returns what the launcher raised, and the runs that were taken."""
        owner = None if self.capacity.detached else (socket.gethostname(), os.getpid())
        session = Session.create(self.folder.work, Orders(self.grid.command, str(self.folder.index), owner), batch)
        error: Exception | None = None
        try:
            with self.progress.following(session):
                try:
                    workers = self.launcher.count(len(batch), self.capacity)
                    self._full = any(self.launcher.launch(self.folder.path, session.path, workers))
                except InputError:
                    raise
                except Exception as failure:
                    error, self._full = failure, is_full(failure)
                    session.wait()  # for those that live: the launcher gave up on all when one died
            return error, session.claimed()
        finally:
            session.end()

    def _give_up(self, run: PlannedRun, error: Exception | None) -> None:
        cause = f" ({type(error).__name__})" if error is not None else ""
        message = f"its worker died twice{cause}: killed, out of memory, or ended by os._exit"
        about = {"command": self.grid.command, "text": run.text, "identity": run.identity, "config": run.config}
        self.folder.fail(run.id, {**about, "error": message, "mistake": False}, f"{message}\n{error}\n")
        self.progress.look({run.number})

    def _outcome(
        self, plan: dict[str, Any], runs: Sequence[PlannedRun], reused: int, interrupted: bool
    ) -> SweepOutcome:
        failures = []
        for run in runs:
            folder = self.folder.run(run.id)
            record = failure_of(folder)
            if record is not None:
                mistake = bool(record.get("mistake"))
                failures.append(FailedRun(run.text, str(record.get("error")), folder / TRACEBACK, mistake))
        present = sum(self.folder.state(run.id) == "done" for run in runs)
        table = build_table(self.folder, plan)
        try:
            write_table(self.folder.path / TABLE, table)
        except OSError as error:
            if not is_full(error):
                raise
            self._full = True
        if not interrupted and not self._full:
            shutil.rmtree(self.folder.work, ignore_errors=True)
        found = tuple(failures)
        best = self.progress.best
        return SweepOutcome(self.folder.path, len(runs), present, reused, found, table, interrupted, self._full, best)


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
