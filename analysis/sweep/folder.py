"""A sweep's folder: one folder a run, named by the run's identity, and the plan that says which runs belong to it.

    sweep.json        the plan: axes and runs, in order
    runs/ID/          a run that finished (summary.json or goodput.json, run.json) or failed (error.txt, failure.json)
    results.parquet   one row a run
    .work/            what workers need while the sweep runs

A run is written in a hidden folder beside its own and renamed when it is complete, so a run's folder is whole or
absent, whatever kills the process. `run.json` is written last and holds the size and hash of every other file, so
that files which a power failure cut short are not taken for results.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from confsim.outcome.result import write_json
from confsim.setup.provenance import file_digest

PLAN = "sweep.json"
RUN = "run.json"
FAILURE = "failure.json"
TRACEBACK = "error.txt"
TABLE = "results.parquet"


def replace_folder(new: Path, old: Path) -> None:
    """Put `new` in the place of `old`, which may exist."""
    try:
        new.rename(old)
        return
    except OSError:
        if not old.exists():
            raise
    aside = old.with_name(f".{old.name}.old-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):  # another process has put it aside
        old.rename(aside)
    try:
        new.rename(old)
    except OSError:  # another process has put its own there, which is as good
        if not old.exists():
            raise
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


def is_complete(folder: Path, run_id: str) -> bool:
    """Whether a folder holds the whole result of a run."""
    try:
        record = json.loads((folder / RUN).read_text(encoding="utf-8"))
        if record["id"] != run_id:
            return False
        for name, (size, sha256) in record["files"].items():
            path = folder / name
            if path.stat().st_size != size or (name.endswith(".json") and file_digest(path) != sha256):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def failure_of(folder: Path) -> dict[str, Any] | None:
    """The record of a run that failed, or None."""
    try:
        record = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and not (folder / RUN).exists() else None


@dataclass(frozen=True)
class SweepFolder:
    """`index` maps identities of finished runs to folders, for all sweeps of one output directory."""

    path: Path
    index: Path | None = None

    def run(self, run_id: str) -> Path:
        """The folder of a run."""
        return self.path / "runs" / run_id

    def state(self, run_id: str) -> str:
        """`done`, `failed` or `missing`."""
        folder = self.run(run_id)
        if is_complete(folder, run_id):
            return "done"
        return "failed" if failure_of(folder) is not None else "missing"

    # Writing a run

    @contextmanager
    def draft(self, run_id: str) -> Iterator[Path]:
        """A folder to write a run in; it is gone afterwards unless `finish` or `fail` took it."""
        draft = self.run(run_id).with_name(f".{run_id}.{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
        draft.mkdir(parents=True)
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def finish(self, draft: Path, run_id: str, about: Mapping[str, Any]) -> None:
        """Make a draft the run's result; `about` is what `run.json` says beside the files."""
        paths = sorted(path for path in draft.rglob("*") if path.is_file())
        files = {str(path.relative_to(draft)): [path.stat().st_size, file_digest(path)] for path in paths}
        write_json(draft / RUN, {"kind": "run", "id": run_id, **about, "files": files})
        replace_folder(draft, self.run(run_id))
        self._register(run_id)

    def fail(self, run_id: str, about: Mapping[str, Any], traceback: str) -> None:
        """Record that a run failed."""
        with self.draft(run_id) as draft:
            (draft / TRACEBACK).write_text(traceback, encoding="utf-8")
            write_json(draft / FAILURE, {"kind": "failure", "id": run_id, **about})
            if not is_complete(self.run(run_id), run_id):
                replace_folder(draft, self.run(run_id))

    def _register(self, run_id: str) -> None:
        """Tell later sweeps where the run is; they look for themselves whether it is still there."""
        if self.index is None:
            return
        entry = self.index / run_id[:2] / run_id
        partial = entry.with_name(f".{run_id}.{secrets.token_hex(4)}")
        with suppress(OSError):
            entry.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(os.path.relpath(self.run(run_id), self.index), encoding="utf-8")
            partial.replace(entry)

    # Taking over a run of another sweep

    def adopt(self, run_id: str) -> bool:
        """Take a finished run from another sweep, by links where the file system has them; whether there was one."""
        source = self._elsewhere(run_id)
        if source is None:
            return False
        with self.draft(run_id) as draft:
            try:
                shutil.copytree(source, draft, copy_function=_link, dirs_exist_ok=True)
            except (OSError, shutil.Error):
                return False
            if not is_complete(draft, run_id):
                return False
            replace_folder(draft, self.run(run_id))
        self._register(run_id)
        return True

    def _elsewhere(self, run_id: str) -> Path | None:
        if self.index is None:
            return None
        try:
            text = (self.index / run_id[:2] / run_id).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        folder = Path(os.path.normpath(self.index / text))
        return folder if folder != self.run(run_id) and is_complete(folder, run_id) else None

    # The sweep itself

    def clean(self) -> None:
        """Remove what processes that were killed left half-written."""
        for path in (self.path / "runs").glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    def forget(self, run_id: str) -> None:
        """Remove a run."""
        shutil.rmtree(self.run(run_id), ignore_errors=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder.

        Raises:
            InputError: if another sweep does.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{self.path}: another sweep is writing here; wait for it or name a new folder"
                ) from None
            except OSError:
                pass  # no locks on this file system
            yield

    @property
    def work(self) -> Path:
        """What is only needed while the sweep runs."""
        return self.path / ".work"


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan of a sweep's folder, or None where the folder is none."""
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) and plan.get("kind") == "sweep" else None
