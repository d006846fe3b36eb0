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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from analysis.identity import Identifier
from analysis.sweep.expand import Grid
from analysis.sweep.folder import PLAN, TABLE, SweepFolder, failure_of
from analysis.sweep.launch import Capacity, Launcher
from analysis.sweep.progress import Display, Tally, display, watching
from analysis.sweep.session import Job, Session, Task
from analysis.sweep.table import build_table
from analysis.sweep.worker import is_full
from confsim.errors import InputError
from confsim.outcome.result import write_json, write_table
from confsim.setup.configuration import one_line

INDEX = ".runs"  # in the output directory: where finished runs of all sweeps are
DRAIN_POLL_S = 0.2
STOP_WAIT_S = 15.0


@dataclass(frozen=True)
class Failure:
    """A run that failed: its overrides, what it raised in one line, the file with all of it, if a user's mistake."""

    text: str
    error: str
    traceback: Path
    mistake: bool


@dataclass(frozen=True)
class Outcome:
    """How a sweep ended: `planned` runs, of which `present` have a result and `reused` had one before."""

    folder: Path
    planned: int
    present: int
    reused: int
    failures: tuple[Failure, ...]
    table: pa.Table
    interrupted: bool = False
    disk_full: bool = False
    best: str = ""

    @property
    def complete(self) -> bool:
        """Whether every planned run has a result."""
        return self.present == self.planned


