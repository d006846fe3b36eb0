"""MuxWise's two loops: decode iterations and prefill layers side by side on disjoint SMs of every GPU.

Decode dispatches: after every iteration it takes in prompts that are done, chooses its SMs, and lets prefill launch
its next layers beside it. Prefill runs on from group to group of layers by itself and waits for decode only where
decode has the whole GPU, or has to start first.

With `layer_tokens` (the artifact) one host loop drives both streams: at the start of every decode iteration it may
start a batch, and it launches the batch's next layers, which run one after another; at the end of the iteration it
looks whether the batch is done. The SMs are divided anew when a batch starts or ends or decode drains, and both
streams run empty before.
"""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import Any

import simpy
from mypy_extensions import mypyc_attr

from confsim.kv.pools import BlockPool, KvStore
from confsim.run.plan import WHOLE_GPU, DecodeLoad, IterationPlan
from confsim.run.request import Request
from confsim.run.serving import Bell, Serving
from confsim.schemes.base import Instance, Setup
from confsim.schemes.mux_cost import MuxCost
from confsim.schemes.mux_prefill import IDLE, DecodeSide, MuxLimits, MuxPrefill


@mypyc_attr(allow_interpreted_subclasses=True)
class MuxInstance(Instance):
    """Both loops over one KV pool."""

    def __init__(self, setup: Setup, name: str, cost: MuxCost, kv: KvStore, limits: MuxLimits) -> None:
        super().__init__(setup)
        self.cost = cost
        self.kv = kv
        self.limits = limits
        self._queue = setup.policy.new_order()
        self.serving = serving = Serving(setup.env, setup.ledger, kv, f"{name} decode", setup.instance)
        track = setup.ledger.new_track(f"{name} prefill", setup.instance)
        tp, sp, stream = cost.latency.tp, cost.latency.sp, 2 * serving.loop.index
        self._backend = setup.backend.create(cost, setup.noise(stream), tp, sp, f"{name} decode")
        serving.backend = self._backend
        backend = setup.backend.create(cost, setup.noise(stream + 1), tp, sp, f"{name} prefill")
        self._decodes = DecodeSide()
        self._prefills = MuxPrefill(serving, self._queue, cost, backend, track, limits, self._decodes, self._land)
        self._stepped = limits.layer_tokens is not None
        self._stalled = False  # decode waits for KV that the layers in flight write
        self._prefill_bell = Bell(setup.env)
        self.spawn(self._decode())
        self.spawn(self._prefill())

    # What an engine and routers ask

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never be served here, or an empty string."""
        if prompt_tokens + output_tokens - 1 > self.limits.longest_prompt_tokens:
            return "activation_memory"
        return self.kv.refusal(prompt_tokens, output_tokens)

    def enqueue(self, request: Request) -> None:
        """Queue a request and wake prefill."""
        self._queue.push(request)
        self._prefill_bell.ring()

    def preload(self, request: Request, gpu: int) -> bool:
        """Let a request decode, as if its prompt had just been prefilled."""
        if not self.serving.preload(request, 0):
            return False
        self._count(request)
        self.serving.rouse()
        return True

    def pools(self) -> tuple[BlockPool, ...]:
        """The one pool."""
        return self.kv.pools

    def audit(self) -> None:
        """Recount what the pool holds."""
        self.serving.audit()

    def counters(self) -> dict[str, int]:
        """Long prefills that were preempted by short ones."""
        return {"prefill_preemptions": self._prefills.preemptions}

    # Decode

    def _decode(self) -> Generator[simpy.Event, Any, None]:
        serving, decodes = self.serving, self._decodes
        while True:
            began = perf_counter()
            load = self._dispatch()
            self.ledger.schedule_pass_s.append(perf_counter() - began)
            if load is None:
                decodes.split = IDLE
                self._prefill_bell.ring()
                yield serving.sleep()
                continue
            plan = IterationPlan((), serving.loop.batches, serving.take_released(), load, split=decodes.split)
            if decodes.split == WHOLE_GPU and self._backend.can_run_ahead and self._may_run_ahead():
                yield from serving.run_ahead(plan, load, len(self._queue), False)
            else:
                yield from self._iteration(plan, load)
            for request in serving.loop.step(self.env.now):
                serving.end(request)
                self.complete(request, self.env.now)
            if self._stepped:
                self._prefills.notice()

    def _may_run_ahead(self) -> bool:
        return not len(self._queue) or (self._prefills.blocked and self._queue.time_free)

    def _dispatch(self) -> DecodeLoad | None:
        """Prepare the next iteration and choose its SMs; None where nothing decodes or KV is short for now."""
        serving, decodes, prefills = self.serving, self._decodes, self._prefills
        self._stalled = False
        serving.join_landed()
        if not len(serving.loop):
            return None
        if self._stepped and decodes.split == IDLE and prefills.in_flight:  # the SMs are divided once it has run
            self._stalled = True
            return None
        if not serving.grow(self._make_room):
            self._stalled = True
            return None
        batch = serving.loop.batches[0]
        if not batch.count:
            return None
        starts = prefills.batch is None and prefills.next_batch()
        load = self.cost.load(serving.loop.batches)
        decodes.attention_s = load.attention_s
        if prefills.batch is None:
            decodes.split = WHOLE_GPU
        elif not self._stepped or starts or decodes.split == IDLE:
            decodes.split = self.cost.choose(load.total, load.attention_s)
        if self._stepped and prefills.batch is not None:
            prefills.queue_layers(decodes.split)
        return load

    def _make_room(self, group: int) -> bool:
        """Preempt the latest; false: its layers are in flight and have to end first."""
        victim = self.serving.victim([*self.serving.loop.batches[group].members.values(), *self._prefills.held()])
        if victim is None or self._prefills.runs(victim):
            return False
        self._prefills.preempt(victim)
        return True

    def _iteration(self, plan: IterationPlan, load: DecodeLoad) -> Generator[simpy.Event, Any, None]:
        """One iteration, beside prefill where there is any."""
        env, serving, backend = self.env, self.serving, self._backend
        start_s, context = env.now, serving.context_tokens()
        backend.submit(plan)
        timing = backend.result()
        if plan.split != WHOLE_GPU:
            self._prefill_bell.ring()
        yield env.timeout(timing.duration_s)
        serving.track.iteration(
            start_s, env.now, timing, (0,), load.counts, len(self._queue), serving.used_blocks(), context
        )

    # Prefill

    def _prefill(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if self._may_launch():
                yield from self._prefills.launch()
            else:
                yield self._prefill_bell.wait()

    def _may_launch(self) -> bool:
        idle = self._decodes.split == IDLE
        if idle and (self.serving.landed or self._stalled):  # decode is launched first
            self.serving.rouse()
            return False
        if self._decodes.split == WHOLE_GPU:
            return False
        if self._stepped and not idle:
            return self._prefills.queued()
        if self._prefills.batch is not None or self._prefills.next_batch():
            return True
        if idle and len(self._queue):
            raise RuntimeError(f"no progress with {len(self._queue)} requests queued and none running")
        return False

    def _land(self, request: Request) -> None:
        """A request's first token is out: it decodes from the next iteration on, or has ended."""
        if self.ledger.oracle.left(request) <= 0:
            self.serving.end(request)
            self.complete(request, self.env.now)
        else:
            request.group = 0
            self.serving.land(request)
