"""In turn."""

from __future__ import annotations

from collections.abc import Sequence

from confsim.routers.base import Target
from confsim.run.request import Request


class Router:
    """Each target in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, targets: Sequence[Target]) -> int:
        """The next target."""
        chosen = self._next % len(targets)
        self._next = chosen + 1
        return chosen
