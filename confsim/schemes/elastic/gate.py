"""Whether KV slots will suffice for requests whose outputs are not known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class Footprint(NamedTuple):
    """Slots that a request takes now, and tokens that it is assumed to emit yet."""

    current: int
    remaining: int


class MemoryGate:
    """LightLLM's bound on the peak of slots: by remaining output, descending, max_i(remaining_i * i + sum current)."""

    def __init__(self, running: Iterable[Footprint], slots: int) -> None:
        self._slots = slots
        self._items = sorted(running, key=lambda item: -item.remaining)
        self._prepare()

    def __len__(self) -> int:
        return len(self._items)

    def with_more(self, items: Iterable[Footprint]) -> MemoryGate:
        """A gate that counts further requests in."""
        return MemoryGate([*self._items, *items], self._slots)

    def _prepare(self) -> None:
        """Sums before each position, the largest peak before it, and from it on if one more came before."""
        items = self._items
        self._keys = [-item.remaining for item in items]
        self._sums, self._before = [0], [0]
        self._after = [0] * (len(items) + 1)
        held = highest = 0
        for place, item in enumerate(items):
            held += item.current
            peak = item.remaining * (place + 1) + held
            self._after[place] = peak + item.remaining
            highest = max(highest, peak)
            self._sums.append(held)
            self._before.append(highest)
        for place in range(len(items) - 2, -1, -1):
            self._after[place] = max(self._after[place], self._after[place + 1])

    def fits(self, item: Footprint) -> bool:
        """Whether the peak stays within the slots with one request more."""
        at = bisect_right(self._keys, -item.remaining)
        own = item.remaining * (at + 1) + self._sums[at] + item.current
        later = self._after[at] + item.current if at < len(self._items) else 0
        return max(own, later, self._before[at]) <= self._slots

    def add(self, item: Footprint) -> None:
        """Count a request in."""
        self._items.insert(bisect_right(self._keys, -item.remaining), item)
        self._prepare()
