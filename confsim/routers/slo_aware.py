"""Where the first token is expected in time; what would be late everywhere waits where it delays nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from confsim.routers._state import View
from confsim.routers.base import Target
from confsim.run.request import Request


class Router:
    """The earliest expected first token among the targets that are expected to keep the request's TTFT limit.

    A target's expectation is its backlog (and the prompt's new tokens) over the speed at which its first tokens have
    come. A request that no target is expected to serve in time goes to the longest backlog: there it makes no
    request late that still has a chance, and the other targets stay below the limit under overload.
    """

    def __init__(self) -> None:
        self._view = View()

    def choose(self, request: Request, targets: Sequence[Target]) -> int:
        """The target for a request."""
        new = self._view.new_tokens(request, targets)
        expected_s = self._view.expected_s(new)
        backlogs = self._view.backlogs
        in_time = [index for index in range(len(targets)) if expected_s[index] <= request.ttft_limit_s]
        if in_time:
            chosen = min(in_time, key=lambda i: (expected_s[i], backlogs[i].tokens, targets[i].outstanding_requests, i))
        else:
            chosen = max(range(len(targets)), key=lambda i: (backlogs[i].tokens, -i))
        return self._view.send(request, chosen, new[chosen])
