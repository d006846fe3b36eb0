"""The event loop: arrivals and instances as SimPy processes, and the result of it all."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import simpy

from confsim.errors import InputError
from confsim.outcome import summary
from confsim.outcome.result import Result, Verdict
from confsim.outcome.slo import Slo
from confsim.policies import Policy
from confsim.routers.base import new_router
from confsim.run.backend import open_run
from confsim.run.drivers import Driver, driver_of
from confsim.run.ledger import Ledger, Oracle, Watch
from confsim.run.request import Request, RequestState
from confsim.schemes.base import BackendFactory, Instance, LatencySource, Scheme, Setup
from confsim.specs import ClusterSpec, GpuSpec, KvConfig, ModelSpec
from traces.arrivals.base import Arrivals
from traces.load import Load
from traces.prefix import chained_ids
from traces.trace import Trace


@dataclass(frozen=True)
class Window:
    """Requests that arrive before `warmup_s` or within `cooldown_s` of the last arrival do not count."""

    warmup_s: float = 0.0
    cooldown_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("warmup_s", "cooldown_s"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise InputError(f"{key}={getattr(self, key)}: expected seconds, 0 or more")

    def span(self, load: Load) -> tuple[float, float]:
        """First and last arrival time that counts, before the run.

        Raises:
            InputError: for a cool-down where arrivals depend on the run.
        """
        if not _closed(load):
            return self.span_of(load, load.arrival_s)
        if self.cooldown_s:
            raise InputError(
                f"cooldown_s={self.cooldown_s}: a search cannot know the last arrival of closed loops or sessions; "
                "use warmup_s, or arrivals.sessions=open"
            )
        return self.warmup_s, float("inf")

    def span_of(self, load: Load, arrival_s: npt.NDArray[np.float64]) -> tuple[float, float]:
        """First and last arrival time that counts, of requests that arrived at `arrival_s`."""
        planned = arrival_s if _closed(load) else load.arrival_s
        return self.warmup_s, (float(planned.max()) if len(planned) else 0.0) - self.cooldown_s


def _closed(load: Load) -> bool:
    """Whether arrivals depend on the run."""
    return load.concurrency is not None or load.think_s is not None


@dataclass(frozen=True)
class Simulation:
    """One configuration, ready to run; `run` may be called for any number of rates."""

    trace: Trace
    arrivals: Arrivals
    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    scheme: Scheme
    policy: Policy
    kv: KvConfig
    slo: Slo
    latency: LatencySource
    backend: BackendFactory
    rate: float | None = None
    seed: int = 0
    horizon_s: float | None = None
    window: Window = field(default_factory=Window)
    config: dict[str, Any] = field(default_factory=dict)
    compiled: dict[tuple[int, int], Any] = field(default_factory=dict)  # latency models by layout, filled on use

    def run(self, rate: float | None = None, probe: bool = False, check: bool = False) -> Result:
        """Replay the trace.

        `rate` replaces the configured one. A `probe` ignores `horizon_s` and ends as soon as the verdict is certain.
        `check` audits conservation and KV after every event (slow; for tests).
        """
        load = self.arrivals.apply(self.trace, self.rate if rate is None else rate, self.seed)
        return self.replay(load, probe=probe, check=check)

    def replay(self, load: Load, probe: bool = False, check: bool = False) -> Result:
        """Replay a load."""
        began = perf_counter()
        for model in self.compiled.values():
            model.extrapolations = 0
        run = Run(self, load, watch=probe)
        try:
            run.execute(None if probe else self.horizon_s, check)
            result = run.result()
            timing = summary.timing(run.ledger, perf_counter() - began)
        finally:
            run.close()
        return replace(result, timing=timing)

    def zero_load(self, requests: int = 200) -> Result:
        """Up to `requests` rows of the trace, evenly picked, each served alone and without a prefix cache."""
        picked = np.unique(np.linspace(0, len(self.trace) - 1, min(requests, len(self.trace))).astype(np.int64))
        trace = replace(self.trace, table=self.trace.table.take(pa.array(picked)))
        load = Load(trace, np.zeros(len(picked)), "closed_loop", None, concurrency=1, label="zero load")
        return replace(self, kv=replace(self.kv, prefix_cache=False)).replay(load)


class Run:
    """One replay."""

    def __init__(self, simulation: Simulation, load: Load, watch: bool = False, driver: Driver | None = None) -> None:
        self.simulation = simulation
        self.load = load
        self.driver = driver_of(load) if driver is None else driver
        self.env = simpy.Environment()
        self.live = open_run(simulation.backend, lambda: self.env.now)
        table = load.trace.table
        self._prompt: list[int] = table["prompt_tokens"].to_pylist()
        self.output_tokens: list[int] = table["output_tokens"].to_pylist()  # by request id
        self._blocks = _block_ids(simulation, load)
        self.watch = self._new_watch() if watch else None
        self.ledger = Ledger(Oracle(self.output_tokens), self.watch)
        self.setup = self._setup()
        self.instances = self._build()
        self._at_frontend = 0  # requests that have arrived and are not with a scheme yet
        self._router = new_router(simulation.cluster.router, "cluster.router")

    def _new_watch(self) -> Watch:
        low, high = self.simulation.window.span(self.load)
        inside = int(((low <= self.load.arrival_s) & (self.load.arrival_s <= high)).sum())
        return Watch(self.env, self.simulation.slo, inside, (low, high))

    def _setup(self) -> Setup:
        s = self.simulation
        return Setup(
            self.env, s.model, s.gpu, s.cluster, s.latency, s.slo, s.kv, s.policy, self.live or s.backend, self.ledger,
            s.latency.noise, s.seed, 0, self.load.trace.block_tokens if self._blocks else 0,
            max(map(sum, zip(self._prompt, self.output_tokens, strict=True)), default=1) - 1, s.compiled,
        )  # fmt: skip

    def _build(self) -> list[Instance]:
        count = self.simulation.cluster.instances
        return [self.simulation.scheme.build(replace(self.setup, instance=index)) for index in range(count)]

    def execute(self, horizon_s: float | None, check: bool) -> None:
        """Run to the end, to the horizon, or until the verdict is certain."""
        self.driver.start(self)
        stops = [self.watch.certain] if self.watch is not None else []
        if horizon_s is not None:
            self.ledger.expected, self.ledger.drained = len(self.load), self.env.event()
            stops += [self.env.timeout(horizon_s), self.ledger.drained]
        until = self.env.any_of(stops) if stops else None
        collecting = gc.isenabled()
        gc.disable()  # a run makes no cyclic garbage, and a collection walks every request
        try:
            if check:
                self._checked_run(until)
            else:
                self.env.run(until)
        except RuntimeError as error:
            if until is None or "No scheduled events left" not in str(error):
                raise
        finally:
            if collecting:
                gc.enable()
        self.ledger.cut(self.env.now)

    def _checked_run(self, until: simpy.Event | None) -> None:
        while self.env.peek() != float("inf") and not (until is not None and until.processed):
            self.env.step()
            self.audit()

    def audit(self) -> None:
        """Nothing is lost: requests by status, and the blocks of every pool."""
        ledger = self.ledger
        states = [request.state for request in ledger.requests]
        completed, rejected = states.count(RequestState.COMPLETED), states.count(RequestState.REJECTED)
        unfinished = len(states) - completed - rejected
        assert ledger.completed == completed
        assert ledger.rejected == rejected
        assert ledger.injected == ledger.completed + ledger.rejected + unfinished
        outstanding = sum(instance.outstanding_requests for instance in self.instances)
        assert unfinished == self._at_frontend + outstanding
        for instance in self.instances:
            instance.audit()

    def inject(self, row: int, arrival_s: float) -> None:
        """Let the request of a row arrive, at the present simulated time."""
        s = self.simulation
        prompt = self._prompt[row]
        request = Request(row, arrival_s, prompt, s.slo.ttft_limit_s(prompt), self._blocks[row] if self._blocks else ())
        self.ledger.inject(request)
        if s.latency.frontend_s > 0.0:
            self._at_frontend += 1
            passed = self.env.timeout(s.latency.frontend_s)
            assert passed.callbacks is not None
            passed.callbacks.append(lambda _: self._enter(request))
        else:
            self._admit(request)

    def _enter(self, request: Request) -> None:
        self._at_frontend -= 1
        self._admit(request)

    def _admit(self, request: Request) -> None:
        limit, prompt = self.simulation.model.max_context_tokens, request.prompt_tokens
        output = self.output_tokens[request.id]
        if limit is not None and prompt + output > limit:
            self.ledger.reject(request, "context_limit", self.env.now)
            return
        target = self.instances[0]
        if len(self.instances) > 1:
            target = self.instances[self._router.choose(request, self.instances)]
        reason = target.refusal(prompt, output)
        if reason:
            self.ledger.reject(request, reason, self.env.now)
        else:
            target.submit(request)

    def close(self) -> None:
        """Let go of what the result does not need."""
        if self.live is not None:
            self.live.close()
        self.ledger.forget()
        for instance in self.instances:
            instance.close()

    # Outcome

    def result(self) -> Result:
        """The result so far; in a probe, with its verdict."""
        replayed = self._replayed()
        requests, outcome = summary.requests_table(replayed)
        data = summary.summarise(replayed, requests, outcome)
        if self.live is not None:
            data["live"] = dict(self.live.report())
        verdict = self._verdict(outcome.attainment)
        return Result("simulate", data, requests, tuple(self.ledger.tracks), {}, verdict)

    def _replayed(self) -> summary.Replayed:
        s = self.simulation
        arrival_s = np.array([request.arrival_s for request in self.ledger.requests], np.float64)
        counted_s = s.window.span_of(self.load, arrival_s)
        return summary.Replayed(
            s.scheme, self.setup, self.load, self.instances, counted_s, self.watch is not None, s.config
        )

    def _verdict(self, attainment: float) -> Verdict:
        target = self.simulation.slo.attainment
        if (self.watch is not None and self.ledger.injected < len(self.load)) or self._undecided():
            assert self.watch is not None
            low, high = self.watch.bounds()
            return Verdict(low >= target, low, high, True)
        return Verdict(attainment >= target, attainment, attainment, False)

    def _undecided(self) -> bool:
        ledger = self.ledger
        return self.watch is not None and ledger.completed + ledger.rejected < ledger.injected


def _block_ids(simulation: Simulation, load: Load) -> list[tuple[int, ...]]:
    if not simulation.kv.prefix_cache or not load.trace.block_tokens:
        return []
    return [tuple(ids or ()) for ids in chained_ids(load.trace.table["block_ids"]).to_pylist()]
