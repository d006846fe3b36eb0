"""The serving loop: dispatch prompts, allocate instances, batch, run a macro-iteration; decode in between."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import simpy
from mypy_extensions import mypyc_attr

from confsim.kv.pools import BlockPool
from confsim.run.request import Request
from confsim.run.serving import Bell
from confsim.schemes.base import Instance, Setup
from confsim.schemes.elastic.allocation import Allocation
from confsim.schemes.elastic.batch import Batch, Strand
from confsim.schemes.elastic.decoding import Decodes, release
from confsim.schemes.elastic.dispatch import Dispatcher, DispatchLimits
from confsim.schemes.elastic.law import fit_law, sums_of
from confsim.schemes.elastic.macro import MacroIteration
from confsim.schemes.elastic.masters import Masters
from confsim.schemes.elastic.prefilling import Prefills
from confsim.schemes.elastic.ring import RingCost
from confsim.schemes.elastic.slots import Slots
from confsim.schemes.elastic.state import State


@dataclass(slots=True)
class ElasticOptions:
    """Options of the loop; `dispatch` bounds what a prefill takes."""

    dispatch: DispatchLimits
    max_wait_tokens: int
    compute_bound_batch: int
    split_batches: bool


@mypyc_attr(allow_interpreted_subclasses=True)
class ElasticInstance(Instance):
    """Instances that join for prefills and part for decodes."""

    def __init__(
        self, setup: Setup, name: str, cost: RingCost, instances: int, capacity: int, options: ElasticOptions
    ) -> None:
        super().__init__(setup)
        limits = options.dispatch
        self._max_wait_tokens = options.max_wait_tokens
        self.cost = cost
        self.law = fit_law(cost, instances, limits.instance_tokens)
        main = self._new_strand(f"{name}/main", 0)
        side = [self._new_strand(f"{name}/batch{index}", index + 1) for index in range(instances)]
        self.state = State(
            self.env, self.ledger, setup.policy.new_order(), Slots(instances, capacity), main, side, cost, self.law,
            limits, setup.kv.block_tokens,
        )  # fmt: skip
        self._dispatcher = Dispatcher(self.law, instances, limits)
        self._masters = Masters(self.state.slots, options.compute_bound_batch)
        self._allocation = Allocation(self.state, self._masters)
        self._prefilling = Prefills(self.state, options.split_batches, self._finish)
        self._decoding = Decodes(self.state, self._finish)
        self._steps_since = 0  # decode iterations since the last macro-iteration
        self._bell = Bell(self.env)
        self._macro: MacroIteration | None = None
        self._macros = 0
        self.spawn(self._run())

    def _new_strand(self, name: str, stream: int) -> Strand:
        setup, latency = self.setup, self.cost.latency
        backend = setup.backend.create(self.cost, setup.noise(stream), latency.tp, latency.sp, name)
        return Strand(self.ledger, name, setup.instance, backend)

    # The loop

    def _run(self) -> Generator[simpy.Event, Any, None]:
        """A macro-iteration where nothing runs or enough decode iterations have passed, and prompts are worth it."""
        state, main = self.state, self.state.main
        while True:
            idle = not main.batches
            if idle or self._steps_since >= self._max_wait_tokens:
                chosen = self._dispatch()
                if chosen:
                    yield from self._macro_iteration(chosen)
                    continue
                if idle:
                    yield self._bell.wait()
                    continue
            if self._masters.prepare(main, state.idle_instances()):
                before = main.step
                yield from self._decoding.run(main, self.env.peek(), self._run_length())
                self._steps_since += main.step - before
            else:
                self._drop_latest()
                self._steps_since = 0

    def _run_length(self) -> int:
        """Iterations until the queue is looked at again; an arrival ends a run in any case."""
        if not len(self.state.queue):
            return 1 << 30
        return max(1, self._max_wait_tokens - self._steps_since)

    def _dispatch(self) -> list[Request]:
        """Requests for the next prefill."""
        state = self.state
        if not len(state.queue):
            return []
        began = perf_counter()
        running = [(request.prompt_tokens, batch.emitted(request)) for request, batch in state.main.decodes()]
        chosen, rest = self._dispatcher.choose(state.pop, state.slots.used, running)
        state.push(rest)
        self.ledger.schedule_pass_s.append(perf_counter() - began)
        return chosen

    def _macro_iteration(self, chosen: list[Request]) -> Generator[simpy.Event, Any, None]:
        """Prefills beside the decodes that go on; it lasts until the prefills have ended."""
        sums = sums_of(chosen)
        delay_s = self._allocation.compact(sums)
        if delay_s:
            yield self.env.timeout(delay_s)
        available = self._allocation.make_room(sums)
        prefills = self._prefilling.batch(chosen, available)
        self._macro = MacroIteration(
            self.state, self._dispatcher, self._masters, self._prefilling, self._decoding, prefills
        )
        self._macros += 1
        yield from self._macro.run()
        self._steps_since = 0
        self._join()

    def _join(self) -> None:
        """All batches decode on in the main strand; those that share an instance, paused and new ones, merge."""
        state, main = self.state, self.state.main
        batches = [batch for strand in state.strands() for batch in strand.batches] + state.parked
        state.parked = []
        for strand in state.strands():
            strand.batches = []
        for batch in batches:
            state.slots.attach(batch, main, self.ledger.oracle)
            for other in list(main.batches):
                if set(batch.instances) & set(other.instances):
                    other.merge(batch)
                    main.batches.remove(other)
                    batch = other
            main.batches.append(batch)

    def _drop_latest(self) -> None:
        """All slots are exhausted: the latest request gives up its KV and is prefilled again, output included."""
        main = self.state.main
        request, batch = max(main.decodes(), key=lambda pair: (pair[0].arrival_s, pair[0].id))
        self.state.slots.leave(request, batch, main)
        request.requeue()
        self.state.released.append(request.id)
        self.ledger.preemptions += 1
        self.state.queue.push(request)
        release(main, batch)

    def _finish(self, request: Request) -> None:
        self._dispatcher.ended(request.emitted)
        self.state.released.append(request.id)
        self.complete(request, self.env.now)

    # What an engine and routers ask

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never be served here, or an empty string."""
        tokens = prompt_tokens + output_tokens - 1  # the longest prefill, too, if its KV is dropped
        if tokens > self._dispatcher.slots:
            return "kv_capacity"
        return "" if tokens <= self.state.instances * self.state.limits.instance_tokens else "prompt_limit"

    def enqueue(self, request: Request) -> None:
        """Queue a request and wake the loop if it is idle."""
        self.state.queue.push(request)
        self._bell.ring()

    def preload(self, request: Request, gpu: int) -> bool:
        """Let a request decode where a prefill's KV goes: on the fullest instance with room for it, whatever `gpu`.

        Where no instance has room for all of it, on those of the batch that has most room.
        """
        slots, tokens = self.state.slots, request.target_tokens
        index = self._fullest_with_room(tokens)
        if index >= 0:
            batch, instances = self._batch_on(index), [index]
        else:
            batch = max(self._open_batches(), key=lambda batch: slots.free_on(batch.instances), default=Batch([]))
            instances = batch.instances
            if slots.free_on(instances) <= tokens:
                return False
        slots.admit(request, batch, instances)
        self._count(request)
        if batch.strand is not None:
            batch.strand.loop.join(request, 0, self.ledger.oracle.left(request))
            slots.held[request.id].since = batch.strand.step
        self._bell.ring()
        return True

    def _fullest_with_room(self, tokens: int) -> int:
        """The fullest instance with more free slots than `tokens`; those that prefill come last. -1: none."""
        state = self.state
        order = state.slots.fullest_first(range(state.instances))
        order.sort(key=lambda index: index in state.prefilling)
        return next((index for index in order if state.slots.free(index) > tokens), -1)

    def _open_batches(self) -> list[Batch]:
        """Batches to which a request can be added now: no iteration of theirs is under way."""
        batches = [*self.state.parked]
        for strand in self.state.strands():
            if not strand.unfinished:
                batches += strand.batches
        return batches

    def _batch_on(self, index: int) -> Batch:
        """The batch of an instance to which a request can be added now; it waits if the instance is at work."""
        state = self.state
        for batch in self._open_batches():
            if index in batch.instances:
                return batch
        owned = [batch.instances for strand in state.strands() for batch in strand.batches]
        busy = index in state.prefilling or any(index in instances for instances in owned)
        batch = Batch([index])
        if busy:
            state.parked.append(batch)
        else:
            state.main.batches.append(batch)
            batch.strand = state.main
        return batch

    def close(self) -> None:
        """End the loop and the coroutines of its macro-iteration."""
        super().close()
        if self._macro is not None:
            self._macro.close()

    def pools(self) -> tuple[BlockPool, ...]:
        """Slots of every instance; a unit is a token."""
        return self.state.slots.pools

    def audit(self) -> None:
        """Recount the slots."""
        strands = self.state.strands()
        self.state.slots.audit(strands)
        owners = [index for strand in strands for batch in strand.batches for index in batch.instances]
        assert len(owners) == len(set(owners))

    def counters(self) -> dict[str, float]:
        """Macro-iterations, pauses of decode batches, and tokens of KV that were migrated to make room."""
        return {
            "macro_iterations": self._macros,
            "paused_batches": self._allocation.pauses,
            "migrated_tokens": self._allocation.migrated_tokens,
        }
