"""Decode and prefill attention of one layer for the heads that one GPU holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from confsim.errors import InputError
from confsim.latency import profile
from confsim.latency.curve import curve_of, rounded
from confsim.latency.fit.measurements import DecodeTable, Ints, PrefillTable
from confsim.latency.fit.smooth import Floats, error_summary, isotonic, monotone

# Chunks below this are bound by launch and start-up; the efficiency is fitted on longer ones.
LEAST_CHUNK = 512


def _heads(table: DecodeTable | PrefillTable, q_heads: int, kv_heads: int) -> Any:
    rows = (table.q_heads == q_heads) & (table.kv_heads == kv_heads)
    if not rows.any():
        raise InputError(f"attention with {q_heads} query and {kv_heads} KV heads a GPU was not measured: add its rows")
    return rows


# Decode --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeGrid:
    """Measured decode times of one head count: `seconds[i, j]` (nan where not measured)."""

    sequences: Ints
    context: Ints
    seconds: Floats


def decode_grid(table: DecodeTable, q_heads: int, kv_heads: int, replicate: int = 0) -> DecodeGrid:
    """The rows of one replicate as a grid over sequences and context each."""
    rows = _heads(table, q_heads, kv_heads) & (table.replicate == replicate)
    sequences, context = np.unique(table.sequences[rows]), np.unique(table.context[rows])
    total = np.zeros((len(sequences), len(context)))
    count = np.zeros_like(total)
    at = (np.searchsorted(sequences, table.sequences[rows]), np.searchsorted(context, table.context[rows]))
    np.add.at(total, at, np.log(table.seconds[rows]))
    np.add.at(count, at, 1.0)
    with np.errstate(invalid="ignore"):
        return DecodeGrid(sequences, context, np.exp(total / np.where(count > 0, count, np.nan)))


def smooth_decode(grid: DecodeGrid) -> tuple[Floats, Ints]:
    """Times that never fall with context or sequences, every cell filled; and each row's last measured context.

    Isotonic on log scales along the context, then along the sequences, until both hold; unmeasured cells follow the
    row's last slope (bytes over bandwidth).
    """
    level = np.log(grid.seconds)
    last = np.array([int(np.flatnonzero(~np.isnan(row))[-1]) for row in level])
    for _ in range(50):
        before = level.copy()
        for row in level:
            row[~np.isnan(row)] = isotonic(row[~np.isnan(row)])
        for column in level.T:
            column[~np.isnan(column)] = isotonic(column[~np.isnan(column)])
        if np.nanmax(np.abs(before - level)) < 1e-9:
            break
    times = np.exp(level)
    for i, j in enumerate(last):
        times[i] = _fill(grid.context.astype(np.float64), times[i], int(j))
    times = np.maximum.accumulate(np.maximum.accumulate(times, axis=1), axis=0)
    return times, grid.context[last]


def _fill(context: Floats, row: Floats, last: int) -> Floats:
    known = np.flatnonzero(~np.isnan(row))
    filled = np.interp(context, context[known], row[known])
    first = max(last - 2, 0)
    slope = (row[last] - row[first]) / (context[last] - context[first]) if last > first else 0.0
    return np.where(context > context[last], row[last] + slope * (context - context[last]), filled)


def fit_decode(table: DecodeTable, q_heads: int, kv_heads: int) -> profile.DecodeTable:
    """The profile's table for one head count."""
    grid = decode_grid(table, q_heads, kv_heads)
    times, measured = smooth_decode(grid)
    rows = [[rounded(value) for value in row] for row in times.tolist()]
    return profile.DecodeTable(
        tuple(int(value) for value in grid.sequences),
        tuple(int(value) for value in grid.context),
        tuple(tuple(row) for row in rows),
        tuple(int(value) for value in measured),
    )


def decode_held_out(table: DecodeTable, heads: list[tuple[int, int]]) -> dict[str, Any]:
    """Every inner measurement predicted without it: from its row (linear in context) and column (in sequences)."""
    predicted, measured = [], []
    for q_heads, kv_heads in heads:
        grid = decode_grid(table, q_heads, kv_heads)
        for s, axis in ((grid.seconds, grid.context), (grid.seconds.T, grid.sequences)):
            x = axis.astype(np.float64)
            weight = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
            guess = s[:, :-2] + (s[:, 2:] - s[:, :-2]) * weight
            predicted.append(guess.ravel())
            measured.append(s[:, 1:-1].ravel())
    return error_summary(np.concatenate(predicted), np.concatenate(measured))


def decode_in_sample(table: DecodeTable, heads: list[tuple[int, int]]) -> dict[str, Any]:
    """What smoothing alone moves the measured rows by."""
    pairs = [(smooth_decode(grid)[0], grid.seconds) for grid in (decode_grid(table, q, kv) for q, kv in heads)]
    predicted = np.concatenate([np.where(np.isnan(raw), np.nan, smooth).ravel() for smooth, raw in pairs])
    return error_summary(predicted, np.concatenate([raw.ravel() for _, raw in pairs]))


def decode_noise(table: DecodeTable, heads: list[tuple[int, int]]) -> dict[str, Any]:
    """How far replicates of one kernel are apart at the same point."""
    key = ((table.q_heads * 1000 + table.kv_heads) * 4096 + table.sequences) * 1_000_000 + table.context
    wanted = np.isin(table.q_heads * 1000 + table.kv_heads, [q * 1000 + kv for q, kv in heads])
    return _replicate_difference(key[wanted], table.replicate[wanted], table.seconds[wanted])


