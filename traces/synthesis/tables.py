"""What a synthetic trace is drawn from: quantile tables and shares, as JSON files beside this module."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRESETS = ("toolagent", "conversation", "synthetic", "qwen_a")


@dataclass(frozen=True)
class Quantiles:
    """A distribution as values at ascending levels in [0, 1], linear in between (equal levels: a jump)."""

    levels: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def read(cls, data: Mapping[str, Sequence[float]]) -> Quantiles:
        """From `{"levels": [...], "values": [...]}`."""
        return cls(tuple(data["levels"]), tuple(data["values"]))

    def at(self, levels: Floats) -> Floats:
        """Values at the given levels."""
        return np.interp(levels, self.levels, self.values)


@dataclass(frozen=True)
class Turns:
    """One class of requests of a kind: lengths in tokens, and the rank correlation between the two."""

    prompt: Quantiles
    output: Quantiles
    rank_correlation: float

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Turns:
        """From JSON data."""
        return cls(Quantiles.read(data["prompt"]), Quantiles.read(data["output"]), float(data["rank_correlation"]))


@dataclass(frozen=True)
class Sessions:
    """Later turns of a kind: how many, how long, how much of the prompt is their parent's, how long after it.

    `share` is the share of later turns by position in the trace (equal parts from first to last request).
    `prefix_share[k]` is the matched share of prompt blocks for prompts of less than `block_edges[k]` blocks.
    """

    turns: Turns
    share: tuple[float, ...]
    block_edges: tuple[int, ...]
    prefix_share: tuple[Quantiles, ...]
    lag_s: Quantiles


@dataclass(frozen=True)
class Kind:
    """One kind of request: its share of the trace, its shared prefix in blocks, its first and later turns."""

    name: str
    share: float
    shared_blocks: int
    first: Turns
    sessions: Sessions | None


@dataclass(frozen=True)
class Population:
    """A whole preset. `tick_s` is the step of the timestamps, 0 for Poisson arrivals to the millisecond.

    `requests` and `rate` (per second) are those of the trace that it is modelled on; `reusable` is the share of
    prompt blocks whose prefix occurred before (null: as it falls out).
    """

    name: str
    source: str
    requests: int
    rate: float
    tick_s: float
    block_tokens: int
    reusable: float | None
    kinds: tuple[Kind, ...]


def load_population(preset: str) -> Population:
    """The tables of a preset."""
    text = files("traces.synthesis").joinpath(f"{preset}.json").read_text(encoding="utf-8")
    return read_population(json.loads(text))


def read_population(data: Mapping[str, Any]) -> Population:
    """A population from JSON data."""
    return Population(
        name=data["name"],
        source=data["source"],
        requests=int(data["requests"]),
        rate=float(data["rate"]),
        tick_s=float(data["tick_s"]),
        block_tokens=int(data["block_tokens"]),
        reusable=data["reusable"],
        kinds=tuple(_read_kind(kind) for kind in data["kinds"]),
    )


def _read_kind(data: Mapping[str, Any]) -> Kind:
    sessions = data["sessions"]
    return Kind(
        name=data["name"],
        share=float(data["share"]),
        shared_blocks=int(data["shared_blocks"]),
        first=Turns.read(data["first"]),
        sessions=None
        if sessions is None
        else Sessions(
            turns=Turns.read(sessions["turns"]),
            share=tuple(sessions["share"]),
            block_edges=tuple(sessions["block_edges"]),
            prefix_share=tuple(Quantiles.read(q) for q in sessions["prefix_share"]),
            lag_s=Quantiles.read(sessions["lag_s"]),
        ),
    )
