"""Wall time by stage, without a synchronisation inside the iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STAGES = ("linear", "prefill_attention", "decode_attention", "communication", "head", "transfer", "prepare")


@dataclass(frozen=True)
class Spent:
    """One iteration: seconds in all and by stage, of launching, and the share of time in which the device had work."""

    duration_s: float
    stages: dict[str, float]
    launch_s: float
    busy_share: float


class StageClock:
    """Seconds by stage; stages of different paths may run at the same time, stages of one path nest exclusively.

    This one is for work that is done when a call returns.
    """

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

    def stop(self) -> Spent:
        """Wait for the work that was launched, and account for it.

        Call it right after the last launch. Launching is what no stage accounts for: the interpreter between the calls.
        """
        duration = time.perf_counter() - self._start
        spent = dict.fromkeys(STAGES, 0.0)
        for name, seconds in self._log:
            spent[name] += seconds
        launch = max(0.0, duration - sum(spent.values()))
        return Spent(duration, spent, launch, 1.0 - launch / duration if duration else 0.0)
