"""Who sends the requests of a run, and when: at given times, as earlier ones end, or after a user's last turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import simpy

from confsim.run.ledger import Ledger
from confsim.run.request import Request
from confsim.schemes.base import Instance
from traces.load import Load


class Target(Protocol):
    """The run as a driver sees it."""

    env: simpy.Environment
    ledger: Ledger
    instances: list[Instance]
    output_tokens: list[int]  # by request id

    def inject(self, row: int, arrival_s: float) -> None:
        """Let the request of a row of the load arrive, at the present simulated time."""


class Driver(Protocol):
    """Sends the requests of a load. New ones are classes with `start`."""

    def start(self, run: Target) -> None:
        """Set up what will inject them; called once, at time 0."""


class OpenLoop:
    """Each row at its own time (`arrival_s` by row, ascending seconds), whatever the run does."""

    def __init__(self, arrival_s: Sequence[float], rows: Iterable[int] | None = None) -> None:
        self._arrival_s = arrival_s
        self._rows = range(len(arrival_s)) if rows is None else rows

    def start(self, run: Target) -> None:
        """Run through the rows as a process."""
        run.env.process(self._arrivals(run))

    def _arrivals(self, run: Target) -> Generator[simpy.Event, Any, None]:
        env, arrival_s = run.env, self._arrival_s
        for row in self._rows:
            if arrival_s[row] > env.now:
                yield env.timeout(arrival_s[row] - env.now)
            run.inject(row, arrival_s[row])


class ClosedLoop:
    """The first `concurrency` of `requests` rows at time 0, and the next one whenever a request ends."""

    def __init__(self, requests: int, concurrency: int) -> None:
        self._rows = iter(range(requests))
        self._concurrency = min(concurrency, requests)

    def start(self, run: Target) -> None:
        """Send the first ones."""
        run.ledger.on_end.append(lambda request, time_s: self._send(run))
        for _ in range(self._concurrency):
            self._send(run)

    def _send(self, run: Target) -> None:
        _after(run, 0.0, lambda: self._next(run))

    def _next(self, run: Target) -> None:
        row = next(self._rows, None)
        if row is not None:
            run.inject(row, run.env.now)


class Sessions:
    """First turns at their own times; a later turn `think_s` of its row after the last token of its parent."""

    def __init__(self, arrival_s: Sequence[float], think_s: Sequence[float], parent_row: Sequence[int]) -> None:
        self._first_turns = OpenLoop(arrival_s, [row for row, parent in enumerate(parent_row) if parent < 0])
        self._think_s = think_s
        self._children: dict[int, list[int]] = {}
        for row, parent in enumerate(parent_row):
            if parent >= 0:
                self._children.setdefault(parent, []).append(row)

    def start(self, run: Target) -> None:
        """Send first turns, and watch for ends."""
        run.ledger.on_end.append(lambda request, time_s: self._next_turns(run, request))
        self._first_turns.start(run)

    def _next_turns(self, run: Target, request: Request) -> None:
        for row in self._children.pop(request.id, ()):
            _after(run, float(self._think_s[row]), partial(self._inject, run, row))

    def _inject(self, run: Target, row: int) -> None:
        run.inject(row, run.env.now)


def _after(run: Target, delay_s: float, send: Callable[[], None]) -> None:
    event = run.env.timeout(delay_s)
    assert event.callbacks is not None
    event.callbacks.append(lambda _: send())


def driver_of(load: Load) -> Driver:
    """The driver that a load's arrival mode asks for."""
    arrival_s: list[float] = load.arrival_s.tolist()
    if load.concurrency is not None:
        return ClosedLoop(len(load), load.concurrency)
    if load.think_s is not None and load.parent_row is not None:
        return Sessions(arrival_s, load.think_s.tolist(), load.parent_row.tolist())
    return OpenLoop(arrival_s)
