"""A worker of a sweep: takes runs from the session's plan until none is left.

Started by a Hydra launcher on this machine or another; it knows nothing of the command line. What it runs are
resolved configurations.
"""

from __future__ import annotations

import _thread
import errno
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.identity import code_version
from analysis.sweep.folder import SweepFolder
from analysis.sweep.jobs import RUN, Shared
from analysis.sweep.session import HEARTBEAT_S, EventLog, Job, Session, Task, process_lives
from confsim.errors import InputError
from confsim.setup.configuration import input_error, one_line

INTERRUPTED = 130
FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(Exception):
    """No room for results; the run is not to blame and is made again."""


def task(cfg: Any) -> dict[str, Any]:
    """What a launcher calls: `cfg` is `conf/sweep_worker.yaml`. Returns runs done and failed, and if the disk is full.

    Raises:
        KeyboardInterrupt: where it runs inside the sweep's own process, which has to end.
    """
    session = Session(Path(str(cfg.session)))
    plan = session.plan()
    if plan is None or session.stopped:
        return {"done": 0, "failed": 0, "full": False}
    job, lines = plan
    worker = Worker(SweepFolder(Path(str(cfg.folder)), Path(job.index) if job.index else None), session, job)
    inside = job.owner == (socket.gethostname(), os.getpid())
    try:
        log = EventLog(session, int(cfg.worker))
    except OSError as error:  # nothing can be said, so nothing is done
        return {"done": 0, "failed": 0, "full": is_full(error)}
    full = False
    try:
        with nothing() if inside else heartbeat(session, job, log):
            worker.work(lines, log)
    except KeyboardInterrupt:
        if inside:
            raise
        if _is_orphan(job):  # nobody takes the answer, and the launcher's pool would wait for more work
            log.close()
            os._exit(INTERRUPTED)
    except DiskFull:
        full = True
        session.stop()
    finally:
        log.close()
    return {"done": worker.done, "failed": worker.failed, "full": full}


@contextmanager
def nothing() -> Iterator[None]:
    """No heartbeat: the worker is the sweep's own process."""
    yield


@contextmanager
def heartbeat(session: Session, job: Job, log: EventLog) -> Iterator[None]:
    """Say that the worker lives, and interrupt it when the session stops or its owner is gone."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_S):
            log.touch()
            if session.stopped or _is_orphan(job):
                if not over.is_set():
                    _thread.interrupt_main()
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _is_orphan(job: Job) -> bool:
    """Whether the process that started the sweep on this machine is gone."""
    host, pid = job.owner or ("", 0)
    return host == socket.gethostname() and not process_lives(pid)


class Worker:
    """Runs what it can take."""

    def __init__(self, folder: SweepFolder, session: Session, job: Job) -> None:
        self.folder = folder
        self.session = session
        self.job = job
        self.done = 0
        self.failed = 0
        self._shared = Shared()

    def work(self, lines: list[bytes], log: EventLog) -> None:
        """Take runs in order.

        Raises:
            DiskFull: if results cannot be written.
        """
        for line in lines:
            if self.session.stopped:
                return
            item = Task(**json.loads(line))
            with full_disk():
                if self.session.claim(item.number):
                    self._run(item, log)

    def _run(self, item: Task, log: EventLog) -> None:
        log.write("start", run=item.number)
        began = time.perf_counter()
        about = {
            "command": self.job.command,
            "text": item.text,
            "identity": item.identity,
            "config": item.config,
        }
        try:
            note = self._result(item, about)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit in a run ends the run, not the sweep
            if is_full(error):
                raise
            if self.session.stopped:
                return
            self.failed += 1
            message = _message(error)
            mistake = input_error(error) is not None
            self.folder.fail(item.id, {**about, "error": message, "mistake": mistake}, _traceback(error))
            log.write("failed", run=item.number, error=message)
            return
        self.done += 1
        log.write("done", run=item.number, wall_s=round(time.perf_counter() - began, 3), note=note)

    def _result(self, item: Task, about: dict[str, Any]) -> dict[str, Any]:
        if item.mistake:
            raise InputError(item.mistake)
        if code_version(self.job.command, item.config) != item.identity["code"]:
            raise RuntimeError("the code changed while the sweep ran, or differs on this machine: start it again")
        with self.folder.draft(item.id) as draft:
            note = RUN[self.job.command](item.config, draft, self._shared)
            self.folder.finish(draft, item.id, about)
        return note


def is_full(error: BaseException | None) -> bool:
    """Whether an exception comes from a full disk or quota."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in FULL):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def full_disk() -> Iterator[None]:
    """Turn a full disk into `DiskFull`."""
    try:
        yield
    except DiskFull:
        raise
    except BaseException as error:
        if is_full(error):
            raise DiskFull(str(error)) from error
        raise


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the run called sys.exit({error.code!r})"
    known = input_error(error)
    return one_line(str(known) if known is not None else f"{type(error).__name__}: {error}")


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