def _replicate_difference(key: Ints, replicate: Ints, seconds: Floats) -> dict[str, Any]:
    order = np.lexsort((replicate, key))
    key, seconds = key[order], seconds[order]
    same = key[1:] == key[:-1]
    return error_summary(seconds[:-1][same], seconds[1:][same])


# Prefill -------------------------------------------------------------------------------------------------------------


def prefill_rows(table: PrefillTable, q_heads: int, kv_heads: int, replicate: int = 0) -> tuple[Floats, Floats]:
    """Chunk tokens and seconds of one head count without a cached prefix, smoothed over replicates of the source."""
    rows = _heads(table, q_heads, kv_heads) & (table.replicate == replicate) & (table.cached == 0)
    return monotone(table.tokens[rows].astype(np.float64), table.seconds[rows])


def pair_flops(q_heads: int, head_dim: int, tokens: Floats, cached: float = 0.0) -> Floats:
    """`4 * head_dim * q_heads * n * (c + n / 2)`: QK and PV over a causal chunk behind a prefix."""
    return np.asarray(4.0 * head_dim * q_heads * tokens * (cached + tokens / 2.0), dtype=np.float64)


class Efficiency:
    """FLOP/s of prefill attention as a function of query tokens x local heads, over every head count measured.

    The launch floor (time of the shortest chunk) is taken off first, or short chunks would carry it into a prefix that
    costs none of it; the rest is monotone in the work per launch on log scales.
    """

    def __init__(self, table: PrefillTable, head_dim: int, heads: list[tuple[int, int]]) -> None:
        work, rate = [], []
        self.floor = min(float(prefill_rows(table, q, kv)[1][0]) for q, kv in heads)
        for q_heads, kv_heads in heads:
            tokens, seconds = prefill_rows(table, q_heads, kv_heads)
            keep = tokens >= LEAST_CHUNK
            net = np.maximum(seconds[keep] - self.floor, 1e-9)
            work.append(tokens[keep] * q_heads)
            rate.append(pair_flops(q_heads, head_dim, tokens[keep]) / net)
        order = np.argsort(np.concatenate(work))
        self.work, log_rate = np.concatenate(work)[order], np.log(np.concatenate(rate)[order])
        self.rate = np.exp(isotonic(log_rate))

    def __call__(self, tokens: Floats, q_heads: int) -> Floats:
        """FLOP/s; below the fitted range in proportion to the work (a fixed time a tile), above it constant."""
        work = tokens * q_heads
        rate = np.exp(np.interp(np.log(work), np.log(self.work), np.log(self.rate)))
        return np.asarray(rate * np.minimum(work / self.work[0], 1.0), dtype=np.float64)


def fit_prefill(
    table: PrefillTable,
    efficiency: Efficiency,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    prefix_bytes_s: float,
) -> profile.PrefillTable:
    """Own attention as measured; a cached token's cost from measured rows where there are any, else derived.

    Derived: `4 * head_dim * q_heads * n` FLOPs over the efficiency of n x q_heads, plus `prefix_bytes_s` for reading
    one token of the prefix once.
    """
    tokens, seconds = prefill_rows(table, q_heads, kv_heads)
    rows = _heads(table, q_heads, kv_heads) & (table.cached > 0)
    if rows.any():
        cached = _measured_slope(table, rows, tokens, seconds)
    else:
        slope = 4.0 * head_dim * q_heads * tokens / efficiency(tokens, q_heads) + prefix_bytes_s
        cached = (tokens, np.maximum.accumulate(slope))
    return profile.PrefillTable(curve_of(tokens, seconds), curve_of(*cached))


def _measured_slope(table: PrefillTable, rows: Any, tokens: Floats, own: Floats) -> tuple[Floats, Floats]:
    """Seconds a cached token, by least squares through the chunk's own time, for each measured chunk length."""
    lengths = np.unique(table.tokens[rows])
    slope = []
    for length in lengths:
        same = rows & (table.tokens == length)
        cached = table.cached[same].astype(np.float64)
        extra = table.seconds[same] - np.interp(float(length), tokens, own)
        slope.append(max(float(cached @ extra / (cached @ cached)), 0.0))
    return lengths.astype(np.float64), np.asarray(isotonic(np.asarray(slope)))


def prefill_held_out(table: PrefillTable, heads: list[tuple[int, int]]) -> dict[str, Any]:
    """Every inner chunk length predicted from the others of its head count, on log scales."""
    predicted, measured = [], []
    for q_heads, kv_heads in heads:
        rows = _heads(table, q_heads, kv_heads) & (table.replicate == 0) & (table.cached == 0)
        tokens, seconds = table.tokens[rows].astype(np.float64), table.seconds[rows]
        for length in np.unique(tokens)[1:-1]:
            rest = tokens != length
            where, times = monotone(tokens[rest], seconds[rest])
            guess = np.exp(np.interp(np.log(length), np.log(where), np.log(times)))
            predicted.append(np.full((~rest).sum(), guess))
            measured.append(seconds[~rest])
    return error_summary(np.concatenate(predicted), np.concatenate(measured))


def prefill_noise(table: PrefillTable, heads: list[tuple[int, int]]) -> dict[str, Any]:
    """How far replicates of one kernel are apart at the same point."""
    wanted = np.isin(table.q_heads * 1000 + table.kv_heads, [q * 1000 + kv for q, kv in heads]) & (table.cached == 0)
    key = (table.q_heads * 1000 + table.kv_heads) * 1_000_000 + table.tokens
    return _replicate_difference(key[wanted], table.replicate[wanted], table.seconds[wanted])
