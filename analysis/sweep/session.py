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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HEARTBEAT_S = 2.0
SILENT_S = 60.0  # a worker that has not been heard of for so long is dead
DRAIN_POLL_S = 0.2
END_WAIT_S = 15.0


@dataclass(frozen=True)
class PlannedRun:
    """A run as a worker needs it: its number in the sweep, identity and what that is made of, overrides and values.

    `mistake` is the user's, if one is known.
    """

    number: int
    id: str
    text: str
    config: dict[str, Any]
    identity: dict[str, Any]
    mistake: str | None = None


@dataclass(frozen=True)
class Orders:
    """What workers know of the sweep. They end when the process `owner` (host, number) does, unless it is None."""

    command: str
    index: str | None = None
    owner: tuple[str, int] | None = None

    @property
    def is_orphaned(self) -> bool:
        """Whether the owner, on this machine, is gone."""
        return self.owner is not None and self.owner[0] == socket.gethostname() and not process_lives(self.owner[1])


class Session:
    """One launch of workers on a list of runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, work: Path, orders: Orders, runs: Sequence[PlannedRun]) -> Session:
        """A session whose plan is on disk."""
        path = work / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        for name in ("claims", "workers"):
            (path / name).mkdir(parents=True)
        lines = [json.dumps(asdict(orders)), *(json.dumps(vars(run)) for run in runs)]
        (path / "plan.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return cls(path)

    def plan(self) -> tuple[Orders, list[bytes]] | None:
        """The orders and one line of JSON per run (`PlannedRun`); None where the session is over."""
        if self.is_over:
            return None
        try:
            first, *lines = (self.path / "plan.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return None
        orders = json.loads(first)
        return Orders(orders["command"], orders["index"], tuple(orders["owner"]) if orders["owner"] else None), lines

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
    def attended(self, worker: int, orders: Orders) -> Iterator[None]:
        """Say that a worker lives, and interrupt it when the session is over or its owner is gone."""
        sign = self.path / "workers" / str(worker)
        sign.write_text(json.dumps([socket.gethostname(), os.getpid()]), encoding="utf-8")
        left = threading.Event()

        def beat() -> None:
            while not left.wait(HEARTBEAT_S):
                with suppress(OSError):
                    os.utime(sign)
                if self.is_over or orders.is_orphaned:
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
