"""Goodput of several schemes on one load: runs their searches side by side and writes `goodput.json`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from analysis.search.cases import SchemeCase, scheme_cases
from analysis.search.goodput import (
    Candidates,
    Curve,
    Probe,
    Refusal,
    SearchSettings,
    Trial,
    curve_warnings,
    search,
)
from analysis.search.pool import Pool, worker_count
from analysis.search.runner import CaseRun, CaseRunner, FullRun, point_of
from confsim.errors import InputError
from confsim.outcome.result import write_json
from confsim.setup.provenance import provenance

STATISTICS = ("ttft_s", "gap_s", "max_gap_s", "tpot_s", "e2e_s")
DESCRIPTION = ("synthetic", "model", "gpu", "cluster", "slo", "policy")  # of a summary, the same for every scheme
FILE = "goodput.json"
BAND = {"low": 1, "high": -1}  # goodput with latencies longer, and shorter, by the model's error
SHORT_SPAN = 20  # TTFT limits; requests that arrive within fewer can wait out a queue that would grow for ever


class Listener:
    """Is told what happens, in the order in which it happens; this one says nothing."""

    def started(self, scheme: str, tasks: int) -> None:
        """A round of so many runs was handed out."""

    def probed(self, scheme: str, values: dict[str, Any], probe: Probe) -> None:
        """A rate was tried; `values` are those of the candidate."""

    def finished(self, scheme: str, goodput: float) -> None:
        """A scheme's goodput is known."""


def compare(cfg: DictConfig, folder: Path, listener: Listener | None = None) -> dict[str, Any]:
    """Search the goodput of `cfg.schemes` and return the content of `goodput.json`, which is written to `folder`.

    The full run at each scheme's goodput is written to `folder/SCHEME`. Nothing in the result depends on wall clock
    or on the number of workers.

    Raises:
        InputError: for a user's mistake in the configuration.
    """
    settings = search_settings(cfg)
    workers = worker_count("goodput.workers", cfg.goodput.workers)
    cases = scheme_cases(cfg)
    configs = [config for case in cases for config in case.configs]
    firsts = [sum(len(case.configs) for case in cases[:number]) for number in range(len(cases))]
    wishes = (folder, int(cfg.goodput.zero_load_requests), bool(cfg.goodput.band))
    telling = threading.Lock()
    with Pool(CaseRunner(configs), workers) as pool:
        searches = [
            _SchemeSearch(case, first, pool, settings, listener or Listener(), telling)
            for case, first in zip(cases, firsts, strict=True)
        ]
        found = pool.together(*(partial(own.run, *wishes) for own in searches))
    result = _content(cfg, found, settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, result)
    return result


def search_settings(cfg: DictConfig) -> SearchSettings:
    """The numbers of the search.

    Raises:
        InputError: if they make no search.
    """
    own = cfg.goodput
    try:
        tolerance, least, most, start = (float(own[key]) for key in ("tolerance", "min_rate", "max_rate", "start_rate"))
        probes, curve = int(own.probes_per_round), tuple(float(share) for share in own.curve or ())
    except (TypeError, ValueError) as error:
        raise InputError(f"goodput: {error}") from error
    if not start > 0:
        raise InputError(f"goodput.start_rate={own.start_rate}: use a rate above 0")
    return SearchSettings(tolerance, least, most, min(max(start, least), most), probes, curve)


@dataclass(frozen=True)
class _Goodput:
    """What was found out about a scheme.

    `full` is the run at the goodput (None where that is 0), `zero` the one without load. `band` has the curve for every
    latency longer (`low`) and shorter (`high`) by the error of the model, each with its factor.
    """

    case: SchemeCase
    candidates: Candidates
    zero: FullRun
    full: FullRun | None
    band: dict[str, tuple[float, Curve]]

    @property
    def summary(self) -> dict[str, Any]:
        """That of the run at the goodput, or of the run without load."""
        return (self.full or self.zero).summary


