"""One lockstep loop in which prefill chunks and decodes share iterations over all groups.

Conflux, chunked prefill and uniform sequence parallelism are this loop with different layouts, costs and KV.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from time import perf_counter
from typing import Any

import simpy
from mypy_extensions import mypyc_attr

from confsim.kv.pools import BlockPool, KvStore
from confsim.policies.base import Dispatch, GroupLoad, Placement
from confsim.run.backend import Backend
from confsim.run.holders import Holders
from confsim.run.model_backend import ModelBackend
from confsim.run.plan import DecodeBatch, DecodeLoad, IterationPlan, IterationTiming, PrefillChunk
from confsim.run.record import DecodeRun
from confsim.run.request import Request, RequestState
from confsim.schemes.base import Instance, Setup
from confsim.schemes.cost import CoBatchCost
from confsim.schemes.fill import Fill, Limits

AHEAD_STEPS = 32  # decode-only iterations looked ahead to where an event may cut them


@mypyc_attr(allow_interpreted_subclasses=True)
class CoBatchInstance(Instance):
    """The loop: plan, have the backend time the plan, apply what came out."""

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
        self._placement = placement
        self._queue = setup.policy.new_order()
        self.loop = self.ledger.new_loop(len(kv.pools), kv.block_tokens)
        self._paused = tuple(DecodeBatch(group) for group in range(len(kv.pools)))  # no decodes in an iteration
        self._track = self.ledger.new_track(name, setup.instance)
        self._noise = setup.noise(self.loop.index)
        latency = cost.latency
        self._backend: Backend = setup.backend.create(cost, self._noise, latency.tp, latency.sp, name)
        self._fill = Fill(cost, dispatch, limits, kv.block_tokens)
        self._holders = Holders()
        self._partials: dict[int, Request] = {}  # prompts in progress
        self._in_transfer = 0
        self._landed: list[Request] = []  # KV has arrived, decode starts in the next iteration
        self._released: list[int] = []
        self._aside: list[Request] = []  # taken from the queue in this pass and not planned
        self._lockstep_wait_s = 0.0
        self._coming = [0] * len(kv.pools)  # context of requests placed on a group that do not decode yet
        self._blocked = False  # the head of the queue waits for KV
        self._wake: simpy.Event | None = None
        self.crowded = setup.cluster.instances > 1  # most events of the run are not this instance's
        self._ahead: DecodeRun | None = None  # looked ahead to; an event of this instance cuts it
        self._process = self.spawn(self._run())

    # What an engine and routers ask

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never be served here, or an empty string."""
        return self.kv.refusal(prompt_tokens, output_tokens)

    def enqueue(self, request: Request) -> None:
        """Queue a request and wake the loop if it is idle."""
        self._queue.push(request)
        self._rouse()

    def preload(self, request: Request, gpu: int) -> bool:
        """Let a request decode on the group of a GPU, as if its prompt had just been prefilled."""
        group = gpu * len(self.kv.pools) // self.setup.cluster.gpus
        self.kv.copies.start(request, 0)
        if not self.kv.place(request, group):
            self.kv.copies.cancel(request)
            return False
        self._holders.add(request)
        self._count(request)
        request.prefilled = request.target_tokens
        request.group = group
        self._coming[group] += request.target_tokens + 1
        self._land(request)
        self._rouse()
        return True

    def pools(self) -> tuple[BlockPool, ...]:
        """Every KV pool."""
        return self.kv.pools

    def audit(self) -> None:
        """Recount what the pools hold."""
        self.kv.audit(self.loop, self._holders)

    def counters(self) -> Mapping[str, float]:
        """Iterations that overlap made slower, and what a group waited for others in decode-only iterations."""
        return {"overlap_slower_iterations": self.cost.slower_overlaps, "lockstep_wait_s": self._lockstep_wait_s}

    # The loop

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env = self.env
        while True:
            began = perf_counter()
            plan, load = self._plan(env.now)
            self.ledger.schedule_pass_s.append(perf_counter() - began)
            if plan is None:
                self._check_progress()
                self._wake = env.event()
                yield self._wake
                continue
            if not plan.prefill and isinstance(self._backend, ModelBackend) and self._may_run_ahead():
                yield from self._decode_run(load)
                continue
            start_s = env.now
            queued, used = len(self._queue), self._used_blocks()
            self._backend.submit(plan)
            timing = self._backend.result()
            yield env.timeout(timing.duration_s)
            context = 0
            for batch in plan.decode:
                context += batch.context_tokens
            shards = plan.shards(len(load.counts))
            self._track.iteration(start_s, env.now, timing, shards, load.counts, queued, used, context)
            self._apply(plan, timing, start_s)

    def _may_run_ahead(self) -> bool:
        """Whether nothing but an event can change the next plans.

        Decodes do not change whether the head of a queue gets its KV, unless they evict cached blocks that it hits.
        """
        if not len(self._queue):
            return True
        kv = self.kv
        return self._blocked and self._queue.time_free and kv.whole_prompt and not kv.copies.entry_units

    def _decode_run(self, load: DecodeLoad) -> Generator[simpy.Event, Any, None]:
        """Iterations of nothing but the same decodes, up to the next end, event or shortage of KV."""
        env, loop, cost = self.env, self.loop, self.cost
        start_s = env.now
        steps, until_s = loop.steps_to_end(), env.peek()
        if self.crowded:
            steps, until_s = min(steps, AHEAD_STEPS), float("inf")
        used = self._used_blocks()
        run = cost.decode_run(loop.batches, load, start_s, until_s, steps, self._noise)
        growth = self._grow_ahead(run)
        ends = run.ends_s
        wait_s = cost.lockstep_wait_s(loop.batches, load)
        context = sum(batch.context_tokens for batch in loop.batches)
        linear_s = cost.linear_s(load, load.peak, 0)
        head_s = cost.latency.head_s(load.peak)
        self._track.run(start_s, run, linear_s, head_s, load.counts, len(self._queue), used, context, growth)
        if len(ends) > 1:
            loop.advance(ends[:-1])
            loop.grown = True
        self._ahead = run if self.crowded else None
        cut = False
        try:
            yield env.timeout(ends[-1] - start_s)
        except simpy.Interrupt:
            cut = True
        if cut:
            yield env.timeout(ends[-1] - env.now)
        self._ahead = None
        self._lockstep_wait_s += len(ends) * wait_s
        for request in loop.step(env.now):
            self._finish(request)

    def _cut_ahead(self, run: DecodeRun) -> None:
        """An event of this instance: of the iterations looked ahead to, the one that runs now is the last."""
        steps, planned = bisect_left(run.ends_s, self.env.now) + 1, len(run.ends_s)
        if steps >= planned:
            return
        loop = self.loop
        run.cut(steps)
        loop.retreat(planned - steps)
        for step in range(1, planned - steps + 1):
            for group in range(len(self.kv.pools)):
                self.kv.shrink(group, loop.growth(group, step))
        self._track.cut_run(steps)
        self._process.interrupt()

    def _grow_ahead(self, run: DecodeRun) -> list[tuple[int, int]]:
        """Take the blocks of a run's further iterations, cut where they are short; returns (step, blocks) taken."""
        taken = []
        loop, pools, units = self.loop, self.kv.pools, self.kv.units_per_block
        groups = range(len(pools))
        for ahead in range(1, len(run.ends_s)):
            needs = [loop.growth(group, ahead) for group in groups]
            if not any(needs):
                continue
            room = [pool.free if self.crowded else pool.available for pool in pools]  # evicted blocks cannot come back
            if any(needs[group] * units > room[group] for group in groups):
                run.cut(ahead)
                break
            for group in groups:
                self.kv.grow(group, needs[group])
            taken.append((ahead, sum(needs)))
        return taken

    def _rouse(self) -> None:
        if self._ahead is not None:
            self._cut_ahead(self._ahead)
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def _check_progress(self) -> None:
        if len(self._queue) and not self._in_transfer:
            raise RuntimeError(f"no progress with {len(self._queue)} requests queued and none running")

    # Planning

    def _plan(self, now_s: float) -> tuple[IterationPlan | None, DecodeLoad]:
        for request in self._landed:
            self._coming[request.group] -= request.target_tokens + 1
            self.loop.join(request, request.group, self.ledger.oracle.left(request))
        self._landed.clear()
        grown = self._grow()
        load = self.cost.load(self.loop.batches)
        if not grown:
            return None, load
        preempted = self.ledger.preemptions
        batches = self.loop.batches
        chunks: tuple[PrefillChunk, ...] = ()
        if len(self._queue):
            pause = self.limits.prefill_first
            chunks = self._chunks(now_s, self.cost.load(self._paused) if pause else load)
            if pause and chunks:
                batches = self._paused
            if batches is self._paused or self.ledger.preemptions != preempted:
                load = self.cost.load(batches)
        if not chunks and not load.total:
            return None, load
        plan = IterationPlan(chunks, batches, tuple(self._released), load)
        self._released.clear()
        return plan, load

    def _grow(self) -> bool:
        """Blocks for every decode's next token, preempting where they are short; false: a transfer must end first."""
        loop, kv = self.loop, self.kv
        if loop.grown or not loop.grows():
            loop.grown = True
            return True
        for group in range(len(kv.pools)):
            while (need := loop.growth(group)) > 0 and not kv.grow(group, need):
                victim = self._victim(group)
                if victim is None:
                    return self._undo_growth(group)
                self._preempt(victim)
        loop.grown = True
        return True

    def _undo_growth(self, groups: int) -> bool:
        for group in range(groups):
            self.kv.shrink(group, self.loop.growth(group))
        return False

    def _chunks(self, now_s: float, load: DecodeLoad) -> tuple[PrefillChunk, ...]:
        """Prefill chunks in queue order, as much as the iteration has room for."""
        fill = self._fill
        fill.begin(load)
        aside = self._aside
        new = True
        self._blocked = False
        preempted = self.ledger.preemptions
        while not fill.full:
            request = self._queue.pop(now_s, fill.predict_s, new)
            if request is None:
                break
            aside.append(request)
            fresh = request.state is RequestState.QUEUED
            if fresh and not self._start(request):
                new = False
                self._blocked = True
                continue
            tokens = fill.fit(request)
            outcome = self._accept(request, tokens, fresh, fill) if tokens else "full"
            if self.ledger.preemptions != preempted:
                preempted = self.ledger.preemptions
                fill.set_decodes(self.cost.load(self.loop.batches))
            if outcome == "accepted":
                aside.pop()
                if request.state is RequestState.PREFILL:
                    break
                continue
            if fresh:
                self._cancel(request)
            if outcome == "full":
                break
            new = False
        self._blocked = self._blocked and len(aside) == 1 and not fill.planned.chunks
        for request in aside:
            self._queue.push(request)
        aside.clear()
        return fill.spread()

    def _accept(self, request: Request, tokens: int, fresh: bool, fill: Fill) -> str:
        last = tokens == request.remaining_prefill
        if fresh and not last and len(self._partials) >= self.limits.max_partial_prefills:
            return "partials"
        if not self.kv.whole_prompt and not self._extend(request, request.prefilled + tokens):
            return "no_kv"
        group = -1
        if last and self.ledger.oracle.left(request) > 1:
            group = self._place(request)
            if group < 0:
                return "no_kv"
        fill.add(request, tokens, last, group)
        if request.prefill_start_s < 0:
            request.prefill_start_s = self.env.now
        if last:
            self._partials.pop(request.id, None)
            request.move_to(RequestState.TRANSFER)
            request.group = group
            if group >= 0:
                self._coming[group] += request.target_tokens + 1
        elif fresh:
            self._partials[request.id] = request
            request.move_to(RequestState.PREFILL)
        return "accepted"

    # KV of a request

    def _start(self, request: Request) -> bool:
        if not self.kv.start(request):
            return False
        self._holders.add(request)
        return True

    def _cancel(self, request: Request) -> None:
        self.kv.copies.cancel(request)
        self._holders.remove(request)

    def _extend(self, request: Request, tokens: int) -> bool:
        """Room for `tokens` of a prompt; the oldest holder makes room."""
        while not self.kv.copies.extend(request, tokens):
            if not self._holders.is_oldest(request):
                return False
            short = min(range(len(self.kv.pools)), key=lambda group: self.kv.pools[group].available)
            victim = self._victim(short)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _place(self, request: Request) -> int:
        """Reserve the decode's blocks; the oldest holder makes room, others wait."""
        need = self.kv.decode_units(request)
        while True:
            group = self._placement.choose(self._group_loads(), need)
            if group >= 0 and self.kv.place(request, group):
                return group
            if not self._holders.is_oldest(request):
                return -1
            victim = self._victim_anywhere(request)
            if victim is None:
                return -1
            self._preempt(victim)

    def _group_loads(self) -> list[GroupLoad]:
        return [
            GroupLoad(batch.group, batch.context_tokens + coming, pool.held, pool.available, pool.capacity)
            for batch, coming, pool in zip(self.loop.batches, self._coming, self.kv.pools, strict=True)
        ]

    def _victim(self, group: int) -> Request | None:
        """The latest-arrived holder of KV in a group that is neither the oldest holder nor in transfer."""
        held = [*self.loop.batches[group].members.values(), *self._partials.values()]
        able = [request for request in held if not self._holders.is_oldest(request)]
        return max(able, key=lambda request: (request.arrival_s, request.id), default=None)

    def _victim_anywhere(self, request: Request) -> Request | None:
        """A victim in the group with the most room already, so that the fewest are preempted."""
        groups = sorted(self._group_loads(), key=lambda load: (-load.available_units, load.group))
        for load in groups:
            victim = self._victim(load.group)
            if victim is not None and victim is not request:
                return victim
        return None

    def _preempt(self, request: Request) -> None:
        """Give up its KV and return it ahead of the queue, to recompute prompt and emitted tokens."""
        if request.state is RequestState.DECODE:
            tokens = self.loop.leave(request)
            self.kv.release(request, request.group, tokens)
        else:
            self._partials.pop(request.id, None)
            self._queue.remove(request)
            if request in self._aside:
                self._aside.remove(request)
            self.kv.release(request, -1, 0)
        self._holders.remove(request)
        request.requeue()
        self.ledger.preemptions += 1
        self._released.append(request.id)
        self._queue.push(request)

    # Applying an iteration

    def _apply(self, plan: IterationPlan, timing: IterationTiming, start_s: float) -> None:
        if plan.decode is not self._paused:
            for request in self.loop.step(self.env.now):
                self._finish(request)
        for chunk in plan.prefill:
            request = chunk.request
            request.prefilled += chunk.tokens
            self.kv.copies.written(request)
            if not chunk.last:
                self._queue.push(request)
                continue
            self.ledger.emit(request, self.env.now)
            if chunk.group < 0:
                self._end(request, -1, 0)
            elif timing.transfer_s > timing.duration_s:
                self._in_transfer += 1
                self.env.process(self._transfer(request, timing.transfer_s - timing.duration_s))
            else:
                self._land(request)

    def _transfer(self, request: Request, wait_s: float) -> Generator[simpy.Event, Any, None]:
        """What of a KV transfer outlasts the last chunk's iteration."""
        yield self.env.timeout(wait_s)
        self._in_transfer -= 1
        self._land(request)
        self._rouse()

    def _land(self, request: Request) -> None:
        self.kv.settle(request)
        request.move_to(RequestState.LANDED)
        self._landed.append(request)

    def _finish(self, request: Request) -> None:
        self._end(request, request.group, self.loop.leave(request))

    def _end(self, request: Request, group: int, tokens: int) -> None:
        self.kv.release(request, group, tokens)
        self._holders.remove(request)
        self._released.append(request.id)
        self.complete(request, self.env.now)

    # Recording

    def _used_blocks(self) -> int:
        held = 0
        for pool in self.kv.pools:
            held += pool.held
        return held // self.kv.units_per_block
