"""A prefill worker: whole prompts in batches, their KV kept until a decode worker has pulled it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from confsim.kv.pools import BlockPool, PromptCopies
from confsim.latency.base import LatencyModel
from confsim.run.plan import IterationTiming
from confsim.run.request import Request, RequestState
from confsim.schemes.base import Setup


@dataclass(frozen=True)
class PrefillLimits:
    """A batch holds at most `max_batch` prompts of `max_batched_tokens` together; a longer prompt runs alone."""

    max_batch: int
    max_batched_tokens: int


class PrefillWorker:
    """One TP group that only prefills.

    `hand_over` gets each request whose first token is out, with this worker; `complete` those that end with it.
    """

    def __init__(
        self,
        setup: Setup,
        name: str,
        latency: LatencyModel,
        capacity_tokens: int,
        limits: PrefillLimits,
        async_schedule: bool,
        hand_over: Callable[[Request, PrefillWorker], None],
        complete: Callable[[Request, float], None],
    ) -> None:
        self._env = setup.env
        self._ledger = setup.ledger
        self._latency = latency
        self._limits = limits
        self._async = async_schedule
        self._hand_over = hand_over
        self._complete = complete
        self.pool = BlockPool(capacity_tokens // setup.kv.block_tokens)
        entry_tokens = setup.entry_tokens if setup.kv.prefix_cache else 0
        self.copies = PromptCopies((self.pool,), setup.kv.block_tokens, entry_tokens)
        self._queue = setup.policy.new_order()
        self._track = setup.ledger.new_track(name, setup.instance)
        self._noise = setup.noise(len(setup.ledger.tracks))
        self._batch: list[Request] = []
        self._wake: simpy.Event | None = None

    @property
    def waiting(self) -> int:
        """Requests whose prefill is not over."""
        return len(self._queue) + len(self._batch)

    def enqueue(self, request: Request) -> None:
        """Take a request."""
        self._queue.push(request)
        self._rouse()

    def pulled(self, request: Request) -> None:
        """A decode worker has the KV: give up this copy (it stays in the prefix cache)."""
        self.copies.release(request)
        self._rouse()

    def audit(self) -> None:
        """Recount the pool."""
        pool = self.pool
        assert pool.free + pool.held + pool.cached == pool.capacity
        assert pool.free >= 0 and pool.held >= 0 and pool.cached >= 0
        assert pool.held == self.copies.held_units(), (pool.held, self.copies.held_units())

    def predict_s(self, request: Request) -> float:
        """Prefilling a request alone."""
        return self._timing([request]).duration_s

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The worker's loop, a SimPy process."""
        env = self._env
        while True:
            self._batch = self._next_batch()
            if not self._batch:
                self._wake = env.event()
                yield self._wake
                continue
            start_s = env.now
            timing = self._timing(self._batch)
            if self._noise.std:
                timing = timing._replace(duration_s=timing.duration_s * self._noise.factor())
            tokens = sum(request.remaining_prefill for request in self._batch)
            yield env.timeout(timing.duration_s)
            self._track.iteration(
                start_s, env.now, timing, (tokens,), (0,), len(self._queue), self.pool.held, 0
            )  # fmt: skip
            for request in self._batch:
                self._finish(request)

    def _next_batch(self) -> list[Request]:
        """Prompts in queue order until one does not fit."""
        batch: list[Request] = []
        tokens = 0
        while len(batch) < self._limits.max_batch:
            request = self._queue.pop(self._env.now, self.predict_s)
            if request is None:
                break
            if not self.copies.start(request, request.target_tokens):
                self._queue.push(request)
                break
            if batch and tokens + request.remaining_prefill > self._limits.max_batched_tokens:
                self.copies.cancel(request)
                self._queue.push(request)
                break
            tokens += request.remaining_prefill
            request.move_to(RequestState.PREFILL)
            request.prefill_start_s = self._env.now
            batch.append(request)
        return batch

    def _timing(self, batch: list[Request]) -> IterationTiming:
        latency = self._latency
        linear_s = latency.linear_s(sum(request.remaining_prefill for request in batch))
        attention_s = 0.0
        for request in batch:
            attention_s += latency.prefill_attention_s(request.remaining_prefill, request.prefilled)
        head_s = latency.head_s(len(batch))
        gpu_s = linear_s + attention_s + head_s
        overhead_s = latency.overhead_s(len(batch))
        if self._async:
            overhead_s = max(0.0, overhead_s - gpu_s)
        duration_s = gpu_s + overhead_s
        return IterationTiming(
            duration_s, linear_s, attention_s, 0.0, 0.0, head_s, overhead_s, predicted_s=duration_s
        )  # fmt: skip

    def _finish(self, request: Request) -> None:
        request.prefilled = request.target_tokens
        self.copies.written(request)
        self._ledger.emit(request, self._env.now)
        if self._ledger.oracle.left(request) > 0:
            request.move_to(RequestState.TRANSFER)
            self._hand_over(request, self)
            return
        self.copies.release(request)
        self._complete(request, self._env.now)