@dataclass(frozen=True)
class _SchemeSearch:
    """The search of one scheme; `first` is the number of its first candidate among all cases of the pool."""

    case: SchemeCase
    first: int
    pool: Pool
    settings: SearchSettings
    listener: Listener
    telling: threading.Lock  # searches run side by side; the listener hears of one thing at a time

    def run(self, folder: Path, zero_load_requests: int, wants_band: bool) -> _Goodput:
        """Search, then run without load and at the goodput in full, then search again for the band.

        Raises:
            InputError: if no candidate can run.
        """
        found = search(partial(self._probe, self.first, self.case.candidates, 1.0), self.settings, self.case.candidates)
        if not found.runnable:
            raise InputError(f"{self.case.name}: {found.each[0].refused}")
        goodput, best = found.curve.goodput, self.first + found.best
        zero = self.pool.submit(CaseRun(best, "zero", requests=zero_load_requests))
        full, error = None, 0.0
        if goodput:
            full = self._full(found, CaseRun(best, "full", goodput, folder=str(folder / self.case.name)))
            error = latency_error(full.summary) if wants_band else 0.0
        factors = {name: 1 + sign * error for name, sign in BAND.items() if error}
        curves = self.pool.together(*(partial(self._band, best, goodput, f, error) for f in factors.values()))
        band = {name: (factors[name], curve) for name, curve in zip(factors, curves, strict=True)}
        result = _Goodput(self.case, found, zero.result(), full, band)
        with self.telling:
            self.listener.finished(self.case.name, found.curve.goodput)
        return result

    def _full(self, found: Candidates, run: CaseRun) -> FullRun:
        """The run at the goodput, whose exact point takes the place of the probe with bounds."""
        with self.telling:
            self.listener.started(self.case.name, 1)
        full: FullRun = self.pool.submit(run).result()
        with self.telling:
            self.listener.probed(self.case.name, found.each[found.best].values, full.probe)
        if full.probe.passed:
            found.curve.add(full.probe)
        return full

    def _band(self, case: int, goodput: float, factor: float, error: float) -> Curve:
        """The curve if latencies were `factor` times the model's; the goodput ought to be where times scale it to."""
        values = ({"latency": f"{factor - 1:+.1%}"},)
        return search(
            partial(self._probe, case, values, factor), self.settings.around(goodput / factor, 1 + error)
        ).curve

    def _probe(
        self, first: int, values: Sequence[dict[str, Any]], factor: float, trials: Sequence[Trial]
    ) -> list[Probe | Refusal]:
        """The outcomes of a round; case `first` is the first candidate's. What a user did wrong is raised."""
        with self.telling:
            self.listener.started(self.case.name, len(trials))
        jobs = {trial: (self._run_of(trial, first, factor, len(values) > 1),) for trial in trials}
        outcomes: dict[Trial, Probe | Refusal] = {}
        for trial, outcome in self.pool.completed(jobs):
            outcomes[trial] = point = point_of(outcome)
            if isinstance(point, Probe):
                with self.telling:
                    self.listener.probed(self.case.name, values[trial.candidate], point)
        return [outcomes[trial] for trial in trials]

    def _run_of(self, trial: Trial, first: int, factor: float, may_refuse: bool) -> CaseRun:
        kind = "full" if trial.full else "probe"
        return CaseRun(first + trial.candidate, kind, trial.rate, latency_factor=factor, may_refuse=may_refuse)


def latency_error(summary: dict[str, Any]) -> float:
    """The largest mean held-out error of a component of the latency model, as a share; 0 where none is known."""
    errors = summary["provenance"].get("latency", {}).get("errors", {})
    means = [part["held_out"]["mean_pct"] for part in errors.values() if "held_out" in part]
    return max(means, default=0.0) / 100


# --- the result ------------------------------------------------------------------------------------------------------


