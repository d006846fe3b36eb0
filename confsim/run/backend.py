"""The protocol by which a scheme has its plans timed: by a model, or by real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from confsim.run.plan import DecodeRun, IterationPlan, IterationTiming

if TYPE_CHECKING:
    from confsim.run.model_backend import Cost, Noise


class Backend(Protocol):
    """Times iteration plans in the order in which they are submitted."""

    def submit(self, plan: IterationPlan) -> None:
        """Start an iteration; the decode batches of `plan` may not change until `result` returns."""

    def result(self) -> IterationTiming:
        """Wait for the iteration submitted last and return its timing."""

    @property
    def can_run_ahead(self) -> bool:
        """Whether `run_ahead` works: iterations take what a model says, so that they can be taken back."""

    def run_ahead(self, plan: IterationPlan, start_s: float, until_s: float, most: int) -> DecodeRun:
        """Time up to `most` iterations of the decodes of a plan: the last one starts before `until_s`, or is the first.

        `start_s` is where the first one starts.
        """

    def cut(self, run: DecodeRun, steps: int) -> None:
        """Of the run timed last only the first `steps` iterations will have been."""

    def close(self) -> None:
        """Release what the backend holds; harmless when repeated."""


class Stepwise:
    """What a backend extends that times one iteration after the other."""

    can_run_ahead = False

    def run_ahead(self, plan: IterationPlan, start_s: float, until_s: float, most: int) -> DecodeRun:
        """Never called, as `can_run_ahead` says.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("this backend times one iteration at a time")

    def cut(self, run: DecodeRun, steps: int) -> None:
        """Nothing was looked ahead to."""


class RunBackends(Protocol):
    """The backends of one run, where they hold something from its start to its end (ranks, a wall clock)."""

    @property
    def many_loops(self) -> bool:
        """Whether several loops can be timed that run at once."""

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
