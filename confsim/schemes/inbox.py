"""Where requests arrive: the queue that plans see, and those that came too late for the next plan."""

from __future__ import annotations

from confsim.policies.base import Order
from confsim.run.request import Request


class Inbox:
    """Takes requests into a loop's queue.

    With `ahead` (asynchronous scheduling, as in vLLM and SGLang) the plan of an iteration is settled when the iteration
    before it starts: what arrives while one runs is not in the next plan but in the one after it. A loop that runs
    nothing plans at once. Only arrivals are late; what an iteration frees the next plan may use, since ends by length
    are known in advance.
    """

    def __init__(self, queue: Order, ahead: bool) -> None:
        self.queue = queue
        self._ahead = ahead
        self._runs = False  # an iteration runs, whose successor's plan is settled
        self._late: list[Request] = []

    def __len__(self) -> int:
        return len(self.queue) + len(self._late)

    def take(self, request: Request) -> None:
        """A request arrives."""
        if self._runs and self._ahead:
            self._late.append(request)
        else:
            self.queue.push(request)

    def planned(self, runs: bool) -> bool:
        """A plan was made, and `runs` now (false: there was nothing to do).

        The next one sees all that have arrived by now; returns whether it sees any that this one did not.
        """
        self._runs = runs
        if not self._late:
            return False
        for request in self._late:
            self.queue.push(request)
        self._late.clear()
        return True
