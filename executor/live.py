"""Real ranks as the clock of a simulation: what `backend=live` makes of a run, and what it measures beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from confsim.errors import InputError
from confsim.run.model_backend import Noise
from confsim.run.plan import DecodeBatch, IterationPlan, IterationTiming, PrefillChunk
from confsim.run.request import Request
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.schemes.rank_rules import RankRules
from confsim.specs import ClusterSpec, KvConfig
from executor.backend import LiveBackend
from executor.config import ExecutorConfig, Layout
from executor.layouts import live_kinds
from executor.probe import warm_up
from executor.runtime import Runtime


@dataclass(frozen=True)
class LiveBackendConfig:
    """`backend=live`: ranks of `executor`, in the layout of the scheme on `cluster`, with the KV of the simulation.

    `realtime`: the simulated clock follows the wall clock, and arrivals wait for it.
    """

    executor: ExecutorConfig
    kv: KvConfig | None = None  # None: the executor's own
    cluster: ClusterSpec | None = None  # kv.capacity_tokens is for its groups
    realtime: bool = False
    warmup_iterations: int = 8
    seed: int = 0
    keep_plans: bool = False  # so that `repeat` can run them again

    def __post_init__(self) -> None:
        if self.warmup_iterations < 0:
            raise InputError(f"backend.warmup_iterations={self.warmup_iterations}: use 0 or more")

    def open(self, now_s: Callable[[], float]) -> LiveRun:
        """Backends of one run."""
        return LiveRun(self, now_s)

    def runtime(self, layout: Layout) -> Runtime:
        """Ranks that are ready.

        Raises:
            InputError: if the model cannot be laid out so.
            RankError: if a rank fails at its start.
        """
        kv = self.kv or self.executor.kv
        if kv.capacity_tokens is not None and self.cluster is not None:
            kv = replace(kv, capacity_tokens=kv.capacity_tokens * layout.tp // self.cluster.tp)
        return Runtime.of(replace(self.executor, layout=layout, kv=kv)).__enter__()


class LiveRun:
    """The one loop of a run, its warm-up and what is reported of it."""

    many_loops = False

    def __init__(self, config: LiveBackendConfig, now_s: Callable[[], float]) -> None:
        self.config = config
        self._now_s = now_s
        self.loop: LiveLoop | None = None

    def create(self, cost: Any, noise: Noise, tp: int, sp: int, layout: str) -> LiveLoop:
        """Start and warm up the ranks of a scheme's loop.

        Raises:
            InputError: if no layout runs that scheme, or a second loop is asked for.
        """
        kinds = live_kinds()
        kind = kinds.get(layout)
        if kind is None or not isinstance(cost, CoBatchCost):
            raise InputError(f"scheme={layout.split('/')[0]} has no live layout: use one of {', '.join(kinds)}")
        if self.loop is not None:
            raise InputError("cluster.instances: backend=live drives one instance, set it to 1")
        wanted = Layout(kind, sp, tp)
        if reason := wanted.rules.refusal(cost):
            raise InputError(reason)
        ranks = self.config.runtime(wanted)
        try:
            warm_up(ranks, self.config.warmup_iterations)
        except BaseException:
            ranks.close()
            raise
        rules = ranks.layout.rules
        RankRules.of(asdict(self.config.executor.device), rules.side_by_side, rules.moves_prompts).apply(cost)
        self.loop = LiveLoop(ranks, cost, self._now_s, self.config)
        return self.loop

    def report(self) -> Mapping[str, Any]:
        """Tokens, exposed scheduling and lateness; empty where no loop ran."""
        if self.loop is None:
            return {}
        return {"warmup_iterations": self.config.warmup_iterations, **self.loop.report()}

    def repeat(self, times: int) -> np.ndarray:
        """Execute all plans of the run again, `times` times; seconds `[times, iterations]`.

        Raises:
            InputError: unless the run kept its plans.
        """
        if self.loop is None or not self.config.keep_plans:
            raise InputError("backend.keep_plans=false: plans can only be repeated where a run kept them")
        return self.loop.repeat(times)

    def close(self) -> None:
        """End the ranks."""
        if self.loop is not None:
            self.loop.close()


@dataclass
class _Watch:
    """Wall seconds around the iterations of a run."""

    exposed_s: list[float] = field(default_factory=list)  # ranks idle: from a result to the next submit
    driver_s: list[float] = field(default_factory=list)  # from submit to result, beyond the ranks' own time
    late_s: list[float] = field(default_factory=list)  # wall clock ahead of the simulated one at a submit


class LiveLoop(LiveBackend):
    """Executes the plans of one loop and charges what the slowest rank took.

    While the ranks execute a plan, the driver prices it (`predicted_s`) and keeps its books. What the engine does
    between a result and the next submit (applying the result, scheduling) the ranks wait for: `exposed_s`.
    """

    def __init__(
        self, ranks: Runtime, cost: CoBatchCost, now_s: Callable[[], float], config: LiveBackendConfig
    ) -> None:
        super().__init__(ranks, seed=config.seed)
        self.cost = cost
        self.tokens = 0
        self.watch = _Watch()
        self._now_s = now_s
        self._realtime = config.realtime
        self._keep = config.keep_plans
        self._kept: list[IterationPlan] = []
        self._origin_s: float | None = None  # wall clock at simulated time 0
        self._submitted_s = 0.0
        self._idle_since_s: float | None = None
        self._predicted_s = 0.0

    def submit(self, plan: IterationPlan) -> None:
        """Start an iteration, not before its simulated time where that is real, and price it meanwhile."""
        arrived_s = time.perf_counter()
        if self._idle_since_s is not None:
            self.watch.exposed_s.append(arrived_s - self._idle_since_s)
        if self._realtime:
            self._keep_time(arrived_s)
        if self._keep:
            self._kept.append(frozen(plan))
        self._submitted_s = time.perf_counter()
        super().submit(plan)
        self._predicted_s = self.cost.timing(plan).duration_s

    def result(self) -> IterationTiming:  # type: ignore[override]
        """The iteration's time on the slowest rank; in real time, the wall clock since its simulated start."""
        executed = super().result()
        self.tokens += len(executed.tokens)
        now_s = self._idle_since_s = time.perf_counter()
        self.watch.driver_s.append(now_s - self._submitted_s - executed.duration_s)
        timing = executed._replace(predicted_s=self._predicted_s)
        if self._realtime:
            assert self._origin_s is not None
            timing = timing._replace(duration_s=now_s - self._origin_s - self._now_s())
        return timing

    def report(self) -> dict[str, Any]:
        """What was measured beside the iterations."""
        layout = self.runtime.layout
        out: dict[str, Any] = {
            "layout": f"{layout.kind}, {layout.groups} groups of {layout.tp}",
            "attention_paths": "in turn" if self.cost.stage is in_turn else "overlapped",
            "iterations": self.iterations,
            "tokens": self.tokens,
            "exposed_schedule_s": _statistics(self.watch.exposed_s),
            "driver_s": _statistics(self.watch.driver_s),
            "realtime": self._realtime,
        }
        if self._realtime:
            out["lateness_s"] = _statistics(self.watch.late_s)
        return out

    def repeat(self, times: int) -> np.ndarray:
        """Execute the kept plans again, `times` times; seconds `[times, plans]`."""
        seconds = np.zeros((times, len(self._kept)))
        for turn in range(times):
            self.forget()
            for index, plan in enumerate(self._kept):
                super().submit(plan)
                seconds[turn, index] = super().result().duration_s
        return seconds

    def _keep_time(self, now_s: float) -> None:
        due_s = self._now_s()
        if self._origin_s is None:
            self._origin_s = now_s - due_s
        late_s = now_s - self._origin_s - due_s
        if late_s < 0:
            time.sleep(-late_s)
            self._idle_since_s = None
        self.watch.late_s.append(max(0.0, late_s))


def frozen(plan: IterationPlan) -> IterationPlan:
    """A copy that later iterations do not change."""
    chunks = tuple(PrefillChunk(_copy(c.request), c.start, c.shards, c.last, c.group) for c in plan.prefill)
    batches = tuple(
        DecodeBatch(b.group, b.count, b.context_tokens, {key: _copy(r) for key, r in b.members.items()})
        for b in plan.decode
    )
    return IterationPlan(chunks, batches, plan.released)


def _copy(request: Request) -> Request:
    copy = Request(request.id, request.arrival_s, request.prompt_tokens)
    copy.target_tokens = request.target_tokens
    return copy


def _statistics(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = np.array(seconds)
    p50, p95 = np.quantile(values, (0.5, 0.95))
    return {"mean": float(values.mean()), "p50": float(p50), "p95": float(p95), "max": float(values.max())}
