"""The summary and tables of a run, from its ledger."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from confsim.outcome import metrics
from confsim.outcome.result import REQUESTS
from confsim.run.ledger import Ledger
from confsim.run.request import Request, RequestState
from confsim.schemes.base import Instance, KvReport, Scheme, Setup
from confsim.setup import native
from confsim.setup.provenance import provenance
from traces.load import Load

ABSURD_SLO_FACTOR = 1000  # an SLO this many times the zero-load latency is probably in the wrong unit
LATE_SHARE = 0.5  # of the last quarter of the arrivals, past their TTFT limit: the load is more than can be served


@dataclass(frozen=True)
class Replayed:
    """A run that has ended, as it is summarised."""

    scheme: Scheme
    setup: Setup
    load: Load
    instances: list[Instance]
    counted_s: tuple[float, float]  # first and last arrival time that counts
    probe: bool  # ended once its verdict was certain
    config: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What was computed for every injected request, in order of injection."""

    latencies: metrics.Latencies
    attained: metrics.Bools
    reasons: list[str | None]
    counted: metrics.Bools  # inside the window

    @property
    def attainment(self) -> float:
        """Share of the requests in the window that attained."""
        return float(self.attained[self.counted].mean()) if self.counted.any() else 0.0


def requests_table(run: Replayed) -> tuple[pa.Table, Outcome]:
    """One row per request, by request id of the trace's row order."""
    ledger, slo = run.setup.ledger, run.setup.slo
    requests = ledger.requests
    arrival = _column(requests, "arrival_s")
    low, high = run.counted_s
    counted = (arrival >= low) & (arrival <= high)
    lat = metrics.latencies(ledger, slo, counted)
    good, reasons = metrics.attained(lat, requests, slo)
    outcome = Outcome(lat, good, reasons, counted)
    start = _column(requests, "prefill_start_s")
    queueing = np.where(start >= 0, start - arrival, np.nan)
    rows = [request.id for request in requests]
    trace = run.load.trace.table
    ended = {state: state.value for state in (RequestState.COMPLETED, RequestState.REJECTED)}
    columns: dict[str, Any] = {
        "request_id": trace["request_id"].to_numpy()[rows],
        "arrival_s": arrival,
        "prompt_tokens": trace["prompt_tokens"].to_numpy()[rows],
        "output_tokens": trace["output_tokens"].to_numpy()[rows],
        "instance": [request.instance for request in requests],
        "group": [request.group for request in requests],
        "status": [ended.get(request.state, "unfinished") for request in requests],
        "reason": [request.reason or None for request in requests],
        "queueing_s": queueing,
        "prefill_s": lat.ttft_s - queueing,
        "ttft_s": lat.ttft_s,
        "max_gap_s": lat.max_gap_s,
        "tpot_s": lat.tpot_s,
        "e2e_s": lat.finish_s - arrival,
        "first_token_s": lat.ttft_s + arrival,
        "finish_s": lat.finish_s,
        "emitted_tokens": lat.tokens,
        "preemptions": [request.preemptions for request in requests],
        "prefix_hit_tokens": [request.cached for request in requests],
        "recomputed_tokens": [request.recomputed_tokens for request in requests],
        "attained": good if slo.given else [None] * len(requests),
        "missed_by": reasons if slo.given else [None] * len(requests),
        "session": trace["session"].take(pa.array(rows, pa.int64())).combine_chunks(),
        "turn": trace["turn"].take(pa.array(rows, pa.int64())).combine_chunks(),
    }
    arrays = [_arrow(columns[field.name], field.type) for field in REQUESTS]
    return pa.Table.from_arrays(arrays, schema=REQUESTS), outcome


def _column(requests: list[Request], name: str) -> npt.NDArray[np.float64]:
    return np.array([getattr(request, name) for request in requests], np.float64)


