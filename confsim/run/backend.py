"""The protocol by which a scheme has its plans timed: by a model, or by real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from confsim.run.plan import IterationPlan, IterationTiming

if TYPE_CHECKING:
    from confsim.run.model_backend import Cost, Noise


class Backend(Protocol):
    """Times iteration plans in the order in which they are submitted."""

    def submit(self, plan: IterationPlan) -> None:
        """Start an iteration; the decode batches of `plan` may not change until `result` returns."""

    def result(self) -> IterationTiming:
        """Wait for the iteration submitted last and return its timing."""

    def close(self) -> None:
        """Release what the backend holds; harmless when repeated."""


class RunBackends(Protocol):
    """The backends of one run, where they hold something from its start to its end (ranks, a wall clock)."""

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> Backend:
        """A backend for one loop."""

    def report(self) -> Mapping[str, Any]:
        """What was measured beside the iterations, as plain JSON data: `live` of the summary."""

    def close(self) -> None:
        """Release everything; harmless when repeated."""


@runtime_checkable
class OpensRuns(Protocol):
    """A backend factory that makes its backends anew for every run."""

    def open(self, now_s: Callable[[], float]) -> RunBackends:
        """Start a run whose simulated time is `now_s()`."""


def open_run(factory: object, now_s: Callable[[], float]) -> RunBackends | None:
    """The backends of a run, or None where a factory serves all runs alike."""
    return factory.open(now_s) if isinstance(factory, OpensRuns) else None
