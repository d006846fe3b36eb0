"""Decode iterations of a strand: their slots are taken, they are recorded, and those that end leave."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy

from confsim.run.request import Request
from confsim.schemes.elastic.ahead import Stretch, stretch
from confsim.schemes.elastic.batch import Batch, Strand
from confsim.schemes.elastic.state import State


class Decodes:
    """Runs the decodes of strands."""

    def __init__(self, state: State, finish: Callable[[Request], None]) -> None:
        self._state = state
        self._finish = finish

    def run(self, strand: Strand, until_s: float, most: int) -> Generator[simpy.Event, Any, list[int]]:
        """Up to `most` iterations, the last one starting before `until_s`; returns instances released at their end."""
        state = self._state
        start_s = state.env.now
        ahead = stretch(state.cost, state.slots, strand, start_s, until_s, most)
        ends = ahead.run.ends_s
        self._record(strand, ahead, start_s)
        for batch in strand.batches:
            state.slots.grow(batch, len(ends))
        strand.loop.advance(ends[:-1])
        strand.unfinished = 1
        yield state.env.timeout(ends[-1] - start_s)
        strand.unfinished = 0
        touched: dict[Batch, None] = {}
        for request in strand.loop.step(state.env.now):
            batch = next(batch for batch in strand.batches if request.id in batch.members)
            state.slots.leave(request, batch, strand)
            self._finish(request)
            touched[batch] = None
        released: list[int] = []
        for batch in touched:
            released += release(strand, batch)
        return released

    def _record(self, strand: Strand, ahead: Stretch, start_s: float) -> None:
        state = self._state
        counts = [0] * state.instances
        for batch in strand.batches:
            for instance, size in batch.masters:
                counts[instance] += size
        context = strand.loop.batches[0].context_tokens
        strand.track.run(
            start_s, ahead.run, ahead.linear_s, ahead.head_s, tuple(counts), len(state.queue), state.used_blocks(),
            context, communication_s=ahead.communication_s,
        )  # fmt: skip


def release(strand: Strand, batch: Batch) -> list[int]:
    """The instances that a batch no longer needs; without members it ends."""
    if batch.members:
        return batch.release_empty()
    strand.batches.remove(batch)
    return batch.instances
