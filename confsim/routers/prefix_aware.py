"""Where the least is to be computed before the first token, cached prefixes counted."""

from __future__ import annotations

from collections.abc import Sequence

from confsim.routers._state import View
from confsim.routers.base import Target
from confsim.run.request import Request


class Router:
    """The fewest new tokens ahead of the first one: those waiting there, and the prompt without its cached prefix.

    So a request follows its prefix until the queue there costs more than computing the prefix anew elsewhere. Ties go
    to the fewest outstanding requests. Prefixes are only known with `kv.prefix_cache=true` on a trace that has them.
    """

    reads_prefixes = True  # the trace's block ids are read for it

    def __init__(self) -> None:
        self._view = View()

    def choose(self, request: Request, targets: Sequence[Target]) -> int:
        """The target with the least work before the first token."""
        new = self._view.new_tokens(request, targets)
        backlogs = self._view.backlogs
        chosen = min(
            range(len(targets)), key=lambda i: (backlogs[i].tokens + new[i], targets[i].outstanding_requests, i)
        )
        return self._view.send(request, chosen, new[chosen])
