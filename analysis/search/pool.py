"""Work over processes: the one pool of searches, experiments and validations.

    with Pool(function, workers) as pool:
        future = pool.submit(a, b)                       # function(a, b) in a worker; a concurrent.futures.Future
        for key, result in pool.completed({key: (a, b)}):  # as they end
            ...
        first, second = pool.together(search, another)   # functions of this process that submit and wait, side by side

- `function` and what it is given are pickled, the function once for each worker, which keeps it: what an object with
  `__call__` stores on itself (a trace, simulations) is there for the worker's next job.
- A worker is started when a job waits and no worker is idle, up to `workers` and the cores of this machine. With
  `workers=1` there is none: jobs run in this process, `submit` returns when its job has ended.
- Jobs are handed out in the order in which they were submitted, each to the worker that is free first. Submit the
  longest first.
- Nothing of the caller's main module is imported, so that notebooks and scripts without a main guard work.
- A job whose worker is killed is run again by a new one; a job that ends two workers is a `WorkerError`.
- Leaving the pool ends the workers, whatever they do. They end by themselves when this process is gone, and leave
  Ctrl-C to it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from loky import cpu_count
from loky.process_executor import ProcessPoolExecutor, TerminatedWorkerError

from confsim.errors import InputError

ATTEMPTS = 2  # of a job whose worker is killed
LOOK_S = 0.5  # between two looks of a worker at whether its parent lives
ENVIRONMENT = {"LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}  # what a worker keeps on purpose is no leak to restart it for
NAME_LETTERS = 200  # of a job in a message

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

# Workers start no processes; where there is no pgrep to look for some, loky kills the worker alone and complains.
warnings.filterwarnings("ignore", "Failed to kill subprocesses on this platform", UserWarning)


class WorkerError(RuntimeError):
    """A job ended its worker process twice."""


def worker_count(key: str, value: Any) -> int:
    """The number of processes in a configuration's `key`.

    Raises:
        InputError: if it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{key}={value}: use 1 or more processes")
    return value


class Pool:
    """Runs `function` in up to `workers` processes; use as a context manager. The module says how."""

    def __init__(self, function: Callable[..., Any], workers: int) -> None:
        self._function = function
        self._threads = ThreadPoolExecutor(min(workers, cpu_count())) if workers > 1 else None
        self._processes: dict[int, ProcessPoolExecutor] = {}  # one worker for each thread, by the thread's number
        self._lock = threading.Lock()
        self._closed = False
        self._failure: BaseException | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, *arguments: Any) -> Future[Any]:
        """The future result of a job.

        Raises:
            RuntimeError: if the pool is closed.
        """
        if self._threads is not None:
            return self._threads.submit(self._run, arguments)
        future: Future[Any] = Future()
        try:
            future.set_result(self._function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def completed(self, jobs: Mapping[K, tuple[Any, ...]]) -> Iterator[tuple[K, Any]]:
        """Keys and results of jobs (key: arguments) as they end.

        Raises:
            Exception: what a job raised.
            WorkerError: if a job ended its worker twice.
        """
        if self._threads is None:
            for key, arguments in jobs.items():
                yield key, self._function(*arguments)
            return
        futures = {self.submit(*arguments): key for key, arguments in jobs.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def together(self, *calls: Callable[[], T]) -> list[T]:
        """What functions return that submit jobs and wait for them, each in a thread of its own.

        Where jobs run in this process, so do the functions, one after the other. If one raises, the pool is closed, so
        that the others end; calls may be nested.

        Raises:
            Exception: what was raised first.
        """
        if self._threads is None or not calls:
            return [call() for call in calls]
        with ThreadPoolExecutor(len(calls)) as threads:
            futures = [threads.submit(call) for call in calls]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                return [future.result() for future in futures if future in done]
            except BaseException as error:
                self._failure = self._failure or error  # what follows it in other threads is that the pool is closed
                self.close()
                raise self._failure from None

    def close(self) -> None:
        """End the workers; jobs that have no result get none."""
        if self._threads is None:
            return
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            processes = list(self._processes.values())
        for process in processes:
            process.shutdown(kill_workers=True)
        self._threads.shutdown()

    # --- in the threads that wait for a worker each ---

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        killed: TerminatedWorkerError
        for _ in range(ATTEMPTS):
            try:
                return self._handed_out(arguments).result()
            except TerminatedWorkerError as error:
                killed = error
        name = str(arguments[0] if len(arguments) == 1 else arguments)[:NAME_LETTERS]
        raise WorkerError(f"{name}: its worker process was killed {ATTEMPTS} times (out of memory?)") from killed

    def _handed_out(self, arguments: tuple[Any, ...]) -> Future[Any]:
        """A job in the worker of this thread; in a new one where there is none, or none any more."""
        number = threading.get_ident()
        with suppress(KeyError, TerminatedWorkerError):
            return self._processes[number].submit(_call, arguments)  # type: ignore[no-any-return]
        process = ProcessPoolExecutor(1, env=ENVIRONMENT, initializer=_begin, initargs=(self._function, os.getpid()))
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._processes[number] = process
        resource_tracker.ensure_running()  # which would undo the next line if it were started later
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers inherit it, from their first moment on
        return process.submit(_call, arguments)  # type: ignore[no-any-return]


# --- in a worker -----------------------------------------------------------------------------------------------------

_function: Callable[..., Any]


def _begin(function: Callable[..., Any], parent: int) -> None:
    global _function
    _function = function
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def _call(arguments: tuple[Any, ...]) -> Any:
    return _function(*arguments)
