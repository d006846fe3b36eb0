"""Shortest remaining prefill first."""

from __future__ import annotations

from confsim.policies.order.fcfs import Order as Fcfs
from confsim.run.request import Request


class Order(Fcfs):
    """By the tokens still to prefill; ties by trace order."""

    def push(self, request: Request) -> None:
        """Queue a request."""
        self._lanes.push(request, request.remaining_prefill)