def _arrow(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values.cast(kind)
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return pa.array(values, kind, from_pandas=True)  # nan is null
    return pa.array(values, kind)


def summarise(run: Replayed, requests: pa.Table, outcome: Outcome) -> dict[str, Any]:
    """`summary.json`: plain data, without wall-clock figures."""
    setup, load = run.setup, run.load
    ledger = setup.ledger
    report = run.scheme.kv_report(setup)
    counts = _counts(run, outcome)
    steps = sum(len(track.ends) for track in ledger.tracks)
    end_s = run.setup.env.now
    arrived = _column(ledger.requests, "arrival_s")
    out: dict[str, Any] = {
        "kind": "simulate",
        "scheme": run.scheme.name,
        "policy": setup.policy.label,
        "model": setup.model.name,
        "gpu": setup.gpu.name,
        "cluster": asdict(setup.cluster),
        "label": f"{load.trace.provenance.get('label', load.trace.provenance.get('name', 'trace'))}, {load.label}",
        "synthetic": bool(load.trace.provenance.get("synthetic", False)),
        "requests": counts,
        "rejected_by": _tally(request.reason for request in ledger.requests if request.reason),
        "attainment": outcome.attainment if setup.slo.given else None,
        "attained": bool(outcome.attainment >= setup.slo.attainment) if setup.slo.given else None,
        "missed_by": _missed_by(outcome) if setup.slo.given else {},
        "overloaded": _overloaded(run, arrived),
        **_statistics(outcome, arrived, requests),
        "offered_rate": _rate(arrived),
        "completed_rate": ledger.completed / end_s if end_s > 0 else None,
        "iterations": steps,
        "simulated_s": end_s,
        "utilisation": max(instance.utilised_s for instance in run.instances) / end_s if end_s > 0 else 0.0,
        "prefix_hit_tokens": sum(request.cached for request in ledger.requests),
        "recomputed_tokens": sum(request.recomputed_tokens for request in ledger.requests),
        "tokens": {
            "prompt": int(np.sum(requests["prompt_tokens"].to_numpy())),
            "emitted": int(outcome.latencies.tokens.sum()),
        },
        "kv": _kv(report, run),
        "slo": asdict(setup.slo) if setup.slo.given else None,
        "latency": {"extrapolated_queries": sum(m.extrapolations for m in run.setup.compiled.values())},
        **_counters(run),
    }
    if setup.cluster.instances > 1:
        out["instances"] = _instances(run, outcome)
    out["warnings"] = _warnings(run, out, report)
    described = setup.latency.describe(setup.model, setup.gpu)
    out["provenance"] = {
        **provenance(run.config, setup.seed),
        "profile_hash": described["profile_hash"],
        "latency": dict(described),
        "trace": load.trace.provenance,
        "arrivals": load.provenance,
    }
    return out


def _missed_by(outcome: Outcome) -> dict[str, int]:
    counted = [reason for reason, inside in zip(outcome.reasons, outcome.counted.tolist(), strict=True) if inside]
    return {reason: counted.count(reason) for reason in metrics.REASONS}


def _counts(run: Replayed, outcome: Outcome) -> dict[str, int]:
    ledger = run.setup.ledger
    return {
        "injected": ledger.injected,
        "completed": ledger.completed,
        "rejected": ledger.rejected,
        "unfinished": ledger.injected - ledger.completed - ledger.rejected,
        "preempted": sum(request.preemptions > 0 for request in ledger.requests),
        "preemptions": ledger.preemptions,
        "in_trace": len(run.load),
        "in_window": int(outcome.counted.sum()),
    }


def _statistics(outcome: Outcome, arrived: npt.NDArray[np.float64], requests: pa.Table) -> dict[str, Any]:
    """Percentiles over the window's arrivals: unfinished requests are infinite, rejected ones have none."""
    lat = outcome.latencies
    status = np.array(requests["status"].to_pylist(), object)
    inside = outcome.counted & (status != "rejected")
    unfinished = status == "unfinished"
    output = requests["output_tokens"].to_numpy()
    ttft = np.where(np.isnan(lat.ttft_s), np.inf, lat.ttft_s)[inside]
    several = inside & (output > 1)
    values: dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]] = {
        "ttft_s": (ttft, None),
        "gap_s": (lat.gaps_s, lat.gap_weights),
        "max_gap_s": (np.where(unfinished, np.inf, lat.max_gap_s)[several], None),
        "tpot_s": (np.where(unfinished, np.inf, lat.tpot_s)[several], None),
        "e2e_s": (np.where(unfinished, np.inf, lat.finish_s - arrived)[inside], None),
    }
    for part in ("queueing_s", "prefill_s"):
        column = requests[part].to_numpy()
        values[part] = (np.where(np.isnan(column), np.inf, column)[inside], None)
    out: dict[str, Any] = {name: metrics.statistics(*pair) for name, pair in values.items()}
    out["distributions"] = {name: metrics.curve(*values[name]) for name in ("ttft_s", "gap_s", "max_gap_s")}
    return out


def _rate(arrived: npt.NDArray[np.float64]) -> float | None:
    if len(arrived) < 2 or arrived.max() <= arrived.min():
        return None
    return float((len(arrived) - 1) / (arrived.max() - arrived.min()))


