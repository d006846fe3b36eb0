"""Goodput of several schemes on one load: runs their searches side by side and writes `goodput.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from analysis.search.cases import SchemeCase, scheme_cases
from analysis.search.goodput import Probe, Search, SearchSettings, Task, curve_warnings
from analysis.search.old_pool import Pool
from analysis.search.runner import FullRun, Job, Refusal, ZeroLoad
from confsim.errors import InputError
from confsim.outcome.result import write_json
from confsim.setup.provenance import provenance

STATISTICS = ("ttft_s", "gap_s", "max_gap_s", "tpot_s", "e2e_s")
DESCRIPTION = (
    "synthetic",
    "model",
    "gpu",
    "cluster",
    "slo",
    "policy",
)  # of a summary, the same for every scheme
FILE = "goodput.json"
BAND = {"low": 1, "high": -1}  # goodput with latencies longer, and shorter, by the model's error
SHORT_SPAN = 20  # TTFT limits; requests that arrive within fewer can wait out a queue that would grow for ever


class Listener(Protocol):
    """Is told what happens, in the order in which it happens."""

    def started(self, scheme: str, tasks: int) -> None:
        """A round of so many runs was handed out."""

    def probed(self, scheme: str, values: dict[str, Any], probe: Probe) -> None:
        """A rate was tried; `values` are those of the candidate."""

    def finished(self, scheme: str, goodput: float) -> None:
        """A scheme's goodput is known."""


class Silent:
    """A listener that says nothing."""

    def started(self, scheme: str, tasks: int) -> None:
        """Say nothing."""

    def probed(self, scheme: str, values: dict[str, Any], probe: Probe) -> None:
        """Say nothing."""

    def finished(self, scheme: str, goodput: float) -> None:
        """Say nothing."""


@dataclass(eq=False)
class _State:
    """Progress of one scheme. `first` is the number of its first candidate among all cases of the pool.

    `band` holds the searches with every latency longer (`low`) and shorter (`high`) by the error of the model.
    """

    case: SchemeCase
    search: Search
    first: int
    zero: ZeroLoad | None = None
    full: FullRun | None = None
    ended: bool = False  # the search is over; the runs after it may not be
    band: dict[str, _Lane] = field(default_factory=dict)


@dataclass(eq=False)
class _Lane:
    """One search of a scheme: what its current round still waits for, and what has come back of it."""

    state: _State
    search: Search
    first: int
    factor: float = 1.0
    open: int = 0
    arrived: dict[Task, Probe | Refusal] = field(default_factory=dict)
    done: bool = False

    def take_round(self) -> None:
        """Add what a round brought; in which order it came does not matter."""
        for task, outcome in self.arrived.items():
            if isinstance(outcome, Refusal):
                self.search.refuse(task, outcome.reason)
            else:
                self.search.add(task, outcome)
        self.arrived.clear()

    def values(self, task: Task) -> dict[str, Any]:
        """What distinguishes the simulations of a task."""
        slower = {"latency": f"{self.factor - 1:+.1%}"} if self.factor != 1.0 else {}
        return {**self.search.candidates[task.candidate].values, **slower}


def compare(cfg: DictConfig, folder: Path, listener: Listener | None = None) -> dict[str, Any]:
    """Search the goodput of `cfg.schemes` and return the content of `goodput.json`, which is written to `folder`.

    The full run at each scheme's goodput is written to `folder/SCHEME`. Nothing in the result depends on wall clock
    or on the number of workers.

    Raises:
        InputError: for a user's mistake in the configuration.
    """
    listener = listener or Silent()
    settings = search_settings(cfg)
    if not isinstance(cfg.goodput.workers, int) or cfg.goodput.workers < 1:
        raise InputError(f"goodput.workers={cfg.goodput.workers}: use 1 or more processes")
    states = _states(scheme_cases(cfg), settings)
    cases = [config for state in states for config in state.case.configs]
    with Pool(cases, cfg.goodput.workers) as pool:
        race = _Race(pool, folder, listener, settings, bool(cfg.goodput.band), int(cfg.goodput.zero_load_requests))
        for state in states:
            race.advance(_Lane(state, state.search, state.first))
        for (state, lane, task), outcome in pool.outcomes():
            race.take(state, lane, task, outcome)
    result = _content(cfg, states, settings)
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


