"""Requests of our own on a running runtime, and plans over them: what warm-up and profiling execute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from confsim.run.request import Request
from executor.runtime import ExecutedIteration, Runtime

FIRST_ID = 1 << 40  # above the rows of any trace


class Probe:
    """Prompts of random tokens, prefilled in even shards and decoded on the group they are told."""

    def __init__(self, ranks: Runtime, seed: int = 0) -> None:
        self.ranks = ranks
        self._rng = np.random.default_rng((seed, 0x9B))
        self._next = FIRST_ID
        self._contexts: dict[int, int] = {}  # KV tokens of requests that decode
        self._dropped: list[int] = []

    def request(self, tokens: int) -> Request:
        """A new prompt of so many tokens, known to the ranks."""
        request = Request(self._next, 0.0, tokens)
        self._next += 1
        ids = self._rng.integers(0, self.ranks.model.vocab_size, tokens, dtype=np.int32)
        self.ranks.add(request.id, ids)
        return request

    def context(self, request: Request) -> int:
        """Tokens of KV that the request's next decode reads, its own included."""
        return self._contexts[request.id] + 1

    def run(
        self,
        chunks: Sequence[tuple[Request, int, int]] = (),
        decode: Sequence[Sequence[Request]] = (),
    ) -> ExecutedIteration:
        """Execute chunks of (request, tokens, group to decode on after the last chunk) beside decodes by group."""
        groups = self.ranks.layout.groups
        prefill: list[PrefillChunk] = []
        for request, tokens, group in chunks:
            last = tokens == request.remaining_prefill
            shards = even(tokens, groups, len(prefill))
            prefill.append(PrefillChunk(request, request.prefilled, shards, last, group if last else -1))
        batches = tuple(self._batch(group, decode[group] if decode else ()) for group in range(groups))
        plan = IterationPlan(tuple(prefill), batches, tuple(self._dropped))
        executed = self.ranks.run(plan)
        for dropped in self._dropped:
            self.ranks.forget(dropped)
        self._dropped.clear()
        self._advance(plan)
        return executed

    def drop(self, *requests: Request) -> None:
        """Free requests with the next plan."""
        for request in requests:
            self._contexts.pop(request.id, None)
            self._dropped.append(request.id)

    def flush(self) -> None:
        """Free now what was dropped."""
        if self._dropped:
            self.run()

    def _batch(self, group: int, members: Sequence[Request]) -> DecodeBatch:
        context = sum(self.context(request) for request in members)
        return DecodeBatch(group, len(members), context, {request.id: request for request in members})

    def _advance(self, plan: IterationPlan) -> None:
        for batch in plan.decode:
            for request in batch.members:
                self._contexts[request] += 1
        for chunk in plan.prefill:
            chunk.request.prefilled += chunk.tokens
            if chunk.group >= 0:
                self._contexts[chunk.request.id] = chunk.request.prompt_tokens


def even(tokens: int, groups: int, turn: int = 0) -> tuple[int, ...]:
    """Shards that differ by one token at most; the larger ones go round with `turn`."""
    share, rest = divmod(tokens, groups)
    return tuple(share + ((group + turn) % groups < rest) for group in range(groups))


def warm_up(ranks: Runtime, iterations: int, tokens: int = 64) -> None:
    """Run plans of every kind (prefill, hand-over, decode, mixed) that touch what a first use would have to load."""
    if iterations <= 0:
        return
    probe = Probe(ranks)
    groups = ranks.layout.groups
    running: list[list[Request]] = [[] for _ in range(groups)]
    for number in range(iterations - 1):
        request = probe.request(tokens + number)
        group = number % groups
        probe.run([(request, request.prompt_tokens, group)], running)
        running[group].append(request)
    probe.drop(*(request for members in running for request in members))
    probe.run()
