"""One lockstep loop in which prefill chunks and decodes share iterations over all groups.

Conflux, chunked prefill and uniform sequence parallelism are this loop with different layouts, costs and KV.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from time import perf_counter
from typing import Any

import simpy
from mypy_extensions import mypyc_attr

from confsim.kv.pools import BlockPool, KvStore
from confsim.policies.base import Dispatch, Placement
from confsim.run.plan import DecodeBatch, DecodeLoad, IterationPlan, IterationTiming, PrefillChunk
from confsim.run.request import Request
from confsim.run.serving import Serving
from confsim.schemes.admission import Admission
from confsim.schemes.base import Instance, Setup
from confsim.schemes.cost import CoBatchCost
from confsim.schemes.fill import Fill, Limits
from confsim.schemes.inbox import Inbox


@mypyc_attr(allow_interpreted_subclasses=True)
class CoBatchInstance(Instance):
    """The loop: admit prompts, plan, have the backend time the plan, apply what came out."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        cost: CoBatchCost,
        kv: KvStore,
        limits: Limits,
        dispatch: Callable[[Sequence[int]], Dispatch],
        placement: Placement,
    ) -> None:
        super().__init__(setup)
        self.cost = cost
        self.kv = kv
        self.limits = limits
        self._queue = setup.policy.new_order()
        self.serving = serving = Serving(setup.env, setup.ledger, kv, name, setup.instance)
        latency, noise = cost.latency, setup.noise(serving.loop.index)
        self._backend = setup.backend.create(cost, noise, latency.tp, latency.sp, name)
        serving.backend = self._backend
        self._inbox = Inbox(self._queue, cost.async_schedule)
        fill = Fill(cost, dispatch, limits, kv.block_tokens)
        self._admission = Admission(serving, self._queue, cost, fill, limits, placement)
        self._paused = tuple(DecodeBatch(group) for group in range(len(kv.pools)))  # no decodes in an iteration
        self._in_transfer = 0
        self._lockstep_wait_s = 0.0
        self.crowded = setup.cluster.instances > 1  # most events of the run are not this instance's
        self.spawn(self._run())

    # What an engine and routers ask

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never be served here, or an empty string."""
        return self.kv.refusal(prompt_tokens, output_tokens)

    def enqueue(self, request: Request) -> None:
        """Queue a request and wake the loop if it is idle."""
        self._inbox.take(request)
        self.serving.rouse()

    def preload(self, request: Request, gpu: int) -> bool:
        """Let a request decode on the group of a GPU, as if its prompt had just been prefilled."""
        if not self.serving.preload(request, gpu * len(self.kv.pools) // self.setup.cluster.gpus):
            return False
        self._count(request)
        self._admission.comes(request)
        self.serving.rouse()
        return True

    def pools(self) -> tuple[BlockPool, ...]:
        """Every KV pool."""
        return self.kv.pools

    def audit(self) -> None:
        """Recount what the pools hold."""
        self.serving.audit()

    def counters(self) -> Mapping[str, float]:
        """Iterations whose attention ran in turn, and what a group waited for others in decode-only iterations."""
        return {"in_turn_iterations": self.cost.in_turn_iterations, "lockstep_wait_s": self._lockstep_wait_s}

    # The loop

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, serving, backend = self.env, self.serving, self._backend
        while True:
            began = perf_counter()
            plan, load = self._plan(env.now)
            self.ledger.schedule_pass_s.append(perf_counter() - began)
            late = self._inbox.planned(plan is not None)
            if plan is None:
                if late:
                    continue
                self._check_progress()
                yield serving.sleep()
                continue
            if not plan.prefill and not late and backend.can_run_ahead and self._may_run_ahead():
                wait_s = self.cost.lockstep_wait_s(plan.decode, load)
                steps = yield from serving.run_ahead(plan, load, len(self._queue), self.crowded)
                self._lockstep_wait_s += steps * wait_s
                self._step()
                continue
            start_s = env.now
            queued, used = len(self._queue), serving.used_blocks()
            backend.submit(plan)
            timing = backend.result()
            yield env.timeout(timing.duration_s)
            context = 0
            for batch in plan.decode:
                context += batch.context_tokens
            shards = plan.shards(len(load.counts))
            serving.track.iteration(start_s, env.now, timing, shards, load.counts, queued, used, context)
            self._apply(plan, timing)

    def _may_run_ahead(self) -> bool:
        """Whether nothing but an event can change the next plans.

        Decodes do not change whether the head of a queue gets its KV, unless they evict cached blocks that it hits.
        """
        if not len(self._queue) or self._admission.no_slot:
            return True
        kv = self.kv
        return self._admission.blocked and self._queue.time_free and kv.whole_prompt and not kv.copies.idle

    def _check_progress(self) -> None:
        if len(self._queue) and not self._in_transfer:
            raise RuntimeError(f"no progress with {len(self._queue)} requests queued and none running")

    # Planning

    def _plan(self, now_s: float) -> tuple[IterationPlan | None, DecodeLoad]:
        serving, cost = self.serving, self.cost
        batches = serving.loop.batches
        if serving.landed:
            self._admission.joins(serving.landed)
            serving.join_landed()
        grown = serving.grow(self._admission.make_room)  # if not, a transfer must end first
        load = cost.load(batches)
        if not grown:
            return None, load
        preempted = self.ledger.preemptions
        chunks: tuple[PrefillChunk, ...] = ()
        if len(self._queue):
            pause = self.limits.prefill_first
            chunks = self._admission.chunks(now_s, cost.load(self._paused) if pause else load)
            if pause and chunks:
                batches = self._paused
            if batches is self._paused or self.ledger.preemptions != preempted:
                load = cost.load(batches)
        if not chunks and not load.total:
            return None, load
        return IterationPlan(chunks, batches, serving.take_released(), load), load

    # Applying an iteration

    def _apply(self, plan: IterationPlan, timing: IterationTiming) -> None:
        if plan.decode is not self._paused:
            self._step()
        for chunk in plan.prefill:
            request = chunk.request
            request.prefilled += chunk.tokens
            self.kv.copies.written(request)
            if not chunk.last:
                self._queue.push(request)
                continue
            self.ledger.emit(request, self.env.now)
            if chunk.group < 0:
                self._end(request)
            elif timing.transfer_s > timing.duration_s:
                self._in_transfer += 1
                self.env.process(self._transfer(request, timing.transfer_s - timing.duration_s))
            else:
                self.serving.land(request)

    def _step(self) -> None:
        for request in self.serving.loop.step(self.env.now):
            self._end(request)

    def _transfer(self, request: Request, wait_s: float) -> Generator[simpy.Event, Any, None]:
        """What of a KV transfer outlasts the last chunk's iteration."""
        yield self.env.timeout(wait_s)
        self._in_transfer -= 1
        self.serving.land(request)
        self.serving.rouse()

    def _end(self, request: Request) -> None:
        self.serving.end(request)
        self.complete(request, self.env.now)
