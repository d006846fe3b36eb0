"""A prefill worker: whole prompts in batches, their KV kept until a decode worker has pulled it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy
from mypy_extensions import mypyc_attr

from confsim.kv.pools import BlockPool, PromptCopies
from confsim.run.plan import IterationPlan, IterationTiming, PrefillChunk
from confsim.run.request import Request, RequestState
from confsim.run.serving import Bell
from confsim.schemes.base import Setup
from confsim.schemes.cost import CoBatchCost
from confsim.schemes.inbox import Inbox


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PrefillLimits:
    """A batch holds at most `max_batch` prompts of `max_batched_tokens` together; a longer prompt runs alone."""

    max_batch: int
    max_batched_tokens: int


class PromptCost(CoBatchCost):
    """Whole prompts on one TP group, where nothing decodes and nothing is exchanged."""

    def timing(self, plan: IterationPlan) -> IterationTiming:
        """Every term of a batch of prompts."""
        latency, attention_s, tokens = self.latency, 0.0, 0
        for chunk in plan.prefill:
            tokens += chunk.tokens
            attention_s += latency.prefill_attention_s(chunk.tokens, chunk.start)
        linear_s, head_s = latency.linear_s(tokens), latency.head_s(len(plan.prefill))
        gpu_s = linear_s + attention_s + head_s
        overhead_s = self.exposed_s(self.host_s(0, len(plan.prefill)), gpu_s)
        total_s = gpu_s + overhead_s
        return IterationTiming(
            total_s, linear_s, attention_s, 0.0, 0.0, head_s, overhead_s, predicted_s=total_s
        )  # fmt: skip


class PrefillWorker:
    """One TP group that only prefills, group `index` of its instance.

    `hand_over` gets each request whose first token is out, with this worker; `complete` those that end with it.
    """

    def __init__(
        self,
        setup: Setup,
        name: str,
        index: int,
        cost: PromptCost,
        capacity_tokens: int,
        limits: PrefillLimits,
        hand_over: Callable[[Request, PrefillWorker], None],
        complete: Callable[[Request, float], None],
    ) -> None:
        self._env = setup.env
        self._ledger = setup.ledger
        self._cost = cost
        self._limits = limits
        self._hand_over = hand_over
        self._complete = complete
        self._ring = ((index,),)
        self.pool = BlockPool(capacity_tokens // setup.kv.block_tokens)
        entry_tokens = setup.entry_tokens if setup.kv.prefix_cache else 0
        self.copies = PromptCopies((self.pool,), setup.kv.block_tokens, entry_tokens)
        self._queue = setup.policy.new_order()
        self._track = setup.ledger.new_track(name, setup.instance)
        noise = setup.noise(len(setup.ledger.tracks))
        self._backend = setup.backend.create(cost, noise, cost.latency.tp, cost.latency.sp, name)
        self._inbox = Inbox(self._queue, cost.async_schedule)
        self._batch: list[Request] = []
        self._released: list[int] = []  # requests that gave their KV up since the last plan
        self._bell = Bell(setup.env)

    @property
    def waiting(self) -> int:
        """Requests whose prefill is not over."""
        return len(self._inbox) + len(self._batch)

    def enqueue(self, request: Request) -> None:
        """Take a request."""
        self._inbox.take(request)
        self._bell.ring()

    def pulled(self, request: Request) -> None:
        """A decode worker has the KV: give up this copy (it stays in the prefix cache)."""
        self._release(request)
        self._bell.ring()

    def audit(self) -> None:
        """Recount the pool."""
        pool = self.pool
        assert pool.free + pool.held + pool.cached == pool.capacity
        assert pool.free >= 0 and pool.held >= 0 and pool.cached >= 0
        assert pool.held == self.copies.held_units(), (pool.held, self.copies.held_units())

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The worker's loop, a SimPy process."""
        env = self._env
        while True:
            self._batch = self._admit()
            if self._inbox.planned(bool(self._batch)) and not self._batch:
                continue
            if not self._batch:
                yield self._bell.wait()
                continue
            start_s = env.now
            plan = self._plan(self._batch)
            self._backend.submit(plan)
            timing = self._backend.result()
            yield env.timeout(timing.duration_s)
            self._track.iteration(
                start_s, env.now, timing, plan.shards(1), (0,), len(self._queue), self.pool.held, 0
            )  # fmt: skip
            for request in self._batch:
                self._finish(request)

    def _admit(self) -> list[Request]:
        """Prompts in queue order until one does not fit."""
        batch: list[Request] = []
        tokens = 0
        while len(batch) < self._limits.max_batch:
            request = self._queue.pop(self._env.now, self._predict_s)
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

    def _predict_s(self, request: Request) -> float:
        """Prefilling a request alone."""
        return self._cost.timing(self._price([request])).duration_s

    def _price(self, batch: Sequence[Request], released: tuple[int, ...] = ()) -> IterationPlan:
        """The rest of every prompt of a batch in one iteration."""
        chunks = tuple([PrefillChunk(one, one.prefilled, (one.remaining_prefill,), last=True) for one in batch])
        return IterationPlan(chunks, (), released, rings=self._ring)

    def _plan(self, batch: Sequence[Request]) -> IterationPlan:
        released = tuple(self._released)
        self._released.clear()
        return self._price(batch, released)

    def _finish(self, request: Request) -> None:
        request.prefilled = request.target_tokens
        self.copies.written(request)
        self._ledger.emit(request, self._env.now)
        if self._ledger.oracle.left(request) > 0:
            request.move_to(RequestState.TRANSFER)
            self._hand_over(request, self)
            return
        self._release(request)
        self._complete(request, self._env.now)

    def _release(self, request: Request) -> None:
        self.copies.release(request)
        self._released.append(request.id)
