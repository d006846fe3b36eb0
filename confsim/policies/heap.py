"""A queue in heaps: those that wait apart from those that have started, by one key."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

from confsim.run.request import Request, RequestState

Entry = tuple[bool, Any, int, Request]  # not preempted, key, id


class Lanes:
    """Two heaps by the same key; requests that were preempted come first in both."""

    def __init__(self) -> None:
        self.waiting: list[Entry] = []
        self.started: list[Entry] = []

    def push(self, request: Request, key: float) -> None:
        """Queue by (not preempted, key, id)."""
        lane = self.started if request.state is RequestState.PREFILL else self.waiting
        heappush(lane, (request.preemptions == 0, key, request.id, request))

    def head(self, new: bool) -> list[Entry]:
        """The lane with the next request, or an empty one."""
        if not new or not self.waiting:
            return self.started
        if self.started and self.started[0] < self.waiting[0]:
            return self.started
        return self.waiting

    def remove(self, request: Request) -> None:
        """Take out a started request, if it is here."""
        kept = [entry for entry in self.started if entry[3] is not request]
        if len(kept) < len(self.started):
            heapify(kept)
            self.started = kept

    def __len__(self) -> int:
        return len(self.waiting) + len(self.started)


def preempted(lane: list[Entry]) -> bool:
    """Whether a lane's next request was preempted."""
    return not lane[0][0]


def pop(lane: list[Entry]) -> Request | None:
    """The next request of a lane."""
    return heappop(lane)[3] if lane else None
