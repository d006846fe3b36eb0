"""How a sweep's parent and its workers talk: through files in the sweep's folder, on one machine or many.

    .work/SESSION/plan.jsonl      what to run, one line a run, after a line about the sweep
    .work/SESSION/claims/N        run N is taken
    .work/SESSION/events/W.jsonl  what worker W did; the file is touched while it lives
    .work/SESSION/stop            workers end, leaving the run they are in

A run is taken by creating a file that must not exist, which is atomic on network file systems too; so nothing is
handed out, and a worker that dies takes one run with it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEARTBEAT_S = 2.0
SILENT_S = 60.0  # a worker on another machine that has not been heard of for so long is dead


@dataclass(frozen=True)
class Task:
    """A run as a worker needs it: its number in the sweep, identity, overrides, configuration, and a known mistake."""

    number: int
    id: str
    text: str
    config: dict[str, Any]
    mistake: str | None = None
    identity: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What workers know of the sweep. They end when the process `owner` ends, unless it is None."""

    command: str
    index: str | None
    owner: tuple[str, int] | None


class Session:
    """One launch of workers on a list of runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, work: Path, job: Job, tasks: Sequence[Task]) -> Session:
        """A session whose plan is on disk."""
        path = work / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        (path / "claims").mkdir(parents=True)
        (path / "events").mkdir()
        lines = [json.dumps(vars(job))] + [json.dumps(vars(task)) for task in tasks]
        (path / "plan.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return cls(path)

    def plan(self) -> tuple[Job, list[bytes]] | None:
        """The sweep and the lines of its runs; None where the session is over and gone."""
        try:
            first, *lines = (self.path / "plan.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return None
        data = json.loads(first)
        owner = data["owner"]
        return Job(data["command"], data["index"], tuple(owner) if owner else None), lines

    def claim(self, number: int) -> bool:
        """Take a run; false if another worker has it."""
        try:
            os.close(os.open(self.path / "claims" / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def claimed(self) -> set[int]:
        """Runs that were taken."""
        with suppress(OSError):
            return {int(path.name) for path in (self.path / "claims").iterdir()}
        return set()

    def stop(self) -> None:
        """Tell the workers to end."""
        with suppress(OSError):
            (self.path / "stop").touch()

    @property
    def stopped(self) -> bool:
        """Whether workers should end."""
        return (self.path / "stop").exists() or not self.path.exists()

    def remove(self) -> None:
        """Delete the session's files."""
        shutil.rmtree(self.path, ignore_errors=True)

    def events(self) -> Iterator[Path]:
        """Event files of the workers so far."""
        with suppress(OSError):
            yield from sorted((self.path / "events").glob("*.jsonl"))

    def living(self) -> int:
        """Workers that have begun and not ended."""
        return sum(_lives(path) for path in self.events())


def _lives(path: Path) -> bool:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        age_s = time.time() - path.stat().st_mtime
        begun = [json.loads(line) for line in lines if '"begin"' in line][-1]
    except (OSError, ValueError, IndexError):
        return False
    if '"event": "end"' in lines[-1]:
        return False
    if begun["host"] == socket.gethostname():
        return begun["pid"] != os.getpid() and process_lives(begun["pid"])
    return age_s < SILENT_S


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


class EventLog:
    """What one worker says; every line is whole or absent to a reader that takes whole lines."""

    def __init__(self, session: Session, worker: int) -> None:
        self._path = session.path / "events" / f"{worker}.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        self.write("begin", host=socket.gethostname(), pid=os.getpid())

    def write(self, event: str, **data: Any) -> None:
        """Append an event."""
        self._file.write(json.dumps({"event": event, **data}) + "\n")
        self._file.flush()

    def touch(self) -> None:
        """Say that the worker lives."""
        with suppress(OSError):
            os.utime(self._path)

    def close(self) -> None:
        """Say that the worker ends."""
        with suppress(OSError):
            self.write("end")
        with suppress(OSError):
            self._file.close()


class EventReader:
    """Follows the events of all workers of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """Events since the last call, by worker; lines that are not whole yet are left for later."""
        found = []
        for path in self._session.events():
            with suppress(OSError):
                with path.open("rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._offsets[path] = self._offsets.get(path, 0) + len(whole)
                found += [json.loads(line) for line in whole.splitlines()]
        return found
