"""Runs the simulations of a goodput search in the process that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from analysis.identity import Identifier
from analysis.search.goodput import Probe, Refusal
from confsim import api
from confsim.errors import InputError
from confsim.outcome.result import Result
from confsim.run.engine import Simulation
from confsim.setup.cache import cached_json
from confsim.setup.provenance import digest
from traces.arrivals import Poisson
from traces.trace import Trace

SLO_TIMES = ("ttft_s", "ttft_per_token_s", "tbt_s")
WINDOW_TIMES = ("warmup_s", "cooldown_s")
ZERO_LOAD_RATE = 1e-5  # req/s: requests almost never meet


@dataclass(frozen=True)
class CaseRun:
    """What to run of a case (by its number).

    `kind` is `probe` (ends when the verdict is certain), `full` (to the end; written to `folder` if given) or `zero`
    (`requests` of the trace, each alone).
    """

    case: int
    kind: str
    rate: float = 0.0
    folder: str | None = None
    requests: int = 0
    latency_factor: float = 1.0
    may_refuse: bool = False


@dataclass(frozen=True)
class FullRun:
    """A run to the end: its point on the curve, `Result.summary`, and how many of the trace's requests it was of."""

    probe: Probe
    summary: dict[str, Any]
    requests: int
    of: int


class CaseRunner:
    """Runs cases (resolved configurations), each on its own trace or all on the one that is given.

    Keeps each trace and each simulation it has built, so that a further probe costs only its run. `compiled` are
    latency tables that all cases share.
    """

    def __init__(
        self, cases: Sequence[dict[str, Any]], trace: Trace | None = None, compiled: dict[Any, Any] | None = None
    ) -> None:
        self._cases = list(cases)
        self._given = trace
        self._compiled = compiled
        self._traces: dict[str, Trace] = {}
        self._simulations: dict[tuple[int, float], Simulation] = {}
        self._identities: dict[int, str] = {}

    def __call__(self, run: CaseRun) -> Probe | FullRun | Refusal:
        """A `Probe` or a `FullRun`, by the kind of the run; or a `Refusal` where the run allows one.

        Outcomes come from the disk cache where the same run was made before: a killed search goes on like that.

        Raises:
            InputError: for a user's mistake in the case.
        """
        try:
            if run.folder is not None or self._given is not None or not self._cases[run.case].get("cache", True):
                return self._outcome(run)
            parts = [self._identity(run.case), run.kind, run.rate, run.latency_factor, run.requests]
            return _read(cached_json("probes", parts, lambda: _plain(self._outcome(run))))
        except InputError as error:
            if not run.may_refuse:
                raise
            return Refusal(str(error))

    def _identity(self, case: int) -> str:
        if case not in self._identities:
            self._identities[case] = Identifier()("goodput", self._cases[case]).id
        return self._identities[case]

    def _outcome(self, run: CaseRun) -> Probe | FullRun:
        rate, key = run.rate * run.latency_factor, (run.case, run.latency_factor)
        if run.kind == "probe":
            if key not in self._simulations:
                self._simulations[key] = self._build(*key)
            return _probe(run.rate, self._simulations[key].run(rate=rate, probe=True))
        simulation = self._build(*key)  # a new one: its counters are in the result
        everything = len(simulation.trace)
        if run.kind == "zero":
            rate = ZERO_LOAD_RATE
            simulation = replace(simulation, trace=sample_by_length(simulation.trace, run.requests), arrivals=Poisson())
        result = simulation.run(rate=rate)
        if run.folder is not None:
            result.write(Path(run.folder))
        attainment = float(result.summary["attainment"])
        passed = attainment >= float(self._cases[run.case]["slo"]["attainment"])
        probe = Probe(run.rate, passed, attainment, attainment, False, _missed(result))
        return FullRun(probe, result.summary, len(simulation.trace), everything)

    def _build(self, case: int, factor: float) -> Simulation:
        trace = self._trace(self._cases[case]) if self._given is None else self._given
        simulation = api.build(OmegaConf.create(scaled(self._cases[case], factor)), trace)
        return simulation if self._compiled is None else replace(simulation, compiled=self._compiled)

    def _trace(self, config: dict[str, Any]) -> Trace:
        key = digest([config["trace"], config["seed"], config["kv"]])
        if key not in self._traces:
            self._traces[key] = api.load_trace(OmegaConf.create(config))
        return self._traces[key]


def point_of(outcome: Probe | FullRun | Refusal) -> Probe | Refusal:
    """What an outcome says of its rate."""
    return outcome.probe if isinstance(outcome, FullRun) else outcome


def _probe(rate: float, result: Result) -> Probe:
    verdict = result.verdict
    assert verdict is not None  # of a probe there is one
    low, high = float(verdict.attainment_low), float(verdict.attainment_high)
    return Probe(rate, bool(verdict.passed), low, high, bool(verdict.decided_early), _missed(result))


def _missed(result: Result) -> dict[str, int]:
    return {reason: int(count) for reason, count in result.summary["missed_by"].items() if count}


def _plain(outcome: Probe | FullRun) -> dict[str, Any]:
    """An outcome as plain JSON data."""
    return outcome.to_json() if isinstance(outcome, Probe) else {**vars(outcome), "probe": outcome.probe.to_json()}


def _read(data: dict[str, Any]) -> Probe | FullRun:
    """The outcome that `_plain` was made of."""
    return FullRun(**{**data, "probe": Probe(**data["probe"])}) if "probe" in data else Probe(**data)


def scaled(case: dict[str, Any], factor: float) -> dict[str, Any]:
    """The case with every time that is not a latency divided by `factor`; its rate is the caller's to multiply."""
    if factor == 1.0:
        return case
    slo = {**case["slo"], **{key: case["slo"][key] / factor for key in SLO_TIMES if key in case["slo"]}}
    return {**case, "slo": slo, **{key: case[key] / factor for key in WINDOW_TIMES if case.get(key)}}


def sample_by_length(trace: Trace, count: int) -> Trace:
    """At most `count` requests at equal steps through the prompt lengths, in arrival order."""
    if count >= len(trace):
        return trace
    order = np.argsort(trace.table["prompt_tokens"].to_numpy(), kind="stable")
    picks = order[np.floor((np.arange(count) + 0.5) * len(trace) / count).astype(np.int64)]
    return Trace(trace.table.take(np.sort(picks)), trace.block_tokens, trace.provenance)
