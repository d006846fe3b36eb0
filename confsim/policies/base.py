"""What a policy decides: the queue's order, a chunk's dispatch over groups, a decode's placement.

Policies are pure: they see requests (never an output length) and numbers, and return decisions. A new one is a
file in `order/`, `dispatch/` or `placement/`, named by the config key of the same name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from confsim.errors import InputError
from confsim.run.request import Request

PredictPrefill = Callable[[Request], float]  # seconds to prefill the rest of a request alone, from now


class Order(Protocol):
    """The queue of requests that wait for prefill or are in the middle of it."""

    time_free: bool  # the order does not depend on the time at which it is asked

    def push(self, request: Request) -> None:
        """Queue a request, or return one whose prefill is not over."""

    def pop(self, now_s: float, predict: PredictPrefill, new: bool = True) -> Request | None:
        """Take the next request; with `new` false only one that has started already."""

    def remove(self, request: Request) -> None:
        """Take out a started request that lost its KV."""

    def __len__(self) -> int:
        """Requests queued."""


class Dispatch(Protocol):
    """Spreads prefill tokens over groups that hold decode tokens already."""

    def peak(self, tokens: int) -> tuple[int, int]:
        """Largest stacked tokens and largest prefill shard of any group when `tokens` are spread."""

    def spread(self, tokens: int) -> tuple[int, ...]:
        """Prefill tokens of each group; the sum is exact."""

    def capacity(self, level: int) -> int:
        """The most tokens that leave every group that takes some at `level` stacked tokens or below."""


class GroupLoad(NamedTuple):
    """A group as decode placement sees it; `units` are those of its KV pool."""

    group: int
    context_tokens: int
    used_units: int
    available_units: int
    capacity_units: int


class Placement(Protocol):
    """Chooses the group in which a request decodes."""

    def choose(self, groups: Sequence[GroupLoad], need_units: int) -> int:
        """The group, or -1 where none has `need_units`."""


def lookup(kind: str, name: str) -> Any:
    """The class `confsim.policies.<kind>.<name>.<Kind>`.

    Raises:
        InputError: for an unknown name; the message lists the known ones.
    """
    package = importlib.import_module(f"confsim.policies.{kind}")
    known = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    if name not in known:
        raise InputError(f"policy.{kind}={name}: unknown, use one of {', '.join(known)}")
    return getattr(importlib.import_module(f"confsim.policies.{kind}.{name}"), kind.capitalize())


@dataclass(frozen=True)
class Policy:
    """A bundle of the three decisions; None leaves one to the scheme."""

    order: str = "fcfs"
    dispatch: str | None = None
    placement: str | None = None
    placement_threshold: float = 0.8  # KV use of every group above which placement packs

    def __post_init__(self) -> None:
        self.new_order()
        for kind in ("dispatch", "placement"):
            if (name := getattr(self, kind)) is not None:
                lookup(kind, name)
        if not 0 <= self.placement_threshold <= 1:
            raise InputError(f"policy.placement_threshold={self.placement_threshold}: use a share from 0 to 1")

    def new_order(self) -> Order:
        """An empty queue."""
        order: Order = lookup("order", self.order)()
        return order

    def dispatch_class(self, default: str) -> Callable[[Sequence[int]], Dispatch]:
        """Dispatch over groups by their decode tokens."""
        dispatch: Callable[[Sequence[int]], Dispatch] = lookup("dispatch", self.dispatch or default)
        return dispatch

    def new_placement(self, default: str) -> Placement:
        """Decode placement."""
        placement: Placement = lookup("placement", self.placement or default)(self.placement_threshold)
        return placement
