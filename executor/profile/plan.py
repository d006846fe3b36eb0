"""What a profile measures: a grid of chunks, prefixes, contexts and batches, and the cells made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from confsim.errors import InputError
from executor.config import ExecutorConfig, Layout

# Largest values where none are given: enough for tiny models on CPU, and for serving sizes on a GPU.
CPU = {"chunk_tokens": 1024, "prefix_tokens": 2048, "context_tokens": 1024, "sequences": 16, "kv_tokens": 16384}
GPU = {"chunk_tokens": 8192, "prefix_tokens": 32768, "context_tokens": 32768, "sequences": 64, "kv_tokens": 262144}
BUDGET_S = {"cpu": 45.0, "cuda": 540.0}
LEAST_CONTEXT = 16
WARM_DECODES = 3  # before each cell with decodes: in service an iteration mostly follows many of them
WARM_TOKENS = 16  # prompt of the request that is decoded for it
FINE_FROM = 16  # tokens of a chunk from which sizes double


@dataclass(frozen=True)
class Grid:
    """How far and how often to measure; None takes what suits the device.

    Chunks quadruple from `least_chunk_tokens` to 16 and double from there to `chunk_tokens` (over all groups);
    contexts of decodes quadruple from 16 to `context_tokens`; `prefix_tokens` is the longest cached prefix,
    `sequences` the most decodes of a group, `kv_tokens` the KV of a group that decodes may take together. Each cell is
    measured once a round.
    """

    chunk_tokens: int | None = None
    least_chunk_tokens: int = 1
    prefix_tokens: int | None = None
    context_tokens: int | None = None
    sequences: int | None = None
    kv_tokens: int | None = None
    rounds: int = 15
    budget_s: float | None = None

    def __post_init__(self) -> None:
        for key in ("chunk_tokens", "least_chunk_tokens", "prefix_tokens", "context_tokens", "sequences", "kv_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise InputError(f"grid.{key}={value}: use 1 or more")
        if self.rounds < 3:
            raise InputError(f"grid.rounds={self.rounds}: a median needs 3 rounds or more")

    def filled(self, executor: ExecutorConfig) -> Grid:
        """With every size set; never beyond the model's context limit."""
        defaults = CPU if executor.device.kind == "cpu" else GPU
        given = {key: getattr(self, key) for key in defaults}
        sizes: dict[str, int] = {key: defaults[key] if value is None else value for key, value in given.items()}
        limit = executor.model.max_context_tokens
        if limit is not None:
            for key in ("chunk_tokens", "prefix_tokens", "context_tokens"):
                sizes[key] = min(sizes[key], limit // 2)
        budget_s = BUDGET_S[executor.device.kind] if self.budget_s is None else self.budget_s
        return replace(self, **sizes, budget_s=budget_s)


@dataclass(frozen=True)
class Cell:
    """One plan to measure: chunks of (tokens, cached prefix), the last one's end or not, beside decodes of a level.

    `part`: prefill, decode, transfer (a prompt that ends and moves), pair (both phases, to tell what they cost each
    other), joint (a grid of both phases in one attention call, and its parts alone) or mixed (both phases, held out of
    every fit). `sequences` decodes of each group at context `level`, of one group after another where `alone`.
    """

    part: str
    chunks: tuple[tuple[int, int], ...] = ()
    last: bool = False
    level: int = 0
    sequences: int = 0
    alone: bool = False

    @property
    def name(self) -> str:
        """Its identity in files."""
        chunks = "+".join(f"{tokens}@{cached}" for tokens, cached in self.chunks)
        decode = f"{self.sequences}x{self.level}" if self.sequences else ""
        last, alone = "last" if self.last else "", "alone" if self.alone else ""
        return " ".join(word for word in (self.part, chunks, last, decode, alone) if word)


@dataclass(frozen=True)
class Plan:
    """All cells of a profile and the decodes that they need: `levels` maps a context to the decodes a group.

    The cells of a unit are successive chunks of one prompt, so that a long prefix is computed once for all of them.
    """

    units: tuple[tuple[Cell, ...], ...]
    levels: dict[int, int]
    capacity_tokens: int  # KV of a group

    @property
    def cells(self) -> int:
        """How many there are."""
        return sum(map(len, self.units))


def make_plan(grid: Grid, layout: Layout, one_kernel: bool = False) -> Plan:
    """Cells for a grid whose sizes are all set; `one_kernel` ranks compute both phases in one attention call.

    Raises:
        InputError: if the KV has no room for one decode of each context.
    """
    assert grid.chunk_tokens and grid.prefix_tokens and grid.context_tokens and grid.sequences and grid.kv_tokens
    sizes = _sizes(grid.least_chunk_tokens, grid.chunk_tokens)
    contexts = _steps(min(LEAST_CONTEXT, grid.context_tokens), grid.context_tokens, 4)
    # Contexts grow by a token whenever a decode is measured.
    growth = 2 * (grid.rounds + 1) * (grid.sequences.bit_length() + 8)
    levels = _levels(contexts, grid.kv_tokens, grid.sequences)
    ladders = [_ladder(prefix, sizes) for prefix in _prefixes(grid)]
    cells = [Cell("prefill", ((size, 0),)) for size in sizes]
    cells += [
        # One decode is mostly the only one: least context first puts a second one on another group, then a third.
        Cell("decode", level=level, sequences=count, alone=count == 1 and layout.migrates)
        for level, most in levels.items()
        for count in _steps(1, most, 2)
    ]
    cells += [Cell("transfer", ((size, 0),), last=True) for size in sizes[::2]] if layout.migrates else []
    large = [size for size in sizes if size >= FINE_FROM] or sizes
    cells += _joint(large, grid.prefix_tokens, levels) if one_kernel else []
    cells += _both("pair", large, levels, shift=1)
    cells += _both("mixed", large, levels, shift=0)
    tokens = sum(count * (level + growth + 16) for level, count in levels.items())
    prompts = grid.prefix_tokens + 3 * grid.chunk_tokens + 64
    warm = WARM_TOKENS + WARM_DECODES * len(cells)
    return Plan((*((cell,) for cell in cells), *ladders), levels, _up(tokens + 2 * prompts + 2 * warm, 64))


def _ladder(prefix: int, sizes: list[int]) -> tuple[Cell, ...]:
    """Chunks of every size, one after the other behind a prefix that they lengthen."""
    starts = [prefix + sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(Cell("prefill", ((size, start),)) for size, start in zip(sizes, starts, strict=True))


def _sizes(least: int, most: int) -> list[int]:
    small = _steps(least, min(most, FINE_FROM), 4) if least < FINE_FROM else []
    return sorted({*small, *_steps(max(least, min(most, FINE_FROM)), most, 2)})


def _levels(contexts: list[int], kv_tokens: int, sequences: int) -> dict[int, int]:
    """Decodes a group of each context: as equal shares of the KV allow, the longest context first, one at least."""
    if sum(contexts) > kv_tokens:
        raise InputError(
            f"grid.kv_tokens={kv_tokens}: no room for one decode of each context ({', '.join(map(str, contexts))}), "
            f"use {sum(contexts)} or more, or a smaller grid.context_tokens"
        )
    levels: dict[int, int] = {}
    left = kv_tokens
    for number, context in enumerate(reversed(contexts)):
        share = left // (len(contexts) - number)
        levels[context] = min(sequences, max(1, share // context))
        left -= levels[context] * context
    return {context: levels[context] for context in contexts}


def _prefixes(grid: Grid) -> list[int]:
    assert grid.prefix_tokens
    return sorted({max(1, grid.prefix_tokens // 2), grid.prefix_tokens})


def _both(part: str, sizes: list[int], levels: dict[int, int], shift: int) -> list[Cell]:
    """Both phases in one plan: chunks of all sizes beside decodes of all levels, each once, not every combination."""
    contexts = list(levels)
    cells = []
    for number, size in enumerate(sizes[1:] if len(sizes) > 1 else sizes):
        level = contexts[(number + shift) % len(contexts)]
        count = max(1, levels[level] // (2 if number % 2 else 1))
        cached = 0 if number % 3 else sizes[-1]
        cells.append(Cell(part, ((size, cached),), level=level, sequences=count))
    if part == "mixed":
        middle, level = sizes[len(sizes) // 2], contexts[len(contexts) // 2]
        cells.append(Cell(part, ((middle, 0),), last=True, level=level, sequences=levels[level]))
        cells.append(Cell(part, ((sizes[0], 0), (middle, 0)), level=level, sequences=levels[level]))
    return cells


def _joint(sizes: list[int], prefix_tokens: int, levels: dict[int, int]) -> list[Cell]:
    """Every combination of few chunks, prefixes, decodes and contexts, and of nothing in place of a phase.

    The shortest contexts grow too much while they are measured; decodes are as many as every context left has.
    """
    contexts = list(levels)[-3:]
    counts = _spread(_steps(1, min(levels[level] for level in contexts), 2), 4)
    chunks = [((size, cached),) for size, cached in product(_spread(sizes, 4), (0, prefix_tokens))]
    decodes = list(product(contexts, counts))
    alone = [Cell("joint", chunk) for chunk in chunks]
    alone += [Cell("joint", level=level, sequences=count) for level, count in decodes]
    both = product(chunks, decodes)
    return alone + [Cell("joint", chunk, level=level, sequences=count) for chunk, (level, count) in both]


def _spread(values: list[int], most: int) -> list[int]:
    """At most so many of ascending values, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _steps(least: int, most: int, factor: int) -> list[int]:
    """least, least * factor, ... and most."""
    steps = [min(least, most)]
    while steps[-1] * factor < most:
        steps.append(steps[-1] * factor)
    return [*steps, most] if most > steps[-1] else steps


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
