"""Decode iterations of a strand: their slots are taken, they are recorded, and those that end leave."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy

from confsim.run.backend import Backend
from confsim.run.plan import DecodeRun, IterationPlan
from confsim.run.request import Request
from confsim.schemes.elastic.batch import Batch, Strand
from confsim.schemes.elastic.state import State

MAX_STEPS = 256  # iterations computed ahead


class Decodes:
    """Runs the decodes of strands."""

    def __init__(self, state: State, finish: Callable[[Request], None]) -> None:
        self._state = state
        self._finish = finish

    def run(self, strand: Strand, until_s: float, most: int) -> Generator[simpy.Event, Any, list[int]]:
        """Up to `most` iterations, the last one starting before `until_s`; returns instances released at their end."""
        state = self._state
        start_s = state.env.now
        steps = min(most, MAX_STEPS, strand.loop.steps_to_end())
        for batch in strand.batches:
            steps = min(steps, state.slots.steps_of(batch))
        plan = strand.plan(state.take_released())
        run = self._timed(strand.backend, plan, until_s, steps)
        ends = run.ends_s
        self._record(strand, plan, run, start_s)
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

    def _timed(self, backend: Backend, plan: IterationPlan, until_s: float, steps: int) -> DecodeRun:
        """Iterations of a plan's decodes: as many as the backend looks ahead to, or one."""
        now_s = self._state.env.now
        if backend.can_run_ahead:
            return backend.run_ahead(plan, now_s, until_s, steps)
        backend.submit(plan)
        one = backend.result()
        return DecodeRun(
            [now_s + one.duration_s], [one.decode_attention_s], one.overhead_s, False, one.linear_s, one.head_s,
            one.communication_s,
        )  # fmt: skip

    def _record(self, strand: Strand, plan: IterationPlan, run: DecodeRun, start_s: float) -> None:
        state = self._state
        counts = [0] * state.instances
        for share in plan.decode:
            counts[share.group] += share.count
        context = strand.loop.batches[0].context_tokens
        strand.track.run(start_s, run, tuple(counts), len(state.queue), state.used_blocks(), context)


def release(strand: Strand, batch: Batch) -> list[int]:
    """The instances that a batch no longer needs; without members it ends."""
    if batch.members:
        return batch.release_empty()
    strand.batches.remove(batch)
    return batch.instances
