"""Simulations in worker processes: each loads the trace once and keeps what it has built.

A worker is `python -m analysis.search.worker`; jobs and outcomes are pickled over its standard input and output. Unlike
`multiprocessing`, this never imports the caller's main module again, so it works from notebooks and plain scripts.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from analysis.search.runner import Job, Runner


class WorkerError(RuntimeError):
    """A worker process ended without an answer."""


class Pool:
    """`workers` processes that run jobs of `cases` (resolved configurations); with one, jobs run in this process.

    Use as a context manager: leaving it ends the workers, whatever they do.
    """

    def __init__(self, cases: Sequence[dict[str, Any]], workers: int) -> None:
        self._waiting: deque[tuple[Any, Job]] = deque()
        self._workers = [_Worker(cases) for _ in range(workers)] if workers > 1 else []
        self._runner = None if self._workers else Runner(cases)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()

    def submit(self, key: Any, job: Job) -> None:
        """Queue a job; its outcome comes from `outcomes` with the key."""
        self._waiting.append((key, job))

    def outcomes(self) -> Iterator[tuple[Any, Any]]:
        """Keys and outcomes as they come, until no job is left; jobs may be submitted meanwhile.

        Raises:
            InputError: what a job raised for a user's mistake; so for any other exception of a job.
            WorkerError: if a worker dies.
        """
        if self._runner is not None:
            while self._waiting:
                key, job = self._waiting.popleft()
                yield key, self._runner(job)
            return
        while True:
            self._hand_out()
            busy = [worker for worker in self._workers if worker.busy]
            if not busy:
                return
            for worker in _ready(busy):
                yield worker.receive()
                self._hand_out()

    def _hand_out(self) -> None:
        for worker in self._workers:
            if self._waiting and not worker.busy:
                worker.send(*self._waiting.popleft())


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
        return [key.data for key, _ in selector.select()]


class _Worker:
    """One process, with at most one job at a time."""

    def __init__(self, cases: Sequence[dict[str, Any]]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            (sys.executable, "-m", "analysis.search.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the workers
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._key: Any = None
        self.busy = False
        self._write(list(cases))

    def _write(self, message: Any) -> None:
        try:
            pickle.dump(message, self._input)
            self._input.flush()
        except BrokenPipeError as error:
            raise self._dead() from error

    def send(self, key: Any, job: Job) -> None:
        self._key, self.busy = key, True
        self._write(job)

    def receive(self) -> tuple[Any, Any]:
        try:
            failed, outcome = pickle.load(self.output)
        except EOFError as error:
            raise self._dead() from error
        self.busy = False
        if failed:
            raise outcome
        return self._key, outcome

    def _dead(self) -> WorkerError:
        code = self._process.wait()
        return WorkerError(f"a worker process ended with code {code}; goodput.workers=1 runs without worker processes")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.output.close()
        with contextlib.suppress(BrokenPipeError):  # what was left unsent has no reader any more
            self._input.close()
