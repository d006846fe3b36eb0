"""How a sweep and its workers talk: through files in the sweep's folder, on one machine or many.

    .work/SESSION/plan.jsonl  what to run, one line per run, after a line about the sweep
    .work/SESSION/claims/N    run N is taken
    .work/SESSION/workers/W   worker W lives: its host and process; touched while that is true, removed when it ends
    .work/SESSION/stop        workers end, leaving the run they are in

A run is taken by creating a file that must not exist, which is atomic on network file systems too; so nothing is
handed out, and a worker that dies takes one run with it. What became of a run is seen in its own folder.
"""

from __future__ import annotations

import _thread
import json
import math
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from analysis.sweep.expand import SweepRun
from traces.files import write_whole

HEARTBEAT_S = 2.0
SILENT_S = 60.0  # a worker that has not been heard of for so long is dead
DRAIN_POLL_S = 0.2
END_WAIT_S = 15.0


class Session:
    """One launch of workers on a list of runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, work: Path, about: Mapping[str, Any], runs: Sequence[SweepRun]) -> Session:
        """A session whose plan is on disk; workers end with the process `about["owner"]` (host, number), if any."""
        path = work / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        for name in ("claims", "workers"):
            (path / name).mkdir(parents=True)
        write_whole(path / "plan.jsonl", "".join(json.dumps(line) + "\n" for line in [about, *map(vars, runs)]))
        return cls(path)

    def plan(self) -> list[bytes]:
        """Lines of JSON: about the sweep, then one for each run (`SweepRun`); none where the session is over."""
        with suppress(FileNotFoundError):
            return [] if self.is_over else (self.path / "plan.jsonl").read_bytes().splitlines()
        return []

    def claim(self, number: int) -> bool:
        """Take a run; false if another worker has it."""
        try:
            (self.path / "claims" / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def claimed(self) -> set[int]:
        """Runs that were taken."""
        with suppress(OSError):
            return {int(path.name) for path in (self.path / "claims").iterdir()}
        return set()

    @contextmanager
    def attended(self, worker: int, owner: Sequence[Any] | None) -> Iterator[None]:
        """Say that a worker lives, and interrupt it when the session is over or its owner is gone."""
        sign = self.path / "workers" / str(worker)
        sign.write_text(json.dumps([socket.gethostname(), os.getpid()]), encoding="utf-8")
        left = threading.Event()

        def beat() -> None:
            while not left.wait(HEARTBEAT_S):
                with suppress(OSError):
                    os.utime(sign)
                if self.is_over or is_orphaned(owner):
                    if not left.is_set():
                        _thread.interrupt_main()
                    return

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            left.set()
            with suppress(OSError):
                sign.unlink()

    def living(self) -> int:
        """Workers that have begun and not ended."""
        with suppress(OSError):
            return sum(_lives(sign) for sign in (self.path / "workers").iterdir())
        return 0

    def wait(self, limit_s: float = math.inf) -> None:
        """Wait until no worker lives."""
        until = time.monotonic() + limit_s
        while self.living() and time.monotonic() < until:
            time.sleep(DRAIN_POLL_S)

    def stop(self) -> None:
        """Tell the workers to end."""
        with suppress(OSError):
            (self.path / "stop").touch()

    @property
    def is_over(self) -> bool:
        """Whether workers should end."""
        return (self.path / "stop").exists() or not self.path.exists()

    def end(self) -> None:
        """Tell the workers to end, wait a while for them, and delete the session's files."""
        self.stop()
        self.wait(END_WAIT_S)
        shutil.rmtree(self.path, ignore_errors=True)


def _lives(sign: Path) -> bool:
    try:
        host, pid = json.loads(sign.read_text(encoding="utf-8"))
        silent_s = time.time() - sign.stat().st_mtime
    except (OSError, ValueError):
        return False
    return silent_s < SILENT_S and (host != socket.gethostname() or process_lives(pid))


def process_lives(pid: int) -> bool:
    """Whether a process of this machine runs (one that ended and was not waited for does not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return True


def is_orphaned(owner: Sequence[Any] | None) -> bool:
    """Whether the process that workers belong to, one of this machine, is gone."""
    return owner is not None and owner[0] == socket.gethostname() and not process_lives(owner[1])
