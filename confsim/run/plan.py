"""What iterations do, and how long they took: the messages between a scheme and its backend.

Every scheme plans each iteration, or group of layers, of each of its loops as an `IterationPlan` and has a `Backend` of
that loop time it, with `submit` and `result`; decodes alone may be looked ahead to, which gives a `DecodeRun`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from confsim.run.request import Request


@dataclass(slots=True)
class DecodeBatch:
    """The running decodes of one group; a live object, kept up to date as requests join and leave.

    `context_tokens` is the KV that the next iteration reads: for each member the tokens before the one it computes,
    plus that one.
    """

    group: int
    count: int = 0
    context_tokens: int = 0
    members: dict[int, Request] = field(default_factory=dict)


class PrefillChunk(NamedTuple):
    """Tokens `[start, start + sum(shards))` of a request's target; `shards[g]` of them on group g, in order.

    `last` chunks emit a token; `group` is where the request decodes afterwards (-1: it ends with this token or
    this is not the last chunk) and where its KV is sent.
    """

    request: Request
    start: int
    shards: tuple[int, ...]
    last: bool = False
    group: int = -1

    @property
    def tokens(self) -> int:
        """Tokens of the chunk over all groups."""
        return sum(self.shards)


class DecodeLoad(NamedTuple):
    """What the decodes of an iteration weigh, fixed while its prefill is planned."""

    counts: tuple[int, ...]  # decode tokens stacked on each group
    peak: int
    total: int
    attention_s: float  # predicted
    context_tokens: int = 0  # of all decodes together


WHOLE_GPU = -1


class IterationPlan(NamedTuple):
    """One iteration: prefill chunks in queue order, and one decode batch a group.

    `released` names the requests whose KV was freed since the previous plan (ended or preempted): a backend that
    holds real KV drops theirs before it runs. `load` is the weight of the decodes where the planner knows it.
    `rings` are the groups that work together on a sequence where that is not all of them: each ring computes prompts
    of its own, or the decodes of its groups, which come ring by ring in `decode`. `layers` (first, end) are the layers
    that run where those are not all. `split` says which share of every GPU's SMs the iteration has beside another one,
    as an index into the scheme's list of splits.
    """

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeBatch, ...]
    released: tuple[int, ...] = ()
    load: DecodeLoad | None = None
    rings: tuple[tuple[int, ...], ...] = ()
    layers: tuple[int, int] | None = None
    split: int = WHOLE_GPU

    def shards(self, groups: int) -> tuple[int, ...]:
        """Prefill tokens of each group over all chunks."""
        if not self.prefill:
            return (0,) * groups
        if len(self.prefill) == 1:
            return self.prefill[0].shards
        return tuple(map(sum, zip(*[chunk.shards for chunk in self.prefill], strict=True)))


class IterationTiming(NamedTuple):
    """Seconds of one iteration; the parts are for reports and need not add up (the attention paths overlap)."""

    duration_s: float
    linear_s: float = 0.0
    prefill_attention_s: float = 0.0
    decode_attention_s: float = 0.0
    communication_s: float = 0.0
    head_s: float = 0.0
    overhead_s: float = 0.0  # host time not hidden behind the GPU
    transfer_s: float = 0.0  # KV transfer of last chunks; what outlasts the iteration delays the first decode
    predicted_s: float = 0.0  # what the planner's model said


class DecodeRun(NamedTuple):
    """The next iterations of nothing but the same decodes: ends, and decode attention of each; parts of all of them."""

    ends_s: list[float]
    attention_s: list[float]
    overhead_s: float  # host time of an iteration
    hidden: bool  # only what outlasts the GPU is exposed
    linear_s: float
    head_s: float
    communication_s: float = 0.0