def _states(cases: Sequence[SchemeCase], settings: SearchSettings) -> list[_State]:
    states: list[_State] = []
    first = 0
    for case in cases:
        states.append(_State(case, Search(case.candidates, settings), first))
        first += len(case.configs)
    return states


@dataclass
class _Race:
    """Moves the searches on as outcomes arrive: search, then zero load and the goodput in full, then the band."""

    pool: Pool
    folder: Path
    listener: Listener
    settings: SearchSettings
    wants_band: bool
    zero_load_requests: int

    def advance(self, lane: _Lane) -> None:
        """Hand out the next round of a search, or what follows it."""
        tasks = lane.search.round()
        for task in tasks:
            kind = "full" if task.full else "probe"
            one_of_many = len(lane.search.candidates) > 1
            number = lane.first + task.candidate
            job = Job(number, kind, task.rate, latency_factor=lane.factor, may_refuse=one_of_many)
            self.pool.submit((lane.state, lane, task), job)
        lane.open = len(tasks)
        if tasks:
            self.listener.started(lane.state.case.name, len(tasks))
        elif lane.factor == 1.0:
            self._run_in_full(lane.state)
        else:
            lane.done = True
            self._finish(lane.state)

    def take(self, state: _State, lane: _Lane | None, task: Task | None, outcome: Any) -> None:
        """Take an outcome; the probes of a round count only when all are there."""
        if isinstance(outcome, ZeroLoad):
            state.zero = outcome
            self._finish(state)
        elif lane is None or task is None:
            self._take_full(state, outcome)
        else:
            point = outcome.probe if isinstance(outcome, FullRun) else outcome
            if isinstance(point, Probe):
                self.listener.probed(state.case.name, lane.values(task), point)
            lane.arrived[task] = point
            lane.open -= 1
            if lane.open == 0:
                lane.take_round()
                self.advance(lane)

    def _run_in_full(self, state: _State) -> None:
        search = state.search
        if not search.runnable:
            raise InputError(f"{state.case.name}: {search.candidates[0].refused}")
        state.ended = True
        case, goodput = state.first + search.best, search.curve.goodput
        self.pool.submit((state, None, None), Job(case, "zero", requests=self.zero_load_requests))
        if goodput:
            self.listener.started(state.case.name, 1)
            self.pool.submit((state, None, None), Job(case, "full", goodput, folder=str(self.folder / state.case.name)))

    def _take_full(self, state: _State, outcome: FullRun) -> None:
        state.full = outcome
        self.listener.probed(state.case.name, state.case.candidates[state.search.best], outcome.probe)
        if outcome.probe.passed:  # exact, where the probe had bounds
            state.search.add(Task(state.search.best, outcome.probe.rate), outcome.probe)
        error = latency_error(outcome.summary) if self.wants_band else 0.0
        if error:
            state.band = {name: self._band_lane(state, 1 + sign * error, error) for name, sign in BAND.items()}
            for lane in state.band.values():
                self.advance(lane)
        self._finish(state)

    def _band_lane(self, state: _State, factor: float, error: float) -> _Lane:
        """A search around where the goodput ought to be if latencies were `factor` times the model's."""
        expected = state.search.curve.goodput / factor
        start = min(max(expected, self.settings.min_rate), self.settings.max_rate)
        settings = replace(self.settings, start_rate=start, step=1 + error, curve=())
        return _Lane(state, Search([], settings), state.first + state.search.best, factor)

    def _finish(self, state: _State) -> None:
        goodput = state.search.curve.goodput
        complete = state.ended and state.zero and (state.full or not goodput)
        if complete and all(lane.done for lane in state.band.values()):
            self.listener.finished(state.case.name, goodput)


def latency_error(summary: dict[str, Any]) -> float:
    """The largest mean held-out error of a component of the latency model, as a share; 0 where none is known."""
    errors = summary["provenance"].get("latency", {}).get("errors", {})
    means = [part["held_out"]["mean_pct"] for part in errors.values() if "held_out" in part]
    return max(means, default=0.0) / 100


# --- the result ------------------------------------------------------------------------------------------------------


