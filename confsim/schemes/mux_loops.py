"""MuxWise's two loops: decode iterations and prefill layers side by side on disjoint SMs of every GPU.

Decode dispatches: after every iteration it takes in prompts that are done, chooses its SMs, and lets prefill launch
its next layers beside it. Prefill runs on from group to group of layers by itself and waits for decode only where
decode has the whole GPU, or has to start first.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from math import ceil
from time import perf_counter
from typing import Any

import simpy

from confsim.kv.pools import BlockPool, KvStore
from confsim.outcome.slo import TOLERANCE
from confsim.run.holders import Holders
from confsim.run.plan import IterationTiming
from confsim.run.record import DecodeRun
from confsim.run.request import Request, RequestState
from confsim.schemes.base import Instance, Setup
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.schemes.mux_cost import FULL, Contention, MuxCost, PrefillTime

IDLE = -2  # decode does not run, in place of a split
ROUNDING = 1e-9  # of a layer


@dataclass(frozen=True)
class MuxLimits:
    """`max_batched_tokens`: of prompts prefilled together (a longer one goes alone); `longest_prompt_tokens` has room
    for its activations; `preempt` lets a short prompt go before a long one at a layer boundary."""

    max_batched_tokens: int
    longest_prompt_tokens: int
    preempt: bool


@dataclass(slots=True)
class PrefillBatch:
    """Prompts that go through the layers together; parts add up from group to group until they are recorded."""

    requests: list[Request]
    layers_left: int
    began_s: float = -1.0
    times: dict[int, PrefillTime] = field(default_factory=dict)  # by split
    parts_s: list[float] = field(default_factory=lambda: [0.0] * 5)  # total, linear, attention, head, overhead


class MuxInstance(Instance):
    """Both loops over one KV pool."""

    def __init__(
        self, setup: Setup, name: str, cost: MuxCost, kv: KvStore, limits: MuxLimits, contention: Contention
    ) -> None:
        super().__init__(setup)
        self.cost = cost
        self.kv = kv
        self.limits = limits
        self._alone = CoBatchCost(cost.latency, in_turn, async_schedule=cost.options.async_schedule)
        self._contention = contention
        self._layers = setup.model.num_hidden_layers
        self._queue = setup.policy.new_order()
        self.loop = self.ledger.new_loop(1, kv.block_tokens)
        self._decode_track = self.ledger.new_track(f"{name} decode", setup.instance)
        self._prefill_track = self.ledger.new_track(f"{name} prefill", setup.instance)
        self._decode_noise = setup.noise(2 * self.loop.index)
        self._prefill_noise = setup.noise(2 * self.loop.index + 1)
        self._holders = Holders()
        self._landed: list[Request] = []  # prefilled, decode in the next iteration
        self._batch: PrefillBatch | None = None  # being prefilled
        self._paused: PrefillBatch | None = None  # preempted by that one
        self._in_flight = False  # layers of the batch are running
        self._split = IDLE  # of the decode iteration that runs
        self._attention_s = 0.0  # of it, alone on the whole GPU
        self._stalled = False  # decode waits for KV that the layers in flight write
        self._blocked = False  # the head of the queue waits for KV
        self._decode_wake: simpy.Event | None = None
        self._prefill_wake: simpy.Event | None = None
        self._prefill_preemptions = 0
        self.env.process(self._decode())
        self.env.process(self._prefill())

    # What an engine and routers ask

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never be served here, or an empty string."""
        if prompt_tokens + output_tokens - 1 > self.limits.longest_prompt_tokens:
            return "activation_memory"
        return self.kv.refusal(prompt_tokens, output_tokens)

    def enqueue(self, request: Request) -> None:
        """Queue a request and wake prefill."""
        self._queue.push(request)
        _wake(self._prefill_wake)

    def preload(self, request: Request, gpu: int) -> bool:
        """Let a request decode, as if its prompt had just been prefilled."""
        self.kv.copies.start(request, 0)
        if not self.kv.place(request, 0):
            self.kv.copies.cancel(request)
            return False
        self._count(request)
        self._holders.add(request)
        self._land(request)
        _wake(self._decode_wake)
        return True

    def pools(self) -> tuple[BlockPool, ...]:
        """The one pool."""
        return self.kv.pools

    def audit(self) -> None:
        """Recount what the pool holds."""
        self.kv.audit(self.loop, self._holders)

    def counters(self) -> dict[str, int]:
        """Long prefills that were preempted by short ones."""
        return {"prefill_preemptions": self._prefill_preemptions}

    # Decode

    def _decode(self) -> Generator[simpy.Event, Any, None]:
        while True:
            began = perf_counter()
            running = self._dispatch()
            self.ledger.schedule_pass_s.append(perf_counter() - began)
            if not running:
                self._split = IDLE
                _wake(self._prefill_wake)
                self._decode_wake = self.env.event()
                yield self._decode_wake
            elif self._split == FULL and (not len(self._queue) or (self._blocked and self._queue.time_free)):
                yield from self._run_ahead()
            else:
                yield from self._iteration()

    def _dispatch(self) -> bool:
        """Prepare the next iteration and choose its SMs; false where nothing decodes or KV is short for now."""
        loop = self.loop
        self._stalled = False
        for request in self._landed:
            loop.join(request, 0, self.ledger.oracle.left(request))
        self._landed.clear()
        if not len(loop) or not self._grow():
            return False
        batch = loop.batches[0]
        if not batch.count:
            return False
        if self._batch is None:
            self._next_batch()
        self._attention_s = self.cost.latency.decode_attention_s(batch.count, batch.context_tokens)
        self._split = FULL if self._batch is None else self.cost.best_fit(batch.count, self._attention_s)
        return True

    def _iteration(self) -> Generator[simpy.Event, Any, None]:
        """One iteration, beside prefill where there is any."""
        env, cost, split = self.env, self.cost, self._split
        batch = self.loop.batches[0]
        count, context = batch.count, batch.context_tokens
        linear, head = cost.fixed_s(count)
        attention_s = cost.attention_s(split, self._attention_s)
        solo_s = linear[split] + head[split] + attention_s
        factor = 1.0 if split == FULL else self._contention.factor()
        gpu_s = solo_s * factor
        overhead_s = cost.exposed_s(count, gpu_s)
        predicted_s = solo_s + cost.exposed_s(count, solo_s)
        seconds = (gpu_s + overhead_s) * self._decode_noise.factor()
        if split != FULL:
            _wake(self._prefill_wake)
        start_s = env.now
        yield env.timeout(seconds)
        timing = IterationTiming(
            seconds, linear[split] * factor, 0.0, attention_s * factor, 0.0, head[split] * factor, overhead_s, 0.0,
            predicted_s,
        )  # fmt: skip
        self._decode_track.iteration(
            start_s, env.now, timing, (0,), (count,), len(self._queue), self.kv.pools[0].held, context
        )
        self._step()

    def _run_ahead(self) -> Generator[simpy.Event, Any, None]:
        """Iterations of the same decodes alone on the GPU, up to the next end, event or shortage of KV."""
        env, loop, cost = self.env, self.loop, self._alone
        start_s, context = env.now, loop.batches[0].context_tokens
        load = cost.load(loop.batches)
        run = cost.decode_run(loop.batches, load, start_s, env.peek(), loop.steps_to_end(), self._decode_noise)
        used = self.kv.pools[0].held
        growth = self._grow_ahead(run)
        ends = run.ends_s
        linear_s, head_s = cost.linear_s(load, load.peak, 0), cost.latency.head_s(load.peak)
        self._decode_track.run(start_s, run, linear_s, head_s, load.counts, len(self._queue), used, context, growth)
        if len(ends) > 1:
            loop.advance(ends[:-1])
            loop.grown = True
        yield env.timeout(ends[-1] - start_s)
        self._step()

    def _step(self) -> None:
        for request in self.loop.step(self.env.now):
            self._end(request, 0, self.loop.leave(request))

    def _grow(self) -> bool:
        """Blocks for every decode's next token; false: the victim's layers are in flight and have to end first."""
        loop = self.loop
        while not loop.grown:
            need = loop.growth(0)
            if need <= 0 or self.kv.grow(0, need):
                loop.grown = True
                return True
            victim = self._victim()
            if victim is None or (self._in_flight and self._batch is not None and victim in self._batch.requests):
                self._stalled = True
                return False
            self._preempt(victim)
        return True

    def _grow_ahead(self, run: DecodeRun) -> list[tuple[int, int]]:
        """Take the blocks of a run's further iterations, cut where they are short; returns (step, blocks) taken."""
        taken = []
        for ahead in range(1, len(run.ends_s)):
            need = self.loop.growth(0, ahead)
            if not need:
                continue
            if not self.kv.grow(0, need):
                run.cut(ahead)
                break
            taken.append((ahead, need))
        return taken

    # Prefill

    def _prefill(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if self._may_launch():
                yield from self._launch(FULL if self._split == IDLE else self._split)
            else:
                self._prefill_wake = self.env.event()
                yield self._prefill_wake

    def _may_launch(self) -> bool:
        idle = self._split == IDLE
        if idle and (self._landed or self._stalled):  # decode is launched first
            _wake(self._decode_wake)
            return False
        if self._split == FULL:
            return False
        if self._batch is not None or self._next_batch():
            return True
        if idle and len(self._queue):
            raise RuntimeError(f"no progress with {len(self._queue)} requests queued and none running")
        return False

    def _launch(self, split: int) -> Generator[simpy.Event, Any, None]:
        """Run the next group of layers."""
        batch = self._batch
        assert batch is not None
        time = self._time(batch, split)
        layers = self._group(batch, time.total_s / self._layers, split)
        now_s = self.env.now
        if batch.began_s < 0:
            batch.began_s = now_s
            for request in batch.requests:
                if request.prefill_start_s < 0:
                    request.prefill_start_s = now_s
        share = layers / self._layers
        self._in_flight = True
        yield self.env.timeout(time.total_s * share * self._prefill_noise.factor())
        self._in_flight = False
        batch.parts_s = [done + part * share for done, part in zip(batch.parts_s, time, strict=True)]
        batch.layers_left -= layers
        if not batch.layers_left:
            self._finish(batch)
        elif self.limits.preempt and self._paused is None:
            self._give_way(batch)

    def _time(self, batch: PrefillBatch, split: int) -> PrefillTime:
        time = batch.times.get(split)
        if time is None:
            time = batch.times[split] = self.cost.prefill_s(batch.requests, split)
        return time

    def _group(self, batch: PrefillBatch, layer_s: float, split: int) -> int:
        """Layers to launch: about one decode iteration, or all that are left where nothing decodes."""
        if split != FULL:
            cover_s = self.cost.guarded_s(split, self.loop.batches[0].count, self._attention_s)
        elif self.limits.preempt:
            cover_s = self.cost.options.target_s  # so that a short prompt can go first
        else:
            return batch.layers_left
        return min(batch.layers_left, max(1, ceil(cover_s / layer_s - ROUNDING)))

    def _finish(self, batch: PrefillBatch) -> None:
        """Its prompts' first tokens are out."""
        self._record(batch, sum(request.remaining_prefill for request in batch.requests))
        self._batch, self._paused = self._paused, None
        for request in batch.requests:
            request.prefilled = request.target_tokens
            self.kv.copies.written(request)
            self.ledger.emit(request, self.env.now)
            if self.ledger.oracle.left(request) <= 0:
                self._end(request, -1, 0)
            else:
                self._land(request)

    def _land(self, request: Request) -> None:
        request.prefilled = request.target_tokens
        request.move_to(RequestState.LANDED)
        request.group = 0
        self._landed.append(request)

    def _record(self, batch: PrefillBatch, tokens: int) -> None:
        total_s, linear_s, attention_s, head_s, overhead_s = batch.parts_s
        timing = IterationTiming(total_s, linear_s, attention_s, 0.0, 0.0, head_s, overhead_s, 0.0, total_s)
        self._prefill_track.iteration(
            batch.began_s, self.env.now, timing, (tokens,), (0,), len(self._queue), self.kv.pools[0].held, 0
        )
        batch.parts_s = [0.0] * 5
        batch.began_s = -1.0

    def _next_batch(self) -> bool:
        """Prompts in queue order, as many as fit into one prefill and into KV."""
        requests: list[Request] = []
        aside: list[Request] = []
        tokens = 0
        self._blocked = False
        while tokens < self.limits.max_batched_tokens:
            request = self._queue.pop(self.env.now, self._predict_s)
            if request is None:
                break
            full = bool(requests) and tokens + request.remaining_prefill > self.limits.max_batched_tokens
            if full or not self._start(request):
                aside.append(request)
                self._blocked = not full
                break
            requests.append(request)
            tokens += request.remaining_prefill
        for request in aside:
            self._queue.push(request)
        if requests:
            self._batch = PrefillBatch(requests, self._layers)
        return bool(requests)

    def _predict_s(self, request: Request) -> float:
        """Prefilling a request alone beside the present decodes."""
        return self.cost.prefill_s([request], self._prefill_split()).total_s

    def _prefill_split(self) -> int:
        if self._split != FULL:
            return FULL if self._split == IDLE else self._split
        return self.cost.best_fit(self.loop.batches[0].count, self._attention_s)

    def _give_way(self, batch: PrefillBatch) -> None:
        """Let the next prompt go first if it is shorter than what is left here and all still meet their TTFT."""
        request = self._queue.pop(self.env.now, self._predict_s)
        if request is None:
            return
        split = self._prefill_split()
        first_s = self._predict_s(request)
        left_s = self._time(batch, split).total_s * batch.layers_left / self._layers
        done_s = self.env.now + first_s + left_s
        in_time = all(
            victim.first_token_s >= 0 or done_s - victim.arrival_s <= victim.ttft_limit_s * TOLERANCE
            for victim in batch.requests
        )
        if first_s >= left_s or not in_time or not self._start(request):
            self._queue.push(request)
            return
        self._record(batch, 0)
        self._paused, self._batch = batch, PrefillBatch([request], self._layers)
        self._prefill_preemptions += 1

    # KV of a request

    def _start(self, request: Request) -> bool:
        """Reserve the whole prompt and the first decoded token's block, or nothing."""
        kv = self.kv
        if not kv.start(request):
            return False
        decodes = self.ledger.oracle.left(request) > 1
        if not (kv.place(request, 0) if decodes else kv.copies.extend(request, request.target_tokens)):
            kv.copies.cancel(request)
            return False
        request.move_to(RequestState.PREFILL)
        self._holders.add(request)
        return True

    def _victim(self) -> Request | None:
        """The latest-arrived holder of KV that is not the oldest."""
        held = list(self.loop.batches[0].members.values())
        for batch in (self._batch, self._paused):
            held += batch.requests if batch is not None else ()
        able = [request for request in held if not self._holders.is_oldest(request)]
        return max(able, key=lambda request: (request.arrival_s, request.id), default=None)

    def _preempt(self, request: Request) -> None:
        """Give up its KV and return it ahead of the queue, to recompute prompt and emitted tokens."""
        if request.state is RequestState.DECODE:
            self.kv.release(request, 0, self.loop.leave(request))
        else:
            self._drop(request)
            self.kv.release(request, -1, 0)
        self._holders.remove(request)
        request.requeue()
        self.ledger.preemptions += 1
        self._queue.push(request)

    def _drop(self, request: Request) -> None:
        """Take a request out of its prefill; the others go on."""
        for batch in (self._batch, self._paused):
            if batch is not None and request in batch.requests:
                batch.requests.remove(request)
                batch.times.clear()
        if self._paused is not None and not self._paused.requests:
            self._paused = None
        if self._batch is not None and not self._batch.requests:
            self._batch, self._paused = self._paused, None

    def _end(self, request: Request, group: int, tokens: int) -> None:
        self.kv.release(request, group, tokens)
        self._holders.remove(request)
        self.complete(request, self.env.now)


def _wake(event: simpy.Event | None) -> None:
    if event is not None and not event.triggered:
        event.succeed()
