"""Draws a trace from a population: arrivals, kinds, lengths, sessions and prefix blocks.

Lengths are drawn by strata (one value in each of n equal slices of a distribution), so that means and percentiles
of a trace of a few thousand requests stand where the tables put them. Every part has its own random stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.readers.base import record_batch
from traces.synthesis.tables import Kind, Population, Sessions, Turns
from traces.trace import SCHEMA

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

CANDIDATES = 48  # parents looked at, nearest in size first
CARRY = 0.5  # most that one prompt makes up for earlier ones, as a share of its own matched blocks
STREAMS = {"arrivals": 1, "kinds": 2, "lengths": 3, "sessions": 4}


@dataclass
class Draw:
    """A trace under construction; one entry a request in arrival order."""

    arrival_s: Floats
    kind: Ints
    later: Mask  # a later turn of a session
    prompt: Ints
    output: Ints
    parent: Ints  # row, -1: none
    matched: Ints  # leading blocks taken from the parent, or from the kind's shared prefix


def generate(population: Population, requests: int, seed: int, block_ids: bool) -> pa.Table:
    """A table of `SCHEMA` with `requests` rows; the same for the same arguments but for `block_ids`."""
    draw = _lengths(population, requests, seed)
    blocks = -(-draw.prompt // population.block_tokens)
    _share_prefixes(population, draw, blocks)
    _link_sessions(population, draw, blocks, seed)
    session, turn = _sessions(draw.parent)
    names = pa.array([kind.name for kind in population.kinds])
    columns: dict[str, pa.Array | Ints | Floats] = {
        "request_id": np.arange(requests, dtype=np.int64),
        "arrival_s": draw.arrival_s,
        "prompt_tokens": draw.prompt,
        "output_tokens": draw.output,
        "session": session,
        "turn": turn,
        "parent_id": pa.array(draw.parent, mask=draw.parent < 0),
        "kind": names.take(pa.array(draw.kind)),
    }
    if block_ids:
        columns["block_ids"] = _block_ids(population, draw, blocks)
    return pa.Table.from_batches([record_batch(columns)], schema=SCHEMA)


def _stream(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, STREAMS[purpose]])


def _arrivals(population: Population, requests: int, rng: np.random.Generator) -> Floats:
    """Times from 0: uniform over the span (Poisson given their number), to the millisecond or on the ticks."""
    if requests == 1:
        return np.zeros(1)
    span = (requests - 1) / population.rate
    if population.tick_s == 0:
        inner = np.sort(rng.random(requests - 2)) * span
        poisson: Floats = np.concatenate((np.zeros(1), inner, np.array([span])))
        return np.rint(poisson * 1000) / 1000
    ticks = max(1, round(span / population.tick_s))
    times = np.sort(rng.integers(0, ticks, requests))
    ticks_s: Floats = (times - times[0]) * population.tick_s
    return ticks_s


def _exact(shares: tuple[float, ...], count: int) -> Ints:
    """Whole numbers that add up to `count`, in proportion to `shares`."""
    edges: Ints = np.rint(np.concatenate(([0.0], np.cumsum(shares) / np.sum(shares))) * count).astype(np.int64)
    counts: Ints = np.diff(edges)
    return counts


def _lengths(population: Population, requests: int, seed: int) -> Draw:
    arrival_s = _arrivals(population, requests, _stream(seed, "arrivals"))
    rng = _stream(seed, "kinds")
    counts = _exact(tuple(kind.share for kind in population.kinds), requests)
    kind = rng.permutation(np.repeat(np.arange(len(population.kinds)), counts))
    later = np.zeros(requests, dtype=np.bool_)
    prompt, output = np.zeros(requests, dtype=np.int64), np.zeros(requests, dtype=np.int64)
    lengths = _stream(seed, "lengths")
    for number, spec in enumerate(population.kinds):
        rows = np.flatnonzero(kind == number)
        if spec.sessions is not None:
            for part, share in zip(np.array_split(rows, len(spec.sessions.share)), spec.sessions.share, strict=True):
                later[rng.permutation(part)[: round(share * part.size)]] = True
            own = rows[later[rows]]
            prompt[own], output[own] = _draw_turns(spec.sessions.turns, own.size, lengths)
        own = rows[~later[rows]]
        prompt[own], output[own] = _draw_turns(spec.first, own.size, lengths)
    none = np.full(requests, -1, dtype=np.int64)
    return Draw(arrival_s, kind, later, prompt, output, none, np.zeros(requests, dtype=np.int64))


def _draw_turns(turns: Turns, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Prompt and output tokens of `count` requests, one in each slice of both distributions."""
    if count == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    first = rng.standard_normal(count)
    rho = turns.rank_correlation
    second = rho * first + np.sqrt(1 - rho * rho) * rng.standard_normal(count)
    drawn = []
    for order, table in ((first, turns.prompt), (second, turns.output)):
        ranks = np.argsort(np.argsort(order))
        drawn.append(np.maximum(np.rint(table.at((ranks + rng.random(count)) / count)).astype(np.int64), 1))
    return drawn[0], drawn[1]


def _share_prefixes(population: Population, draw: Draw, blocks: Ints) -> None:
    """Every request opens with its kind's shared blocks, as far as its prompt goes."""
    shared = np.array([kind.shared_blocks for kind in population.kinds])
    full = draw.prompt // population.block_tokens  # a part-filled last block is the request's own
    draw.matched[:] = np.minimum(shared[draw.kind], np.minimum(full, blocks))


