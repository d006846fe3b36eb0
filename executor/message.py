"""What travels between the driver and its ranks: plain resolved data, never the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from confsim.run.plan import IterationPlan
from confsim.specs import KvConfig
from executor.config import Device, Layout, ModelConfig, Sampling


class Chunk(NamedTuple):
    """A `PrefillChunk` by request id."""

    request: int
    start: int
    shards: tuple[int, ...]
    last: bool
    group: int

    @property
    def tokens(self) -> int:
        """Tokens over all groups."""
        return sum(self.shards)

    @property
    def end(self) -> int:
        """First token after the chunk."""
        return self.start + sum(self.shards)


class NewRequest(NamedTuple):
    """Token ids (int32) to prefill, prompt and recomputed tokens alike, and how to sample."""

    request: int
    tokens: np.ndarray
    sampling: Sampling


class Iteration(NamedTuple):
    """One iteration as ranks get it; `decode[g]` are the requests that decode on group g."""

    number: int
    chunks: tuple[Chunk, ...]
    decode: tuple[tuple[int, ...], ...]
    released: tuple[int, ...]
    new: tuple[NewRequest, ...]
    keep_logits: bool = False


class RankConfig(NamedTuple):
    """Everything that a rank is told at its start."""

    rank: int
    model: ModelConfig
    layout: Layout
    device: Device
    kv: KvConfig
    store: str  # path of the private file store of ranks that are processes


@dataclass(frozen=True)
class Report:
    """What a rank says after an iteration: wall seconds by stage, bytes by use, tokens of requests it answers for."""

    number: int
    rank: int
    duration_s: float
    stages: dict[str, float]
    moved: dict[str, int]
    tokens: dict[int, int]
    kv_units: int
    overlap: str  # how the attention paths ran: none, turn, threads, streams, partition
    overlap_valid: bool
    busy_share: float
    launch_s_per_layer: float
    logits: dict[int, np.ndarray] = field(default_factory=dict)


class Ready(NamedTuple):
    """A rank has its weights and its KV pool."""

    rank: int
    facts: dict[str, object]


class Failure(NamedTuple):
    """A rank gives up."""

    rank: int
    number: int
    cause: str
    details: str
    lost_peer: bool


def resolve(plan: IterationPlan, number: int, new: tuple[NewRequest, ...], keep_logits: bool) -> Iteration:
    """The message of a plan: ids in place of live objects; empty chunks are dropped."""
    chunks = tuple(
        Chunk(chunk.request.id, chunk.start, tuple(chunk.shards), chunk.last, chunk.group)
        for chunk in plan.prefill
        if chunk.tokens
    )
    decode = tuple(tuple(batch.members) for batch in plan.decode)
    return Iteration(number, chunks, decode, tuple(plan.released), new, keep_logits)