@dataclass
class Sweep:
    """One sweep. `run` may be called once."""

    grid: Grid
    quiet: bool = False
    console: Console = field(default_factory=lambda: Console(soft_wrap=True))

    def __post_init__(self) -> None:
        output = self.grid.option("output.dir", "outputs")
        self.folder = SweepFolder(self.grid.folder, Path(str(output)).absolute() / INDEX)
        self.launcher = Launcher(self.grid.hydra, self._workers())
        self._interrupted = False
        self._full = False

    def _workers(self) -> int | None:
        workers = self.grid.option("sweep.workers", None)
        if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
            raise InputError(f"sweep.workers={workers}: use 1 or more, or null for as many as the launcher can run")
        return workers

    def run(self) -> Outcome:
        """Run what is missing.

        Raises:
            InputError: for a launcher that does not exist, or a folder that another sweep writes to.
        """
        capacity = self.launcher.check(self.folder.path)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        with self.folder.alone(), interruptible():
            _end_others(self.folder.work)
            self.folder.clean()
            tasks = self._plan()
            reused = self._resume(tasks)
            todo = self._missing(tasks)
            tally = Tally(len(tasks), len(tasks) - len(todo), {task.number: task.text for task in tasks})
            self._announce(tally, len(todo), capacity)
            shown = display(self.console, self.quiet)
            try:
                self._rounds(todo, capacity, tally, shown)
            except KeyboardInterrupt:
                self._interrupted = True
                _end_others(self.folder.work)
                self.folder.clean()  # a worker that is interrupted twice leaves the run that it was writing
            finally:
                shown.close()
            return self._outcome(tasks, reused, tally)

    # Plan

    def _plan(self) -> list[Task]:
        identify = Identifier()
        tasks = []
        for number, point in enumerate(self.grid.points):
            identity = identify(self.grid.command, point.config)
            tasks.append(Task(number, identity.id, point.text, point.config, point.mistake, identity.parts))
        runs = [
            {"run": task.number, "id": task.id, "axes": point.axes, "choices": point.choices, "text": point.text}
            for task, point in zip(tasks, self.grid.points, strict=True)
        ]
        plan = {
            "kind": "sweep",
            "command": self.grid.command,
            "overrides": list(self.grid.common),
            "axes": self.grid.axes,
            "planned": len(tasks),
            "runs": runs,
        }
        write_json(self.folder.path / PLAN, plan)
        self._content = plan
        return tasks

    def _resume(self, tasks: Sequence[Task]) -> int:
        """Keep or take over finished runs; returns how many there are."""
        reused = 0
        for task in {task.id: task for task in tasks}.values():
            state = self.folder.state(task.id)
            if not self.grid.option("resume", True):
                self.folder.forget(task.id)
            elif state == "done" or self.folder.adopt(task.id):
                reused += 1
        return reused

    def _missing(self, tasks: Sequence[Task]) -> list[Task]:
        """One task for each run that has no result."""
        return [task for task in {task.id: task for task in reversed(tasks)}.values() if not self._is_done(task)][::-1]

    def _is_done(self, task: Task) -> bool:
        return self.folder.state(task.id) == "done"

    def _announce(self, tally: Tally, missing: int, capacity: Capacity) -> None:
        if self.quiet:
            return
        runs = f"{tally.planned} run{'s' if tally.planned != 1 else ''} planned"
        there = f", {tally.present} there already" if tally.present else ""
        workers = self.launcher.count(missing, capacity) if missing else 0
        how = f", {workers} worker{'s' if workers != 1 else ''} ({capacity.name})" if missing else ""
        self.console.print(f"{runs}{there}{how}: {self.folder.path}", markup=False, highlight=False)

    # Rounds

    def _rounds(self, todo: list[Task], capacity: Capacity, tally: Tally, shown: Display) -> None:
        suspects: set[str] = set()  # runs that were lost with a worker
        while todo and not self._full:
            batch = [task for task in todo if task.id not in suspects] or todo[:1]
            error, claimed = self._round(batch, capacity, tally, shown)
            lost = [task for task in batch if task.number in claimed and self.folder.state(task.id) == "missing"]
            if self._full:
                return
            if not claimed:
                cause = one_line(str(error)) if error is not None else "none took a run"
                raise InputError(f"hydra/launcher={capacity.name}: no worker started: {cause}") from error
            for task in lost:
                if len(batch) == 1:
                    self._give_up(task, error, tally, shown)
                suspects.add(task.id)
            todo = [task for task in todo if self.folder.state(task.id) == "missing"]

    def _round(
        self, batch: Sequence[Task], capacity: Capacity, tally: Tally, shown: Display
    ) -> tuple[Exception | None, set[int]]:
        """Launch workers on some runs; returns what the launcher raised, and the runs that were taken."""
        index = str(self.folder.index) if self.folder.index is not None else None
        owner = None if capacity.detached else (socket.gethostname(), os.getpid())
        for task in batch:  # failures of earlier sweeps are tried again
            if self.folder.state(task.id) == "failed":
                self.folder.forget(task.id)
        session = Session.create(self.folder.work, Job(self.grid.command, index, owner), batch)
        error: Exception | None = None
        try:
            with watching(session, tally, shown.show):
                try:
                    said = self.launcher.launch(
                        self.folder.path, session.path, self.launcher.count(len(batch), capacity)
                    )
                    self._full = any(worker["full"] for worker in said)
                except InputError:
                    raise
                except Exception as failure:
                    error = failure
                    self._full = is_full(failure)
                    _drain(session)
            return error, session.claimed()
        finally:
            session.stop()
            _wait(session)
            session.remove()

    def _give_up(self, task: Task, error: Exception | None, tally: Tally, shown: Display) -> None:
        cause = f" ({type(error).__name__})" if error is not None else ""
        message = f"its worker died twice{cause}: killed, out of memory, or ended by os._exit"
        about = {"command": self.grid.command, "text": task.text, "identity": task.identity, "config": task.config}
        self.folder.fail(task.id, {**about, "error": message, "mistake": False}, f"{message}\n{error}\n")
        event = {"event": "failed", "run": task.number, "error": message}
        tally.take(event)
        shown.show(tally, [event])

    # End

    def _outcome(self, tasks: Sequence[Task], reused: int, tally: Tally) -> Outcome:
        states = {task.id: self.folder.state(task.id) for task in tasks}
        failures = tuple(self._failure(task) for task in tasks if states[task.id] == "failed")
        present = sum(states[task.id] == "done" for task in tasks)
        table = build_table(self.folder, self._content)
        try:
            write_table(self.folder.path / TABLE, table)
        except OSError as error:
            if not is_full(error):
                raise
            self._full = True
        if not self._interrupted and not self._full:
            shutil.rmtree(self.folder.work, ignore_errors=True)
        return Outcome(
            self.folder.path,
            len(tasks),
            present,
            reused,
            failures,
            table,
            self._interrupted,
            self._full,
            tally.best_text,
        )

    def _failure(self, task: Task) -> Failure:
        folder = self.folder.run(task.id)
        record = failure_of(folder) or {}
        return Failure(task.text, str(record.get("error")), folder / "error.txt", bool(record.get("mistake")))


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


def _drain(session: Session) -> None:
    """Wait for the workers that live: the launcher gave up on all when one died."""
    while session.living():
        time.sleep(DRAIN_POLL_S)


def _wait(session: Session) -> None:
    """Wait a while for workers to end after they were told to."""
    until = time.monotonic() + STOP_WAIT_S
    while session.living() and time.monotonic() < until:
        time.sleep(DRAIN_POLL_S)


def _end_others(work: Path) -> None:
    """End workers of an earlier sweep in this folder whose parent is gone."""
    sessions = [Session(path) for path in work.iterdir() if path.is_dir()]
    for session in sessions:
        session.stop()
    for session in sessions:
        _wait(session)
        session.remove()
