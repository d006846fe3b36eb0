"""Requests that can still meet their TTFT deadline by deadline, then the rest by shortest remaining prefill."""

from __future__ import annotations

from heapq import heappop

from confsim.outcome.slo import TOLERANCE
from confsim.policies.base import PredictPrefill
from confsim.policies.heap import Lanes, pop, preempted
from confsim.run.request import Request


class Order:
    """A request found infeasible when it is reached moves to the second heap for good.

    Feasible: now plus the predicted time of its remaining prefill alone meets its deadline.
    """

    time_free = False

    def __init__(self) -> None:
        self._feasible = Lanes()
        self._late = Lanes()
        self._is_late: set[int] = set()

    def push(self, request: Request) -> None:
        """Queue a request."""
        if request.id in self._is_late:
            self._late.push(request, request.remaining_prefill)
        else:
            self._feasible.push(request, request.deadline_s)

    def pop(self, now_s: float, predict: PredictPrefill, new: bool = True) -> Request | None:
        """The feasible request with the earliest deadline, else the late one with the least to prefill."""
        late = self._late.head(new)
        while feasible := self._feasible.head(new):
            if late and preempted(late) and not preempted(feasible):
                break  # what was preempted comes first, late or not
            request = heappop(feasible)[3]
            limit_s = request.ttft_limit_s * TOLERANCE
            out_already = request.first_token_s >= 0
            if out_already or now_s + predict(request) - request.arrival_s <= limit_s:
                return request
            self._is_late.add(request.id)
            self._late.push(request, request.remaining_prefill)
            late = self._late.head(new)
        return pop(late)

    def remove(self, request: Request) -> None:
        """Take out a started request."""
        self._feasible.remove(request)
        self._late.remove(request)

    def __len__(self) -> int:
        return len(self._feasible) + len(self._late)
