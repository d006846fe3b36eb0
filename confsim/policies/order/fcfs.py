"""First come, first served."""

from __future__ import annotations

from confsim.policies.base import PredictPrefill
from confsim.policies.heap import Lanes, pop
from confsim.run.request import Request


class Order:
    """By arrival; ties by trace order."""

    time_free = True

    def __init__(self) -> None:
        self._lanes = Lanes()

    def push(self, request: Request) -> None:
        """Queue a request."""
        self._lanes.push(request, request.arrival_s)

    def pop(self, now_s: float, predict: PredictPrefill, new: bool = True) -> Request | None:
        """The earliest."""
        return pop(self._lanes.head(new))

    def remove(self, request: Request) -> None:
        """Take out a started request."""
        self._lanes.remove(request)

    def __len__(self) -> int:
        return len(self._lanes)
