"""Decode and prefill attention of one layer for the heads that one GPU holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import least_squares

from analysis.calibrate.measurements import DecodeTable, Ints, PrefillTable
from analysis.calibrate.smooth import Floats, error_summary, isotonic, monotone
from confsim.errors import InputError
from confsim.latency import profile
from confsim.latency.curve import curve_of, rounded

# Chunks below this are bound by launch and start-up; the efficiency is fitted on longer ones.
LEAST_CHUNK = 512


def _heads(table: DecodeTable | PrefillTable, q_heads: int, kv_heads: int) -> Any:
    rows = (table.q_heads == q_heads) & (table.kv_heads == kv_heads)
    if not rows.any():
        raise InputError(f"attention with {q_heads} query and {kv_heads} KV heads a GPU was not measured: add its rows")
    return rows


Attention = TypeVar("Attention", DecodeTable, PrefillTable)


def measured_heads(table: DecodeTable | PrefillTable) -> set[tuple[int, int]]:
    """Query and KV heads that the fitted replicate measured."""
    own = table.replicate == 0
    return {(int(q), int(kv)) for q, kv in zip(table.q_heads[own], table.kv_heads[own], strict=True)}


def with_heads(table: Attention, heads: list[tuple[int, int]]) -> tuple[Attention, dict[str, str]]:
    """The table with rows for heads that were not measured, between the nearest query heads at the same KV heads.

    Linear in the query heads. Returns the table, and what was interpolated from what.

    Raises:
        InputError: where no two measured head counts enclose one.
    """
    filled: dict[str, str] = {}
    for q_heads, kv_heads in heads:
        known = sorted(q for q, kv in measured_heads(table) if kv == kv_heads)
        if q_heads in known:
            continue
        below, above = [q for q in known if q < q_heads], [q for q in known if q > q_heads]
        if not below or not above:
            raise InputError(
                f"attention with {q_heads} query and {kv_heads} KV heads a GPU was not measured: add its rows"
            )
        table = _append(table, between(table, q_heads, kv_heads, below[-1], above[0]))
        filled[f"{q_heads}/{kv_heads}"] = f"between {below[-1]}/{kv_heads} and {above[0]}/{kv_heads}"
    return table, filled


def _points(table: Attention, q_heads: int, kv_heads: int) -> dict[tuple[int, int], float]:
    rows = (table.q_heads == q_heads) & (table.kv_heads == kv_heads) & (table.replicate == 0)
    if isinstance(table, DecodeTable):
        first, second = table.sequences[rows], table.context[rows]
    else:
        first, second = table.tokens[rows], table.cached[rows]
    return dict(zip(zip(first.tolist(), second.tolist(), strict=True), table.seconds[rows].tolist(), strict=True))


def between(table: Attention, q_heads: int, kv_heads: int, below: int, above: int) -> Attention:
    """Rows for `q_heads` at every point that both neighbours measured."""
    low, high = _points(table, below, kv_heads), _points(table, above, kv_heads)
    weight = (q_heads - below) / (above - below)
    points = sorted(set(low) & set(high))
    first, second = np.array(points, dtype=np.int64).T
    size = len(points)
    common = {
        "q_heads": np.full(size, q_heads),
        "kv_heads": np.full(size, kv_heads),
        "seconds": np.array([low[point] + weight * (high[point] - low[point]) for point in points]),
        "replicate": np.zeros(size, dtype=np.int64),
    }
    names = ("sequences", "context") if isinstance(table, DecodeTable) else ("tokens", "cached")
    return replace(table, **common, **dict(zip(names, (first, second), strict=True)))


def _append(table: Attention, more: Attention) -> Attention:
    columns = {key: np.concatenate([value, getattr(more, key)]) for key, value in vars(table).items()}
    return replace(table, **columns)


def heads_held_out(table: Attention, kv_heads: set[int]) -> dict[str, Any]:
    """Every inner query head count predicted from its neighbours at the same KV heads."""
    predicted, measured = [], []
    for kv in sorted(kv_heads):
        known = sorted(q for q, other in measured_heads(table) if other == kv)
        for below, q_heads, above in zip(known, known[1:], known[2:], strict=False):
            guess, truth = _points(between(table, q_heads, kv, below, above), q_heads, kv), _points(table, q_heads, kv)
            both = sorted(set(guess) & set(truth))
            predicted += [guess[point] for point in both]
            measured += [truth[point] for point in both]
    return error_summary(np.array(predicted), np.array(measured))


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
    first = int(known[max(len(known) - 3, 0)])
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


class PrefillLaw:
    """Prefill attention by work and by its critical path, fitted on every head count measured without a prefix.

    Query tiles of 128 rows run on the SMs; each walks its keys at one SM's rate:
    `t = floor + 4 * 128 * head_dim / rate * ((w * (c + n/2 + o))^p + (c + n + u)^p)^(1/p)` with
    `w = n * q_heads / (128 * sms)`. The first term is all tiles spread over the SMs (o: start-up of a tile, in keys),
    the second the longest tile, which bounds launches of few tiles. So the efficiency depends on query tokens x local
    heads, as measured, and what a causal triangle without a prefix wastes (long tiles beside short ones) is not carried
    over to prefixes, where tiles are alike. `cached_token_s` gives both kernels: those that leave a tile's keys to one
    SM, and those that split them over SMs that would stand idle, which are faster on short chunks behind long prefixes.
    """

    TILE = 128

    def __init__(self, rows: tuple[Floats, Floats, Floats], head_dim: int, sms: int) -> None:
        """`rows`: query heads, chunk tokens and seconds."""
        self.unit = 4.0 * self.TILE * head_dim
        self.sms = sms
        q_heads, tokens, seconds = rows
        start = [np.log(seconds.min() / 2.0), np.log(np.max(self._rate(*rows))), np.log(200.0), 3.0, np.log(200.0)]

        def residual(parameters: Floats) -> Floats:
            return np.asarray(np.log(self._seconds(parameters, tokens, q_heads, 0.0) / seconds))

        solution = least_squares(
            residual, start, loss="soft_l1", f_scale=0.1, bounds=([-40, 0, -5, 1, -5], [0, 60, 12, 16, 12])
        )
        self.parameters: Floats = np.asarray(solution.x)
        self.best = float(np.max(4.0 * head_dim * q_heads * tokens * tokens / 2.0 / seconds))

    def _rate(self, q_heads: Floats, tokens: Floats, seconds: Floats) -> Floats:
        return np.asarray(self.unit * q_heads * tokens * tokens / (2.0 * self.TILE * self.sms) / seconds)

    def _seconds(self, parameters: Floats, tokens: Floats, q_heads: Floats, cached: float) -> Floats:
        floor, rate, start_up, power, path = parameters
        waves = tokens * q_heads / (self.TILE * self.sms)
        spread = waves * (cached + tokens / 2.0 + np.exp(start_up))
        longest = cached + tokens + np.exp(path)
        keys = longest * (1.0 + (spread / longest) ** power) ** (1.0 / power)
        return np.asarray(np.exp(floor) + self.unit / np.exp(rate) * keys, dtype=np.float64)

    def seconds(self, tokens: Floats, q_heads: Floats) -> Floats:
        """Seconds of a chunk without a prefix."""
        return self._seconds(self.parameters, tokens, q_heads, 0.0)

    def cached_token_s(self, tokens: Floats, q_heads: float, kv_heads: float, split_kv: bool = False) -> Floats:
        """Seconds that one more cached token costs the chunk behind a long prefix, no faster a FLOP than the best
        chunk measured.

        Without `split_kv` the law's slope, bounded by the longest tile; with it all tiles' work spread over the SMs,
        at least one tile a KV head (the queries that share it are packed into its rows).
        """
        rate, power = self.parameters[1], self.parameters[3]
        waves = tokens * q_heads / (self.TILE * self.sms)
        spread = np.maximum(waves, kv_heads / self.sms) if split_kv else (1.0 + waves**power) ** (1.0 / power)
        most = self.unit * waves * self.sms / self.best
        return np.asarray(np.maximum(self.unit / np.exp(rate) * spread, most), dtype=np.float64)

    @property
    def summary(self) -> dict[str, float]:
        """The fitted parameters, for the profile's provenance."""
        floor, rate, start_up, power, path = self.parameters.tolist()
        return {
            "floor_us": rounded(math.exp(floor) * 1e6),
            "flops_per_sm": rounded(math.exp(rate)),
            "tile_start_up_keys": rounded(math.exp(start_up)),
            "longest_tile_start_up_keys": rounded(math.exp(path)),
            "power": rounded(power),
            "best_flops_measured": rounded(self.best),
        }


