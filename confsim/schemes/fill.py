"""Filling an iteration with prefill: the largest budget that meets the target, in queue order."""

from __future__ import annotations

from dataclasses import dataclass

from confsim.plan import PrefillChunk
from confsim.policies.base import Dispatch
from confsim.request import Request
from confsim.schemes.cost import CoBatchCost, DecodeLoad
from confsim.slo import TOLERANCE


@dataclass(frozen=True)
class Limits:
    """What bounds an iteration.

    `chunk_tokens` is a static total, decodes included (None: the largest budget that meets `target_s`);
    `max_batched_tokens` caps the tokens stacked on a group; at most `max_partial_prefills` prompts are in progress.
    """

    target_s: float
    chunk_tokens: int | None = None
    max_batched_tokens: int = 8192
    max_partial_prefills: int = 4


class Fill:
    """The prefill side of an iteration while it is filled in queue order."""

    def __init__(
        self, cost: CoBatchCost, load: DecodeLoad, dispatch: Dispatch, limits: Limits, block_tokens: int
    ) -> None:
        self._cost = cost
        self._load = load
        self._dispatch = dispatch
        self._target_s = limits.target_s * TOLERANCE
        self._block_tokens = block_tokens
        self._static = limits.chunk_tokens is not None
        self._decodes_s = cost.duration_s(load, load.peak, 0, 0.0, 0, 0) if load.total else 0.0
        self._planned_s = self._decodes_s  # with the chunks taken so far
        self.room = dispatch.capacity(limits.max_batched_tokens)
        if limits.chunk_tokens is not None:
            self.room = min(self.room, limits.chunk_tokens - load.total)
        if self.room <= 0 or self._decodes_s > self._target_s:
            self.room = block_tokens  # the oldest prefill progresses
            self._static = True
        self.tokens = 0
        self.attention_s = 0.0
        self.firsts = 0
        self.chunks: list[PrefillChunk] = []

    def predict_s(self, request: Request) -> float:
        """Prefilling the rest of a request alone, at the present decodes and depth."""
        rest = request.remaining_prefill
        if self._static:
            tokens = min(rest, max(self.room, 1))
        else:
            tokens = self._most(request, min(rest, self.room), 0, 0.0, 0, 0) or self._block_tokens
        seconds = self._seconds(request, min(tokens, rest), 0, 0.0, 0, 0)
        return seconds * max(1.0, rest / tokens)

    def fit(self, request: Request) -> int:
        """The most tokens of a request that the iteration has room for behind what it holds."""
        want = min(request.remaining_prefill, self.room)
        if self._static:
            return want
        return self._most(request, want, self.tokens, self.attention_s, self.firsts, len(self.chunks))

    def add(self, request: Request, tokens: int, last: bool, group: int) -> None:
        """Take a chunk in."""
        self._planned_s = self._seconds(request, tokens, self.tokens, self.attention_s, self.firsts, len(self.chunks))
        self.chunks.append(PrefillChunk(request, request.prefilled, (tokens,), last, group))
        self.attention_s += self._cost.latency.prefill_attention_s(tokens, request.prefilled)
        self.tokens += tokens
        self.room -= tokens
        self.firsts += last

    def spread(self) -> tuple[PrefillChunk, ...]:
        """The chunks with their tokens dealt over the groups."""
        if not self.chunks:
            return ()
        left = list(self._dispatch.spread(self.tokens))
        if len(self.chunks) == 1:
            return (self.chunks[0]._replace(shards=tuple(left)),)
        return tuple([self._deal(chunk, left) for chunk in self.chunks])

    def _deal(self, chunk: PrefillChunk, left: list[int]) -> PrefillChunk:
        """A chunk's shards in proportion to what is left of every group's share; the last chunk takes the rest."""
        total, tokens = sum(left), chunk.tokens
        shards = [share * tokens // total for share in left]
        for group in range(len(left)):
            while sum(shards) < tokens and shards[group] < left[group]:
                shards[group] += 1
        for group, shard in enumerate(shards):
            left[group] -= shard
        return chunk._replace(shards=tuple(shards))

    def _seconds(self, request: Request, n: int, tokens: int, attention_s: float, firsts: int, chunks: int) -> float:
        stacked, shard = self._dispatch.peak(tokens + n)
        attention_s += self._cost.latency.prefill_attention_s(n, request.prefilled)
        last = n == request.remaining_prefill
        return self._cost.duration_s(self._load, stacked, shard, attention_s, firsts + last, chunks + 1)

    def _most(self, request: Request, want: int, tokens: int, attention_s: float, firsts: int, chunks: int) -> int:
        """Largest n up to `want` whose iteration meets the target: false position inside a bracket."""
        target_s = self._target_s
        at_want = self._seconds(request, want, tokens, attention_s, firsts, chunks) - target_s
        if at_want <= 0.0:
            return want
        low, high = 0, want
        at_low = (self._planned_s if chunks else self._decodes_s) - target_s
        at_high = at_want
        side = 0
        while high - low > 1:
            guess = low + int((high - low) * at_low / (at_low - at_high)) if at_low < 0 else (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
            at_guess = self._seconds(request, guess, tokens, attention_s, firsts, chunks) - target_s
            if at_guess <= 0.0:
                low, at_low = guess, at_guess
                at_high = at_high / 2 if side > 0 else at_high
                side = 1
            else:
                high, at_high = guess, at_guess
                at_low = at_low / 2 if side < 0 else at_low
                side = -1
        return low
