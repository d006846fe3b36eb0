"""Where a request goes; the same routers serve replicas inside a scheme and instances of a cluster.

A new router is a file here, named by its config value, with a class `Router`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from confsim.run.request import Request
from confsim.setup.registry import ROUTERS


class Target(Protocol):
    """What a router knows of a replica or instance."""

    outstanding_requests: int
    outstanding_tokens: int  # prompt tokens of requests that have not ended


class Router(Protocol):
    """Chooses a target for each request, in arrival order."""

    def choose(self, request: Request, targets: Sequence[Target]) -> int:
        """Index of the target."""


def new_router(name: str, key: str) -> Router:
    """A router by its name, a file here or one of the user's own.

    Raises:
        InputError: for an unknown name; `key` is the config key that holds it.
    """
    router: Router = ROUTERS.make(name, key=key)
    return router