def law_rows(table: PrefillTable, without: int | None = None) -> tuple[Floats, Floats, Floats]:
    """Rows that the law is fitted on: the fitted replicate, no prefix, chunks past start-up, at most 8 KV heads."""
    rows = (table.replicate == 0) & (table.cached == 0) & (table.tokens >= LEAST_CHUNK) & (table.kv_heads <= 8)
    if without is not None:
        rows &= table.q_heads != without
    return table.q_heads[rows].astype(np.float64), table.tokens[rows].astype(np.float64), table.seconds[rows]


def law_held_out(table: PrefillTable, head_dim: int, sms: int, heads: list[tuple[int, int]]) -> dict[str, Any]:
    """Every head count of the model predicted by a law fitted without it."""
    predicted, measured = [], []
    for q_heads, kv_heads in heads:
        rest = law_rows(table, without=q_heads)
        if len(rest[0]) < 5:
            continue
        own = _heads(table, q_heads, kv_heads) & (table.replicate == 0) & (table.cached == 0)
        own &= table.tokens >= LEAST_CHUNK
        tokens = table.tokens[own].astype(np.float64)
        predicted.append(PrefillLaw(rest, head_dim, sms).seconds(tokens, np.full(len(tokens), float(q_heads))))
        measured.append(table.seconds[own])
    if not measured:
        return error_summary(np.zeros(0), np.zeros(0))
    return error_summary(np.concatenate(predicted), np.concatenate(measured))


def fit_prefill(
    table: PrefillTable, law: PrefillLaw | None, q_heads: int, kv_heads: int, prefix_bytes_s: float
) -> profile.PrefillTable:
    """Own attention as measured; a cached token's cost from measured rows where there are any, else from the law.

    Derived: the law's slope, plus `prefix_bytes_s` for reading one token of the prefix once.
    """
    tokens, seconds = prefill_rows(table, q_heads, kv_heads)
    rows = _heads(table, q_heads, kv_heads) & (table.cached > 0)
    if rows.any():
        cached = split = _measured_slope(table, rows, tokens, seconds)
    elif law is not None:
        cached = (tokens, law.cached_token_s(tokens, q_heads, kv_heads) + prefix_bytes_s)
        split = (tokens, law.cached_token_s(tokens, q_heads, kv_heads, split_kv=True) + prefix_bytes_s)
    else:
        raise InputError(f"prefill attention behind a prefix was not measured for {q_heads} query heads: add its rows")
    return profile.PrefillTable(curve_of(tokens, seconds), curve_of(*cached), curve_of(*split))


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
