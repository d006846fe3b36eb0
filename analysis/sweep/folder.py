"""A sweep's folder: one folder per run, named by the run's identity, and the plan that says which runs belong to it.

    sweep.json        the plan: axes and runs, in order
    runs/ID/          a run that finished (summary.json or goodput.json, run.json) or failed (error.txt, failure.json)
    results.parquet   one row per run
    .work/            what workers need while the sweep runs

A run is written in a hidden folder beside its own and renamed when it is complete, so a run's folder is whole or
absent, whatever kills the process. `run.json` is written last and holds the size and hash of every other file, so
that files which a power failure cut short, or which were changed later, are not taken for results.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from confsim.outcome.result import write_json
from confsim.setup.provenance import file_digest
from traces.files import locked, write_whole

PLAN = "sweep.json"
RUN = "run.json"
FAILURE = "failure.json"
TRACEBACK = "error.txt"
TABLE = "results.parquet"


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan of a sweep's folder, or None where the folder is none."""
    plan = read_record(folder / PLAN)
    return plan if plan.get("kind") == "sweep" else None


def is_complete(folder: Path, run_id: str, suffix: str = "") -> bool:
    """Whether a folder holds the whole result of a run; with a `suffix` only files whose names end so are compared."""
    record = read_record(folder / RUN)
    files = record.get("files")
    if record.get("id") != run_id or not isinstance(files, dict):
        return False
    return all(_is_whole(folder / name, seal) for name, seal in files.items() if name.endswith(suffix))


def _is_whole(path: Path, seal: Any) -> bool:
    try:
        return path.is_file() and seal == _seal(path)
    except (OSError, ValueError):
        return False


def _seal(path: Path) -> list[Any]:
    return [path.stat().st_size, file_digest(path)]


def failure_of(folder: Path) -> dict[str, Any] | None:
    """The record of a run that failed, or None."""
    return None if (folder / RUN).exists() else read_record(folder / FAILURE) or None


@dataclass(frozen=True)
class SweepFolder:
    """`index` maps identities of finished runs to folders, for all sweeps of one output directory."""

    path: Path
    index: Path | None = None

    @property
    def work(self) -> Path:
        """What is only needed while the sweep runs."""
        return self.path / ".work"

    def run(self, run_id: str) -> Path:
        """The folder of a run."""
        return self.path / "runs" / run_id

    def state(self, run_id: str) -> str:
        """`done`, `failed` or `missing`, by the records that are there; `is_complete` looks at the files."""
        folder = self.run(run_id)
        if (folder / RUN).exists():
            return "done"
        return "failed" if (folder / FAILURE).exists() else "missing"

    # Writing a run

    @contextmanager
    def draft(self, run_id: str) -> Iterator[Path]:
        """A folder to write a run in; it is gone afterwards unless `finish` took it."""
        draft = self.run(run_id).with_name(f".{run_id}.{secrets.token_hex(8)}")
        draft.mkdir(parents=True)
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def finish(self, draft: Path, run_id: str, about: Mapping[str, Any]) -> None:
        """Make a draft the run's result; `about` is what `run.json` says beside the files."""
        paths = sorted(path for path in draft.rglob("*") if path.is_file())
        files = {str(path.relative_to(draft)): _seal(path) for path in paths}
        write_json(draft / RUN, {"kind": "run", "id": run_id, **about, "files": files})
        self._place(draft, run_id)

    def fail(self, run_id: str, about: Mapping[str, Any], traceback: str) -> None:
        """Record that a run failed, unless it has a result."""
        with self.draft(run_id) as draft:
            write_whole(draft / TRACEBACK, traceback)
            write_json(draft / FAILURE, {"kind": "failure", "id": run_id, **about})
            self._place(draft, run_id)

    def _place(self, draft: Path, run_id: str) -> None:
        """Rename a draft, in place of a failure; what another process has put there meanwhile is as good."""
        target = self.run(run_id)
        if self.state(run_id) == "failed":
            self.forget(run_id)
        try:
            draft.rename(target)
        except OSError:
            if not target.exists():
                raise
        if self.index is not None and self.state(run_id) == "done":  # later sweeps look whether it is still there
            with suppress(OSError):
                write_whole(self.index / run_id[:2] / run_id, os.path.relpath(target, self.index))

    # Resuming

    def keep(self, run_id: str) -> bool:
        """Keep a whole run, or take it over from another sweep; whether there was one. What is damaged is removed."""
        if is_complete(self.run(run_id), run_id):
            return True
        self.forget(run_id)
        return self._adopt(run_id)

    def _adopt(self, run_id: str) -> bool:
        """Take a run from another sweep, by links where the file system has them."""
        if self.index is None:
            return False
        try:
            place = (self.index / run_id[:2] / run_id).read_text(encoding="utf-8")
            with self.draft(run_id) as draft:
                source = os.path.normpath(self.index / place)
                shutil.copytree(source, draft, copy_function=_link, dirs_exist_ok=True)
                if is_complete(draft, run_id):
                    self._place(draft, run_id)
                    return True
        except (OSError, ValueError):
            pass
        return False

    def forget(self, run_id: str) -> None:
        """Remove a run."""
        shutil.rmtree(self.run(run_id), ignore_errors=True)

    def clean(self) -> None:
        """Remove what processes that were killed left half-written."""
        for path in (self.path / "runs").glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder, which is made if need be.

        Raises:
            InputError: if another sweep does, or nothing can be written there.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.work / "lock", wait=False))
            except BlockingIOError:
                raise InputError(
                    f"{self.path}: another sweep is writing here; wait for it or name a new folder"
                ) from None
            except OSError as error:
                raise InputError(f"{self.path}: cannot be written ({error.strerror or error})") from error
            yield


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
