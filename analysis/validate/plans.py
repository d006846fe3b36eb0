"""Backends that look at what passes through them: which plans a run made, and runs on times that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from confsim.errors import InputError
from confsim.run.backend import Backend, RunBackends, Stepwise, open_run
from confsim.run.model_backend import Cost, Noise
from confsim.run.plan import IterationPlan, IterationTiming

# Chunks of (request, start, shards, is last, decode group), members of each decode batch, requests whose KV is freed.
PlanKey = tuple[tuple[tuple[int, int, tuple[int, ...], bool, int], ...], tuple[tuple[int, ...], ...], tuple[int, ...]]


def plan_key(plan: IterationPlan) -> PlanKey:
    """What a plan does, to compare it with others."""
    chunks = tuple((c.request.id, c.start, tuple(c.shards), c.last, c.group) for c in plan.prefill)
    return chunks, tuple(tuple(sorted(batch.members)) for batch in plan.decode), tuple(sorted(plan.released))


@dataclass
class LoggedRun:
    """The backends of one run, and the plans that they were given in order."""

    many_loops: ClassVar[bool] = False
    factory: Any
    inner: RunBackends | None
    plans: list[PlanKey] = field(default_factory=list)

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> Backend:
        """A backend that keeps the keys of its plans."""
        maker = self.factory if self.inner is None else self.inner
        return _Logged(maker.create(cost, noise, tp, sp, layout), self.plans)

    def report(self) -> Mapping[str, Any]:
        """What the inner backends measured."""
        return self.inner.report() if self.inner is not None else {}

    def repeat(self, times: int) -> Any:
        """Seconds of all plans executed again, `[times, plans]`, where the inner backends can."""
        return self.inner.repeat(times)  # type: ignore[union-attr]  # only asked of live backends

    def close(self) -> None:
        """Close the inner backends."""
        if self.inner is not None:
            self.inner.close()


@dataclass(frozen=True)
class PlanLog:
    """A backend factory around another one."""

    many_loops: ClassVar[bool] = False
    factory: Any

    def open(self, now_s: Callable[[], float]) -> LoggedRun:
        """Start a run."""
        return LoggedRun(self.factory, open_run(self.factory, now_s))

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> Backend:
        """A backend outside any run; nobody sees its plans."""
        backend: Backend = self.factory.create(cost, noise, tp, sp, layout)
        return backend


@dataclass
class _Logged(Stepwise):
    inner: Backend
    plans: list[PlanKey]

    def submit(self, plan: IterationPlan) -> None:
        self.plans.append(plan_key(plan))
        self.inner.submit(plan)

    def result(self) -> IterationTiming:
        return self.inner.result()

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class RecordedTimes:
    """A backend factory that charges given seconds, iteration by iteration, and predicts as the model does."""

    many_loops: ClassVar[bool] = False
    durations_s: Sequence[float]

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> Backend:
        """A backend for the only loop."""
        return _Recorded(cost, iter(self.durations_s))


@dataclass
class _Recorded(Stepwise):
    cost: Cost
    durations_s: Iterator[float]
    timing: IterationTiming = field(default_factory=lambda: IterationTiming(0.0))

    def submit(self, plan: IterationPlan) -> None:
        duration_s = next(self.durations_s, None)
        if duration_s is None:
            raise InputError("more iterations than were recorded: the plans differ")
        timing = self.cost.timing(plan)
        self.timing = timing._replace(duration_s=duration_s, transfer_s=0.0)

    def result(self) -> IterationTiming:
        return self.timing

    def close(self) -> None:
        """Nothing is held."""
