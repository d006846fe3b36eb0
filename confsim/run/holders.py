"""Requests that hold KV, and which of them is the oldest."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from confsim.run.request import Request


class Holders:
    """Holders by id, with a heap by arrival from which those that left are dropped when they surface."""

    def __init__(self) -> None:
        self._held: dict[int, Request] = {}
        self._ages: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request: Request) -> None:
        """It holds KV from now on."""
        self._held[request.id] = request
        heappush(self._ages, (request.arrival_s, request.id))

    def remove(self, request: Request) -> None:
        """It gave its KV up."""
        del self._held[request.id]

    def is_oldest(self, request: Request) -> bool:
        """Whether no other holder arrived before it."""
        ages = self._ages
        while ages[0][1] not in self._held:
            heappop(ages)
        return ages[0] == (request.arrival_s, request.id)
