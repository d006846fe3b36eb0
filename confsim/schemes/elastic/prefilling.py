"""Prefill batches: grouped by the dynamic programme, their slots reserved, and run on their instances."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from confsim.run.plan import IterationPlan, IterationTiming, PrefillChunk
from confsim.run.request import Request, RequestState
from confsim.schemes.elastic.batch import Strand
from confsim.schemes.elastic.batching import partition
from confsim.schemes.elastic.law import sums_of
from confsim.schemes.elastic.state import State


@dataclass(slots=True)
class Prefill:
    """A prefill batch and how long it takes; the instances are the ring of its plan."""

    plan: IterationPlan
    timing: IterationTiming
    predicted_s: float  # by the fitted law


def longest_s(prefills: Sequence[Prefill]) -> float:
    """Seconds until prefills that run side by side have ended."""
    return max([prefill.timing.duration_s for prefill in prefills])


class Prefills:
    """Makes prefill batches and runs them."""

    def __init__(self, state: State, split: bool, finish: Callable[[Request], None]) -> None:
        self._state = state
        self._split = split
        self._finish = finish

    def batch(self, requests: list[Request], instances: Sequence[int]) -> list[Prefill]:
        """The dynamic programme's batches, their slots reserved and their times drawn."""
        state = self._state
        by_length = sorted(requests, key=lambda request: -request.target_tokens)
        order = sorted(instances, key=lambda index: (state.slots.pools[index].held, index))
        lengths = [request.target_tokens for request in by_length]
        rooms = [state.room(index) for index in order]
        shares = partition(lengths, rooms, state.law, self._split)
        return [self._place(by_length[share.first : share.last], order[share.left : share.right]) for share in shares]

    def _place(self, requests: list[Request], instances: list[int]) -> Prefill:
        state = self._state
        state.slots.place(requests, instances)
        state.prefilling.update(instances)
        plan = self._plan(requests, instances)
        state.main.backend.submit(plan)
        timing = state.main.backend.result()
        for request in requests:
            request.move_to(RequestState.PREFILL)
            if request.prefill_start_s < 0:
                request.prefill_start_s = state.env.now
        return Prefill(plan, timing, state.law.batch_s(len(instances), sums_of(requests)))

    def _plan(self, requests: list[Request], instances: list[int]) -> IterationPlan:
        """Whole prompts, striped over the ring one behind the other; a prompt's group is where its KV begins."""
        state = self._state
        chunks = []
        degree, before = len(instances), 0
        for request in requests:
            tokens = request.target_tokens
            shards = [0] * state.instances
            for place, index in enumerate(instances):
                shards[index] = (tokens - (place - before) % degree + degree - 1) // degree
            before += tokens
            goes_on = state.ledger.oracle.left(request) > 1
            group = next(iter(state.slots.held[request.id].tokens)) if goes_on else -1
            chunks.append(PrefillChunk(request, 0, tuple(shards), True, group))
        return IterationPlan(tuple(chunks), (), state.take_released(), rings=(tuple(instances),))

    def run(self, strand: Strand, prefills: list[Prefill]) -> Generator[simpy.Event, Any, list[int]]:
        """Run prefill batches side by side until the longest has ended; returns instances that hold none of them."""
        start_s = self._state.env.now
        yield self._state.env.timeout(longest_s(prefills))
        released: list[int] = []
        for prefill in prefills:
            self._record(strand, prefill, start_s)
            self._state.prefilling.difference_update(prefill.plan.rings[0])
            staying = [chunk.request for chunk in prefill.plan.prefill if self._first_token(chunk.request)]
            batch = self._state.slots.batch_of(staying)
            released += [index for index in prefill.plan.rings[0] if index not in batch.used]
            if staying:
                strand.batches.append(batch)
        return released

    def _first_token(self, request: Request) -> bool:
        """Emit the token of a prefill; true if the request goes on."""
        state = self._state
        request.prefilled = request.target_tokens
        state.ledger.emit(request, state.env.now)
        if state.ledger.oracle.left(request) > 0:
            request.move_to(RequestState.PAUSED)
            return True
        request.group = next(iter(state.slots.held[request.id].tokens))
        state.slots.drop(request, None)
        self._finish(request)
        return False

    def _record(self, strand: Strand, prefill: Prefill, start_s: float) -> None:
        state, timing = self._state, prefill.timing
        strand.track.iteration(
            start_s, start_s + timing.duration_s, timing, prefill.plan.shards(state.instances),
            (0,) * state.instances, len(state.queue), state.used_blocks(), 0,
        )  # fmt: skip
