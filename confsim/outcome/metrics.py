"""From token times to what is reported: latencies a request, attainment, percentiles, reasons.

A percentile is the smallest value at or below which at least that share of the values lie (nearest rank). Rejected
requests have no latencies; unfinished ones count as infinite, and a statistic that is infinite is null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from confsim.outcome.slo import TOLERANCE, Slo
from confsim.run.ledger import Ledger
from confsim.run.request import Request, RequestState, Slice

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

PERCENTILES = (50, 90, 95, 99)
REASONS = ("queueing", "prefill", "gap", "rejected", "preempted", "unfinished")


@dataclass(frozen=True)
class Latencies:
    """One entry a request in order of injection; nan where there is no value.

    `gaps_s` and `gap_weights` are the pooled distribution of all gaps between tokens of one request.
    """

    ttft_s: Floats
    max_gap_s: Floats
    tpot_s: Floats
    finish_s: Floats
    lateness_s: Floats  # of the token that is latest against arrival + i * tbt_s
    tokens: npt.NDArray[np.int64]
    gaps_s: Floats
    gap_weights: Floats


def latencies(ledger: Ledger, slo: Slo, counted: Bools) -> Latencies:
    """Latencies of every injected request; gaps are pooled over those that are `counted`.

    Requests with one slice of a timeline behind their first token, nearly all, are computed together; the others
    (preempted, or moved between loops) one by one.
    """
    requests = ledger.requests
    book = _Book(counted)
    by_timeline: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        match request.slices:
            case []:
                pass
            case [float(), Slice() as part]:
                by_timeline.setdefault(part.timeline, []).append(index)
            case _:
                book.one(index, ledger.token_times(request), slo)
    for timeline, owners in by_timeline.items():
        book.many(np.array(owners), np.array(ledger.timelines[timeline]), [requests[i] for i in owners], slo)
    arrival = _of(requests, "arrival_s")
    done = np.array([request.state is RequestState.COMPLETED for request in requests], bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(book.tokens > 1, (book.last - book.first) / (book.tokens - 1), np.nan)
    return Latencies(
        book.first - arrival,
        book.max_gap,
        tpot,
        np.where(done, book.last, np.nan),
        book.lateness - arrival,
        book.tokens,
        np.concatenate([np.empty(0), *book.gaps]),
        np.concatenate([np.empty(0), *book.weights]),
    )


class _Book:
    """Columns of latencies while they are filled."""

    def __init__(self, counted: Bools) -> None:
        count = len(counted)
        self.counted = counted
        self.first = np.full(count, np.nan)
        self.last = np.full(count, np.nan)
        self.max_gap = np.full(count, np.nan)
        self.lateness = np.full(count, np.nan)
        self.tokens = np.zeros(count, np.int64)
        self.gaps: list[Floats] = []
        self.weights: list[Floats] = []

    def one(self, index: int, token_s: Floats, slo: Slo) -> None:
        """A request from all its token times."""
        self.first[index], self.last[index] = token_s[0], token_s[-1]
        self.tokens[index] = len(token_s)
        if slo.given:
            self.lateness[index] = (token_s - np.arange(len(token_s)) * slo.tbt_s).max()
        if len(token_s) > 1:
            gaps = np.diff(token_s)
            self.max_gap[index] = gaps.max()
            if self.counted[index]:
                self.gaps.append(gaps)
                self.weights.append(np.ones(len(gaps)))

    def many(self, owners: npt.NDArray[np.int64], axis: Floats, requests: list[Request], slo: Slo) -> None:
        """Requests with a first token and one slice of the timeline `axis`."""
        first = _of(requests, "first_token_s")
        parts = [request.slices[1] for request in requests]
        begin = np.array([part.start for part in parts if isinstance(part, Slice)])
        end = np.array([part.stop for part in parts if isinstance(part, Slice)])
        joint = axis[begin] - first
        gaps = np.diff(axis)
        inner = np.where(end - begin > 1, _range_max(gaps, begin, end - 1), -np.inf)
        self.first[owners] = first
        self.last[owners] = axis[end - 1]
        self.tokens[owners] = 1 + end - begin
        self.max_gap[owners] = np.maximum(joint, inner)
        if slo.given:
            steps = np.arange(len(axis))
            late = _range_max(axis - steps * slo.tbt_s, begin, end) + (begin - 1) * slo.tbt_s
            self.lateness[owners] = np.maximum(first, late)
        inside = self.counted[owners]
        weights = _coverage(begin[inside], end[inside] - 1, len(gaps))
        self.gaps += [joint[inside], gaps[weights > 0]]
        self.weights += [np.ones(int(inside.sum())), weights[weights > 0]]


def _of(requests: list[Request], name: str) -> Floats:
    return np.array([getattr(request, name) for request in requests], np.float64)


def _range_max(values: Floats, begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Floats:
    """max(values[b:e]) for each pair; where b >= e the value is meaningless."""
    padded = np.append(values, -np.inf)
    order = np.argsort(begin, kind="stable")  # neighbours keep the ranges between the pairs short
    pairs = np.stack([begin[order], np.maximum(end[order], begin[order])], axis=1).ravel()
    out = np.empty(len(begin))
    out[order] = np.maximum.reduceat(padded, np.minimum(pairs, len(values)))[::2]
    return out


def _coverage(begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64], length: int) -> Floats:
    """How many of the ranges [b, e) hold each index."""
    change = np.zeros(length + 1)
    np.add.at(change, begin[begin < end], 1.0)
    np.add.at(change, end[begin < end], -1.0)
    return np.cumsum(change)[:length]


def attained(lat: Latencies, requests: list[Request], slo: Slo) -> tuple[Bools, list[str | None]]:
    """Verdict of each request and why it missed (see `REASONS`)."""
    limits = np.array([slo.ttft_limit_s(request.prompt_tokens) for request in requests], np.float64) * TOLERANCE
    done = ~np.isnan(lat.finish_s)
    in_time = lat.ttft_s <= limits
    if slo.rule == "max_gap":
        good = done & in_time & ((lat.tokens < 2) | (lat.max_gap_s <= slo.tbt_s * TOLERANCE))
    else:
        good = done & (lat.lateness_s <= limits)
    reasons = [
        None if ok else _reason(request, bool(done[i]), bool(in_time[i]))
        for i, (request, ok) in enumerate(zip(requests, good.tolist(), strict=True))
    ]
    return good, reasons


def _reason(request: Request, done: bool, in_time: bool) -> str:
    if request.state is RequestState.REJECTED:
        return "rejected"
    if not done:
        return "unfinished"
    if request.preemptions:
        return "preempted"
    if in_time:
        return "gap"
    queueing_s = request.prefill_start_s - request.arrival_s
    return "queueing" if queueing_s >= request.first_token_s - request.prefill_start_s else "prefill"


def quantile(values: Floats, shares: npt.ArrayLike, weights: Floats | None = None) -> Floats:
    """Nearest-rank quantiles: for each share the smallest value whose cumulative weight reaches it."""
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    rank = np.searchsorted(cumulative, np.asarray(shares, np.float64) * cumulative[-1] * (1 - 1e-12), side="left")
    points: Floats = values[order][np.minimum(rank, len(values) - 1)]
    return points


def statistics(values: Floats, weights: Floats | None = None) -> dict[str, Any] | None:
    """{mean, p50, p90, p95, p99, max}; null where infinite, with `infinite`, the count of infinite values."""
    if not len(values):
        return None
    points = quantile(values, [p / 100 for p in PERCENTILES], weights)
    out: dict[str, Any] = {"mean": float(np.average(values, weights=weights))}
    out |= {f"p{p}": float(point) for p, point in zip(PERCENTILES, points, strict=True)}
    out["max"] = float(values.max())
    infinite = int(np.isinf(values).sum())
    clean = {key: (value if np.isfinite(value) else None) for key, value in out.items()}
    return clean | {"count": int(len(values) if weights is None else weights.sum()), "infinite": infinite}


def curve(values: Floats, weights: Floats | None = None) -> list[float | None] | None:
    """101 quantiles from 0% to 100%; null where infinite."""
    if not len(values):
        return None
    points = quantile(values, np.linspace(0, 1, 101), weights)
    return [float(point) if np.isfinite(point) else None for point in points]
