"""Where the fewest prompt tokens are outstanding."""

from __future__ import annotations

from collections.abc import Sequence

from confsim.routers.base import Target
from confsim.run.request import Request


class Router:
    """The fewest outstanding tokens; ties to the first."""

    def choose(self, request: Request, targets: Sequence[Target]) -> int:
        """The least loaded target."""
        return min(range(len(targets)), key=lambda index: targets[index].outstanding_tokens)
