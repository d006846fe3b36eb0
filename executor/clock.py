"""Wall time by stage, without a synchronisation inside the iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

STAGES = ("linear", "prefill_attention", "decode_attention", "communication", "head", "transfer", "prepare")


class StageClock(Protocol):
    """Seconds by stage; stages of different paths may run at the same time, stages of one path nest exclusively."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time what runs inside under `name`."""

    def start(self) -> None:
        """Begin an iteration."""

    def stop(self) -> tuple[float, dict[str, float], float]:
        """Wait for the work; its duration, seconds by stage, and seconds that the host needed to launch it."""


class HostClock:
    """For work that is done when a call returns."""

    def __init__(self) -> None:
        self._log: list[tuple[str, float]] = []  # appended from both paths' threads
        self._start = 0.0

    def start(self) -> None:
        """Begin an iteration."""
        self._log = []
        self._start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside under `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._log.append((name, time.perf_counter() - begin))

    def stop(self) -> tuple[float, dict[str, float], float]:
        """Duration, seconds by stage, and what no stage accounts for (the interpreter between the calls)."""
        duration = time.perf_counter() - self._start
        spent = dict.fromkeys(STAGES, 0.0)
        for name, seconds in self._log:
            spent[name] += seconds
        return duration, spent, max(0.0, duration - sum(spent.values()))
