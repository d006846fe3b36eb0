"""Runs the simulations of a goodput search in the process that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.identity import Identifier
from analysis.search.goodput import Probe
from confsim.errors import InputError
from confsim.setup.cache import cached_json
from confsim.setup.provenance import digest
from traces.trace import Trace

SLO_TIMES = ("ttft_s", "ttft_per_token_s", "tbt_s")
WINDOW_TIMES = ("warmup_s", "cooldown_s")
ZERO_LOAD_RATE = 1e-5  # req/s: requests almost never meet


@dataclass(frozen=True)
class Job:
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
class Refusal:
    """Outcome of a case that cannot run, where that is no mistake of the user's: one of several candidates."""

    reason: str


@dataclass(frozen=True)
class FullRun:
    """Outcome of a full run: its point on the curve, and `Result.summary`."""

    probe: Probe
    summary: dict[str, Any]


@dataclass(frozen=True)
class ZeroLoad:
    """Share of `requests` (of `of` in the trace) that keep the SLO with nobody else there; `summary` of that run."""

    attainment: float
    requests: int
    of: int
    summary: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"attainment": self.attainment, "requests": self.requests, "of": self.of}


class Runner:
    """Keeps each trace and each simulation it has built, so that a further probe costs only its run."""

    def __init__(self, cases: Sequence[dict[str, Any]]) -> None:
        self._cases = list(cases)
        self._traces: dict[str, Trace] = {}
        self._simulations: dict[tuple[int, float], Any] = {}
        self._identities: dict[int, str] = {}

    def __call__(self, job: Job) -> Any:
        """A `Probe`, `FullRun` or `ZeroLoad`, by the kind of the job; or a `Refusal` where the job allows one.

        Raises:
            InputError: for a user's mistake in the case.
        """
        try:
            return self._run(job)
        except InputError as error:
            if not job.may_refuse:
                raise
            return Refusal(str(error))

    def _run(self, job: Job) -> Any:
        """The outcome, from the disk cache where the same run was made before (a killed search goes on like that)."""
        if job.folder is not None or not self._cases[job.case].get("cache", True):
            return self._fresh(job)
        parts = [self._identity(job.case), job.kind, job.rate, job.latency_factor, job.requests]
        return _outcome(cached_json("probes", parts, lambda: _plain(self._fresh(job))))

    def _identity(self, case: int) -> str:
        if case not in self._identities:
            self._identities[case] = Identifier()("goodput", self._cases[case]).id
        return self._identities[case]

    def _fresh(self, job: Job) -> Any:
        if job.kind == "zero":
            return self._zero_load(job)
        rate = job.rate * job.latency_factor
        if job.kind == "probe":
            return self._probe(job, self._simulation(job.case, job.latency_factor).run(rate=rate, probe=True))
        result = self._build(job.case, job.latency_factor).run(rate=rate)  # a new one: its counters are in the result
        if job.folder is not None:
            result.write(Path(job.folder))
        return FullRun(self._probe(job, result), result.summary)

    def _simulation(self, case: int, factor: float) -> Any:
        if (case, factor) not in self._simulations:
            self._simulations[case, factor] = self._build(case, factor)
        return self._simulations[case, factor]

    def _build(self, case: int, factor: float) -> Any:
        from confsim import api

        return api.build(_config(scaled(self._cases[case], factor)), self._trace(case))

    def _trace(self, case: int) -> Trace:
        from confsim import api

        cfg = self._cases[case]
        key = digest([cfg["trace"], cfg["seed"], cfg["kv"]])
        if key not in self._traces:
            self._traces[key] = api.load_trace(_config(cfg))
        return self._traces[key]

    def _probe(self, job: Job, result: Any) -> Probe:
        missed = {reason: int(count) for reason, count in result.summary["missed_by"].items() if count}
        if job.kind == "probe":
            verdict = result.verdict
            low, high = float(verdict.attainment_low), float(verdict.attainment_high)
            return Probe(job.rate, bool(verdict.passed), low, high, bool(verdict.decided_early), missed)
        attainment = float(result.summary["attainment"])
        passed = attainment >= float(self._cases[job.case]["slo"]["attainment"])
        return Probe(job.rate, passed, attainment, attainment, False, missed)

    def _zero_load(self, job: Job) -> ZeroLoad:
        from confsim import api

        trace = self._trace(job.case)
        sample = sample_by_length(trace, job.requests)
        cfg = {**self._cases[job.case], "arrivals": _poisson()}
        result = api.build(_config(cfg), sample).run(rate=ZERO_LOAD_RATE)
        return ZeroLoad(float(result.summary["attainment"]), len(sample), len(trace), result.summary)


def _plain(outcome: Probe | FullRun | ZeroLoad) -> dict[str, Any]:
    """An outcome as plain JSON data."""
    if isinstance(outcome, Probe):
        return {"kind": "probe", "probe": outcome.to_json()}
    if isinstance(outcome, FullRun):
        return {"kind": "full", "probe": outcome.probe.to_json(), "summary": outcome.summary}
    return {"kind": "zero", **outcome.to_json(), "summary": outcome.summary}


def _outcome(data: dict[str, Any]) -> Probe | FullRun | ZeroLoad:
    """The outcome that `_plain` was made of."""
    if data["kind"] == "zero":
        return ZeroLoad(data["attainment"], data["requests"], data["of"], data["summary"])
    probe = Probe(**data["probe"])
    return probe if data["kind"] == "probe" else FullRun(probe, data["summary"])


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


def _config(case: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(case)


def _poisson() -> Any:
    from omegaconf import OmegaConf

    from confsim.setup.configuration import compose

    return OmegaConf.to_container(compose(["arrivals=poisson"]).arrivals, resolve=True)
