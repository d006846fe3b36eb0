"""What a policy decides: the queue's order, a chunk's dispatch over groups, a decode's placement.

Policies are pure: they see requests (never an output length) and numbers, and return decisions. A new one is a
class `Order`, `Dispatch` or `Placement` in a file in the folder of its kind, or one of the user's own, named by the
config key of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from confsim.errors import InputError
from confsim.run.request import Request
from confsim.setup.registry import DISPATCHES, ORDERS, PLACEMENTS
from traces.registry import name_and_options

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


@dataclass(frozen=True)
class Policy:
    """A bundle of the three decisions; None leaves one to the scheme.

    Each is a name (`confsim.setup.registry`), or a mapping of `name` and options of the class that it names.

    Raises:
        InputError: for a name or an option that does not exist.
    """

    order: str | Mapping[str, Any] = "fcfs"
    dispatch: str | Mapping[str, Any] | None = None
    placement: str | Mapping[str, Any] | None = None
    placement_threshold: float = 0.8  # KV use of every group above which placement packs

    def __post_init__(self) -> None:
        if not 0 <= self.placement_threshold <= 1:
            raise InputError(f"policy.placement_threshold={self.placement_threshold}: use a share from 0 to 1")
        self.new_order()
        if self.dispatch is not None:
            DISPATCHES.make(self.dispatch, [0])
        if self.placement is not None:
            self.new_placement("")

    @property
    def label(self) -> str:
        """The order as results name it, with its options."""
        name, options = name_and_options(self.order, "policy.order")
        values = ", ".join(f"{key}={value}" for key, value in options.items())
        return f"{name} ({values})" if values else name

    def new_order(self) -> Order:
        """An empty queue."""
        order: Order = ORDERS.make(self.order)
        return order

    def dispatch_class(self, default: str) -> Callable[[Sequence[int]], Dispatch]:
        """Dispatch over groups by their decode tokens."""
        name, options = name_and_options(self.dispatch or default, "policy.dispatch")
        dispatch: Callable[[Sequence[int]], Dispatch] = DISPATCHES.get(name)
        return partial(dispatch, **options) if options else dispatch

    def new_placement(self, default: str) -> Placement:
        """Decode placement."""
        placement: Placement = PLACEMENTS.make(self.placement or default, self.placement_threshold)
        return placement