def _link_sessions(population: Population, draw: Draw, blocks: Ints, seed: int) -> None:
    """Give later turns a parent of about the right size and age, whose blocks they continue."""
    rng = _stream(seed, "sessions")
    for number, spec in enumerate(population.kinds):
        if spec.sessions is None:
            continue
        rows = np.flatnonzero(draw.kind == number)
        wanted = _wanted_blocks(spec.sessions, blocks, rows[draw.later[rows]], rng)
        _scale_to_share(population, draw, blocks, rows, wanted)
        lags = spec.sessions.lag_s.at(rng.random(rows.size))
        _assign_parents(spec, draw, blocks, rows, wanted, lags)


def _wanted_blocks(sessions: Sessions, blocks: Ints, later: Ints, rng: np.random.Generator) -> Floats:
    """Blocks that each row should share with its parent (0 for first turns), indexed by row of the trace."""
    wanted = np.zeros(blocks.size)
    bins = np.searchsorted(sessions.block_edges, blocks[later], side="right")
    levels = rng.random(later.size)
    for number, table in enumerate(sessions.prefix_share):
        own = bins == number
        wanted[later[own]] = table.at(levels[own]) * blocks[later[own]]
    return wanted


def _scale_to_share(population: Population, draw: Draw, blocks: Ints, rows: Ints, wanted: Floats) -> None:
    """Scale `wanted` so that the whole trace has the population's share of reusable blocks."""
    if population.reusable is None or not wanted.any():
        return
    later = rows[draw.later[rows]]
    others = np.ones(blocks.size, dtype=np.bool_)
    others[later] = False
    missing = population.reusable * float(blocks.sum()) - float(draw.matched[others].sum())
    for _ in range(20):  # the clip at the prompt's own size takes some of the scaling away
        total = float(wanted.sum())
        wanted *= max(missing, 0.0) / total
        np.minimum(wanted, blocks, out=wanted)


def _assign_parents(spec: Kind, draw: Draw, blocks: Ints, rows: Ints, wanted: Floats, lags: Floats) -> None:
    """Walk the rows in time; requests of an earlier time that nobody has continued yet are open as parents.

    A child takes all its parent's blocks but the last. What a child gets short or over is carried to the next.
    """
    open_parents: list[tuple[int, int]] = []  # blocks to give, row; ascending
    waiting: list[tuple[int, int]] = []  # of the current time
    carry, now = 0.0, -1.0
    for row, lag in zip(rows.tolist(), lags.tolist(), strict=True):
        time = float(draw.arrival_s[row])
        if time > now:
            for entry in waiting:
                insort(open_parents, entry)
            waiting, now = [], time
        size = int(blocks[row])
        if draw.later[row]:
            ask = float(wanted[row])
            goal = min(max(ask + min(max(carry, -CARRY * ask), CARRY * ask), spec.shared_blocks + 1), size)
            found = _best_parent(open_parents, draw.arrival_s, goal, size, time - lag)
            if found >= 0:
                given, parent = open_parents.pop(found)
                draw.parent[row], draw.matched[row] = parent, given
            carry += ask - float(draw.matched[row])
        if size - 1 > spec.shared_blocks:
            waiting.append((size - 1, row))


def _best_parent(parents: list[tuple[int, int]], times: Floats, goal: float, size: int, when: float) -> int:
    """Index of the parent of about `goal` and at most `size` blocks that is nearest in time to `when`; -1: none."""
    limit = bisect_left(parents, (size + 1, -1))
    if limit == 0:
        return -1
    nearest = min(bisect_left(parents, (round(goal), -1)), limit - 1)
    slack = max(1.0, 0.05 * goal)
    low = high = nearest
    while low > 0 and nearest - low < CANDIDATES and goal - parents[low - 1][0] <= slack:
        low -= 1
    while high + 1 < limit and high - nearest < CANDIDATES and parents[high + 1][0] - goal <= slack:
        high += 1
    return min(range(low, high + 1), key=lambda i: abs(times[parents[i][1]] - when))


def _sessions(parent: Ints) -> tuple[Ints, Ints]:
    """Row of each request's first turn, and its turn from 1. Parents precede their children."""
    session, turn = np.arange(parent.size), np.ones(parent.size, dtype=np.int64)
    for row in np.flatnonzero(parent >= 0).tolist():
        session[row], turn[row] = session[parent[row]], turn[parent[row]] + 1
    return session, turn


def _block_ids(population: Population, draw: Draw, blocks: Ints) -> pa.Array:
    """Ids in order of first use within the trace; the shared blocks of the kinds come first."""
    starts = np.concatenate(([0], np.cumsum([kind.shared_blocks for kind in population.kinds])))
    prefix = [np.arange(starts[k], starts[k + 1]) for k in range(len(population.kinds))]
    fresh = int(starts[-1])
    lists: list[Ints] = []
    for kind, parent, matched, size in zip(
        draw.kind.tolist(), draw.parent.tolist(), draw.matched.tolist(), blocks.tolist(), strict=True
    ):
        head = prefix[kind] if parent < 0 else lists[parent]
        lists.append(np.concatenate((head[:matched], np.arange(fresh, fresh + size - matched))))
        fresh += size - matched
    offsets = np.concatenate(([0], np.cumsum(blocks))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(lists)))
