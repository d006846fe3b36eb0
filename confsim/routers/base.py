"""Where a request goes; the same routers serve replicas inside a scheme and instances of a cluster.

A new router is a file here, named by its config value, with a class `Router`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Protocol

from confsim.errors import InputError
from confsim.run.request import Request


class Target(Protocol):
    """What a router knows of a replica or instance."""

    outstanding_requests: int
    outstanding_tokens: int  # prompt tokens of requests that have not ended


class Router(Protocol):
    """Chooses a target for each request, in arrival order."""

    def choose(self, request: Request, targets: Sequence[Target]) -> int:
        """Index of the target."""


def new_router(name: str, key: str) -> Router:
    """A router by its name.

    Raises:
        InputError: for an unknown name; `key` is the config key that holds it.
    """
    package = importlib.import_module("confsim.routers")
    known = sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if module.name != "base" and not module.name.startswith("_")
    )
    if name not in known:
        raise InputError(f"{key}={name}: unknown, use one of {', '.join(known)}")
    router: Router = importlib.import_module(f"confsim.routers.{name}").Router()
    return router