def _content(cfg: DictConfig, found: Sequence[_Goodput], settings: SearchSettings) -> dict[str, Any]:
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    own = provenance({str(key): value for key, value in config.items()}, int(cfg.seed))
    first, target = found[0].summary, float(cfg.slo.attainment)
    shared = first.get("provenance", {})
    own |= {key: shared[key] for key in ("profile_hash", "trace") if key in shared}
    return {
        "kind": "goodput",
        "label": _label(first),
        **{key: first.get(key) for key in DESCRIPTION},
        "target": target,
        "tolerance": settings.tolerance,
        "schemes": {one.case.name: _scheme(one, settings, target) for one in found},
        "provenance": own,
    }


def _label(summary: dict[str, Any]) -> str:
    """Trace and arrival mode, without the rate of the run that the summary is of."""
    origin = summary["provenance"]
    trace = origin["trace"].get("label") or origin["trace"].get("name") or "trace"
    return f"{trace}, arrivals {origin['arrivals'].get('mode', 'unknown')}"


def _scheme(found: _Goodput, settings: SearchSettings, target: float) -> dict[str, Any]:
    case, candidates, zero = found.case, found.candidates, found.zero
    goodput, best = candidates.curve.goodput, candidates.best
    loaded = found.full.summary if found.full is not None else {}
    return {
        "goodput": goodput,
        "goodput_per_gpu": goodput / case.gpus,
        "gpus": case.gpus,
        **{key: loaded.get(key) for key in ("attainment", *STATISTICS, "utilisation")},
        "zero_load": {"attainment": zero.probe.attainment_low, "requests": zero.requests, "of": zero.of},
        "structural": goodput == 0 and not zero.probe.passed,
        "band": _band(found),
        "chosen": case.candidates[best],
        "probes": _probes(candidates.curve),
        "candidates": [
            {
                "values": candidate.values,
                "goodput": candidate.curve.goodput,
                "refused": candidate.refused or None,
                "probes": _probes(candidate.curve),
            }
            for candidate in candidates.each
            if len(candidates.each) > 1
        ],
        "warnings": _warnings(found, settings, target),
        "folder": case.name if loaded else None,
        "config": case.configs[best]["scheme"],
        "kv": found.summary.get("kv"),
    }


def _probes(curve: Curve) -> list[dict[str, Any]]:
    return [probe.to_json() for probe in curve.probes]


def _band(found: _Goodput) -> dict[str, Any] | None:
    """Goodput if every latency were longer, or shorter, by the model's error; None where that is unknown."""
    if not found.band:
        return None
    sides = {
        name: {"latency_factor": factor, "goodput": curve.goodput, "probes": _probes(curve)}
        for name, (factor, curve) in found.band.items()
    }
    return {"latency_error": abs(found.band["low"][0] - 1), **sides}


def _warnings(found: _Goodput, settings: SearchSettings, target: float) -> list[str]:
    curve, summary, zero = found.candidates.curve, found.summary, found.zero
    lines = curve_warnings(curve, settings)
    if not zero.probe.passed:
        cause = "goodput 0 is structural, no rate can meet it" if curve.goodput == 0 else "lighter load cannot help"
        lines.append(
            f"zero-load attainment is {zero.probe.attainment_low:.1%} ({zero.requests} of {zero.of} requests, each "
            f"alone), below the target of {target:.0%}: {cause}"
        )
    injected = summary["requests"]["injected"]
    span_s = injected / curve.goodput if curve.goodput else None
    if span_s is not None and span_s < SHORT_SPAN * summary["slo"]["ttft_s"]:
        lines.append(
            f"at the goodput all {injected} requests arrive within {span_s:.3g} s: "
            "a burst rather than a steady load, use a longer trace"
        )
    if found.full is not None and not found.full.probe.passed:
        lines.append(
            f"the full run at the goodput attains {found.full.probe.attainment_low:.2%}, "
            f"below the target of {target:.0%}, although the probe passed"
        )
    own_label = str(summary.get("label"))  # "the trace is synthetic" is said once, in the label of the whole search
    return lines + [line for line in summary.get("warnings", []) if own_label not in line]