def _tally(words: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for word in words:
        out[word] = out.get(word, 0) + 1
    return out


def _overloaded(run: Replayed, arrived: npt.NDArray[np.float64]) -> bool:
    """Most of the last arrivals whose first token is due missed it while they waited: the queue grew to the end."""
    requests = run.setup.ledger.requests
    now = run.setup.env.now
    served = [
        request
        for request in requests
        if request.state is not RequestState.REJECTED and request.arrival_s + request.ttft_limit_s <= now
    ]
    tail = served[-max(1, len(served) // 4) :]
    if len(served) < 8:
        return False
    late: list[bool] = [
        (request.prefill_start_s if request.prefill_start_s >= 0 else now) - request.arrival_s > request.ttft_limit_s
        for request in tail
    ]
    return sum(late) > LATE_SHARE * len(tail)


def _counters(run: Replayed) -> dict[str, float]:
    """What schemes count of their own, over all instances."""
    out: dict[str, float] = {}
    for instance in run.instances:
        for name, value in instance.counters().items():
            out[name] = out.get(name, 0) + value
    return out


def _kv(report: KvReport, run: Replayed) -> dict[str, Any]:
    return {
        "groups": report.groups,
        "gpus_per_group": report.gpus_per_group,
        "capacity_tokens": report.capacity_tokens,
        "block_tokens": run.setup.kv.block_tokens,
        "given": report.capacity.given,
        "terms": asdict(report.capacity),
    }


def _instances(run: Replayed, outcome: Outcome) -> list[dict[str, Any]]:
    owner = np.array([request.instance for request in run.setup.ledger.requests])
    out = []
    for index, instance in enumerate(run.instances):
        mine = (owner == index) & outcome.counted
        ttft = np.where(np.isnan(outcome.latencies.ttft_s), np.inf, outcome.latencies.ttft_s)[mine]
        out.append(
            {
                "instance": index,
                "requests": int((owner == index).sum()),
                "attainment": float(outcome.attained[mine].mean()) if mine.any() and run.setup.slo.given else None,
                "ttft_s": metrics.statistics(ttft),
                "utilisation": instance.utilised_s / run.setup.env.now if run.setup.env.now > 0 else 0.0,
            }
        )
    return out


def _warnings(run: Replayed, out: dict[str, Any], report: KvReport) -> list[str]:
    warnings = []
    if out["synthetic"]:
        warnings.append(f"the trace is synthetic: {out['label']}")
    if out["requests"]["rejected"]:
        reasons = ", ".join(f"{count} by {reason}" for reason, count in out["rejected_by"].items())
        warnings.append(f"{out['requests']['rejected']} of {out['requests']['injected']} requests rejected: {reasons}")
    if out["requests"]["unfinished"] and not run.probe:
        warnings.append(f"{out['requests']['unfinished']} requests unfinished at horizon_s, counted as missed")
    warnings += report.capacity.warnings
    if not out["requests"]["in_window"]:
        warnings.append(f"none of {out['requests']['injected']} requests counts: see warmup_s and cooldown_s")
    if out["overloaded"]:
        warnings.append("overloaded: the queue grew until the arrivals ended")
    if out["latency"]["extrapolated_queries"]:
        warnings.append(f"{out['latency']['extrapolated_queries']} latency queries lay outside the measured range")
    return warnings + (_slo_warnings(run, out) if run.setup.slo.given else [])


def _slo_warnings(run: Replayed, out: dict[str, Any]) -> list[str]:
    """An SLO that no request can meet, or that is a thousand times too loose, is probably in the wrong unit."""
    warnings = []
    slo = run.setup.slo
    requests = run.setup.ledger.requests
    prefill = [r.first_token_s - r.prefill_start_s for r in requests if r.first_token_s >= 0]
    gaps = out["gap_s"]
    for key, limit, least in (
        ("slo.ttft_s", slo.ttft_s, float(np.median(prefill)) if prefill else None),
        ("slo.tbt_s", slo.tbt_s, gaps["p50"] if gaps else None),
    ):
        if least is None or least <= 0:
            continue
        if limit < least:
            warnings.append(f"{key}={limit} s is below the median of {least:.4g} s that serving itself takes")
        elif limit > ABSURD_SLO_FACTOR * least:
            warnings.append(
                f"{key}={limit} s is over {ABSURD_SLO_FACTOR} times the median of {least:.4g} s: in seconds?"
            )
    return warnings


def timing(ledger: Ledger, wall_s: float) -> dict[str, Any]:
    """`timing.json`: wall-clock figures, outside every identity."""
    steps = sum(len(track.ends) for track in ledger.tracks)
    passes = np.sort(np.frombuffer(ledger.schedule_pass_s, np.float64)) * 1e6 if ledger.schedule_pass_s else None
    pass_us = None
    if passes is not None:
        p50, p99 = metrics.quantile(passes, [0.5, 0.99])
        pass_us = {"p50": float(p50), "p99": float(p99), "max": float(passes[-1])}
    return {
        "wall_s": wall_s,
        "iterations_per_s": steps / wall_s if wall_s > 0 else None,
        "schedule_pass_us": pass_us,
        "compiled": native.active(),
    }