def _content(cfg: DictConfig, states: Sequence[_State], settings: SearchSettings) -> dict[str, Any]:
    summaries = [_summary(state) for state in states]
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    own = provenance({str(key): value for key, value in config.items()}, int(cfg.seed))
    shared = summaries[0].get("provenance", {})
    own |= {key: shared[key] for key in ("profile_hash", "trace") if key in shared}
    return {
        "kind": "goodput",
        "label": _label(summaries[0]),
        **{key: summaries[0].get(key) for key in DESCRIPTION},
        "target": float(cfg.slo.attainment),
        "tolerance": settings.tolerance,
        "schemes": {state.case.name: _scheme(state, settings, float(cfg.slo.attainment)) for state in states},
        "provenance": own,
    }


def _label(summary: dict[str, Any]) -> str:
    """Trace and arrival mode, without the rate of the run that the summary is of."""
    origin = summary["provenance"]
    trace = origin["trace"].get("label") or origin["trace"].get("name") or "trace"
    return f"{trace}, arrivals {origin['arrivals'].get('mode', 'unknown')}"


def _summary(state: _State) -> dict[str, Any]:
    if state.full is not None:
        return state.full.summary
    assert state.zero is not None
    return state.zero.summary


def _scheme(state: _State, settings: SearchSettings, target: float) -> dict[str, Any]:
    assert state.zero is not None
    curve, summary = state.search.curve, _summary(state)
    at_goodput = summary if state.full is not None else None
    return {
        "goodput": curve.goodput,
        "goodput_per_gpu": curve.goodput / state.case.gpus,
        "gpus": state.case.gpus,
        "attainment": at_goodput["attainment"] if at_goodput else None,
        **{key: at_goodput.get(key) if at_goodput else None for key in STATISTICS},
        "utilisation": at_goodput.get("utilisation") if at_goodput else None,
        "zero_load": state.zero.to_json(),
        "structural": curve.goodput == 0 and state.zero.attainment < target,
        "band": _band(state),
        "chosen": state.case.candidates[state.search.best],
        "probes": [probe.to_json() for probe in curve.probes],
        "candidates": [
            {
                "values": candidate.values,
                "goodput": candidate.curve.goodput,
                "refused": candidate.refused or None,
                "probes": [probe.to_json() for probe in candidate.curve.probes],
            }
            for candidate in state.search.candidates
            if len(state.search.candidates) > 1
        ],
        "warnings": _warnings(state, settings, target, summary),
        "folder": state.case.name if at_goodput else None,
        "config": state.case.configs[state.search.best]["scheme"],
        "kv": summary.get("kv"),
    }


def _band(state: _State) -> dict[str, Any] | None:
    """Goodput if every latency were longer, or shorter, by the model's error; None where that is unknown."""
    if not state.band:
        return None
    found: dict[str, Any] = {"latency_error": abs(state.band["low"].factor - 1)}
    for name, lane in state.band.items():
        curve = lane.search.curve
        probes = [probe.to_json() for probe in curve.probes]
        found[name] = {"latency_factor": lane.factor, "goodput": curve.goodput, "probes": probes}
    return found


def _warnings(state: _State, settings: SearchSettings, target: float, summary: dict[str, Any]) -> list[str]:
    assert state.zero is not None
    curve = state.search.curve
    found = curve_warnings(curve, settings)
    zero = state.zero
    if zero.attainment < target:
        cause = "goodput 0 is structural, no rate can meet it" if curve.goodput == 0 else "lighter load cannot help"
        found.append(
            f"zero-load attainment is {zero.attainment:.1%} ({zero.requests} of {zero.of} requests, each alone), "
            f"below the target of {target:.0%}: {cause}"
        )
    span_s = summary["requests"]["injected"] / curve.goodput if curve.goodput else None
    if span_s is not None and span_s < SHORT_SPAN * summary["slo"]["ttft_s"]:
        found.append(
            f"at the goodput all {summary['requests']['injected']} requests arrive within {span_s:.3g} s: "
            "a burst rather than a steady load, use a longer trace"
        )
    if state.full is not None and not state.full.probe.passed:
        found.append(
            f"the full run at the goodput attains {state.full.probe.attainment_low:.2%}, "
            f"below the target of {target:.0%}, although the probe passed"
        )
    own_label = str(summary.get("label"))  # "the trace is synthetic" is said once, in the label of the whole search
    return found + [line for line in summary.get("warnings", []) if own_label not in line]
