"""The serving loop: lockstep decoding, and macro-iterations in which prefills and decodes run side by side."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import simpy

from confsim.kv.pools import BlockPool
from confsim.run.plan import IterationTiming
from confsim.run.request import Request
from confsim.schemes.base import Instance, Setup
from confsim.schemes.elastic.batching import partition
from confsim.schemes.elastic.dispatch import Cluster, Dispatcher, DispatchLimits, Sums, sums_of
from confsim.schemes.elastic.ring import RingCost, fit_law
from confsim.schemes.elastic.state import Batch, Slots, Strand
from confsim.schemes.elastic.steps import Masters, Stretch, stretch

POLL_S = 0.010  # idle instances look for prompts this often during a macro-iteration


@dataclass(frozen=True)
class ElasticOptions:
    """Options of the loop; `dispatch` bounds what a prefill takes."""

    dispatch: DispatchLimits
    max_wait_tokens: int
    compute_bound_batch: int
    split_batches: bool


@dataclass
class Prefill:
    """A prefill batch, its instances, and how long it takes."""

    requests: list[Request]
    instances: list[int]
    timing: IterationTiming
    predicted_s: float  # by the fitted law


@dataclass
class Macro:
    """A macro-iteration: it lasts until its first prefills have ended, predicted after `planned_s`."""

    start_s: float
    end_s: float
    planned_s: float
    running: int  # first prefills that have not ended


class ElasticInstance(Instance):
    """Instances that join for prefills and part for decodes."""

    def __init__(
        self, setup: Setup, name: str, cost: RingCost, instances: int, capacity: int, options: ElasticOptions
    ) -> None:
        super().__init__(setup)
        self._cost = cost
        self._options = options
        self._size = instances
        law = fit_law(cost, instances, options.dispatch.instance_tokens)
        self._dispatcher = Dispatcher(law, instances, options.dispatch)
        self._law = law
        self.slots = Slots(instances, capacity)
        self._masters = Masters(self.slots, options.compute_bound_batch)
        self._main = self._new_strand(f"{name}/main", 0)
        self._side = [self._new_strand(f"{name}/batch{index}", index + 1) for index in range(instances)]
        self._strands = [self._main, *self._side]
        self._queue = setup.policy.new_order()
        self._parked: list[Batch] = []  # paused for the macro-iteration
        self._steps_since = 0  # decode iterations since the last macro-iteration
        self._wake: simpy.Event | None = None
        self.macros = self.pauses = self.migrated_tokens = 0
        self._coroutines: list[Generator[simpy.Event, Any, None]] = []  # of the present macro-iteration
        self.spawn(self._run())

    def _new_strand(self, name: str, stream: int) -> Strand:
        return Strand(self.ledger, name, self.setup.instance, self.setup.noise(stream))

    # What an engine and routers ask

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never be served here, or an empty string."""
        tokens = prompt_tokens + output_tokens - 1  # the longest prefill, too, if its KV is dropped
        if tokens > self._size * self.slots.capacity:
            return "kv_capacity"
        return "" if tokens <= self._size * self._options.dispatch.instance_tokens else "prompt_limit"

    def enqueue(self, request: Request) -> None:
        """Queue a request and wake the loop if it is idle."""
        self._queue.push(request)
        self._rouse()

    def close(self) -> None:
        """End the loop and the coroutines of its macro-iteration."""
        super().close()
        for coroutine in self._coroutines:
            coroutine.close()

    def preload(self, request: Request, gpu: int) -> bool:
        """Let a request decode on the instance of a GPU, as if its prompt had just been prefilled there."""
        index = gpu * self._size // self.setup.cluster.gpus
        if self.slots.free(index) <= request.target_tokens:
            return False
        batch = self._batch_on(index)
        self.slots.admit(request, batch, index)
        self._count(request)
        if batch.strand is not None:
            batch.strand.loop.join(request, 0, self.ledger.oracle.left(request))
            self.slots.held[request.id].since = batch.strand.step
        self._rouse()
        return True

    def _batch_on(self, index: int) -> Batch:
        """The batch of an instance to which a request can be added now."""
        for batch in (*self._parked, *(batch for strand in self._strands for batch in strand.batches)):
            if index in batch.instances and not (batch.strand is not None and batch.strand.flying):
                return batch
        busy = any(index in batch.instances for strand in self._strands for batch in strand.batches)
        (self._parked if busy else self._main.batches).append(batch := Batch([index]))
        if not busy:
            batch.strand = self._main
        return batch

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def pools(self) -> tuple[BlockPool, ...]:
        """Slots of every instance; a unit is a token."""
        return self.slots.pools

    def audit(self) -> None:
        """Recount the slots."""
        self.slots.audit(self._strands)
        owners = [index for strand in self._strands for batch in strand.batches for index in batch.instances]
        assert len(owners) == len(set(owners))

    def counters(self) -> dict[str, float]:
        """Macro-iterations, pauses of decode batches, and tokens of KV that were migrated to make room."""
        return {
            "macro_iterations": self.macros,
            "paused_batches": self.pauses,
            "migrated_tokens": self.migrated_tokens,
        }

    # The loop

    def _run(self) -> Generator[simpy.Event, Any, None]:
        main = self._main
        while True:
            idle = not main.batches
            if idle or self._steps_since >= self._options.max_wait_tokens:
                chosen = self._choose()
                if chosen:
                    self._steps_since = 0
                    yield from self._macro(chosen)
                    continue
                if idle:
                    self._wake = self.env.event()
                    yield self._wake
                    continue
            if self._masters.prepare(main, self._idle_instances()):
                yield from self._decode(main, self.env.peek(), self._run_length())
            else:
                self._drop_one()
                self._steps_since = 0

    def _run_length(self) -> int:
        """Iterations until the queue is looked at again; an arrival ends a run in any case."""
        if not len(self._queue):
            return 1 << 30
        return max(1, self._options.max_wait_tokens - self._steps_since)

    def _choose(self) -> list[Request]:
        """Requests for the next prefill."""
        if not len(self._queue):
            return []
        began = perf_counter()
        running = [
            (request.prompt_tokens, self._emitted(request, batch))
            for batch in self._main.batches
            for request in batch.members.values()
        ]
        chosen, rest = self._dispatcher.choose(self._pop, Cluster(self.slots.used, running))
        for request in rest:
            self._queue.push(request)
        self.ledger.schedule_pass_s.append(perf_counter() - began)
        return chosen

    def _pop(self) -> Request | None:
        return self._queue.pop(self.env.now, self._predict_s)

    def _predict_s(self, request: Request) -> float:
        tokens = request.target_tokens
        return self._law.seconds(self._size, tokens, tokens**2)

    def _emitted(self, request: Request, batch: Batch) -> int:
        if batch.strand is None:
            return request.emitted
        return request.emitted + batch.strand.step - batch.strand.loop.starts[request.id]

    def _idle_instances(self) -> list[int]:
        owned = {index for batch in (*self._main.batches, *self._parked) for index in batch.instances}
        return [index for index, used in enumerate(self.slots.used) if not used and index not in owned]

    def _drop_one(self) -> None:
        """All slots are exhausted: the latest request gives up its KV and is prefilled again, output included."""
        pairs = [(request, batch) for batch in self._main.batches for request in batch.members.values()]
        request, batch = max(pairs, key=lambda pair: (pair[0].arrival_s, pair[0].id))
        self._leave(request, batch, self._main)
        request.requeue()
        self.ledger.preemptions += 1
        self._queue.push(request)
        self._tidy(self._main, batch)

    def _leave(self, request: Request, batch: Batch, strand: Strand) -> None:
        """Take a request out of its batch and free its slots."""
        master = self.slots.settle(request, strand).master
        strand.loop.leave(request)
        request.group = max(master, 0)
        self.slots.drop(request, batch)
        del batch.members[request.id]

    def _tidy(self, strand: Strand, batch: Batch) -> list[int]:
        """Release what a batch no longer needs; returns the instances."""
        if batch.members:
            return self.slots.release_empty(batch)
        strand.batches.remove(batch)
        return batch.instances

    # Decoding

    def _decode(self, strand: Strand, until_s: float, most: int) -> Generator[simpy.Event, Any, list[int]]:
        """Iterations of a strand; returns the instances that are released at their end."""
        loop, slots = strand.loop, self.slots
        start_s = self.env.now
        ahead = stretch(self._cost, slots, strand, start_s, until_s, most)
        ends = ahead.ends_s
        self._record(strand, ahead, start_s)
        for batch in strand.batches:
            for instance, size in batch.masters:
                slots.pools[instance].held += size * len(ends)
                batch.used[instance] = batch.used.get(instance, 0) + size * len(ends)
        loop.advance(ends[:-1])
        strand.flying = 1
        self._steps_since += len(ends)
        yield self.env.timeout(ends[-1] - start_s)
        strand.flying = 0
        return self._end_step(strand)

    def _end_step(self, strand: Strand) -> list[int]:
        done = strand.loop.step(self.env.now)
        touched: dict[Batch, None] = {}
        for request in done:
            batch = next(batch for batch in strand.batches if request.id in batch.members)
            self._leave(request, batch, strand)
            self._finish(request)
            touched[batch] = None
        return [index for batch in touched for index in self._tidy(strand, batch)]

    def _finish(self, request: Request) -> None:
        self._dispatcher.ended(request.emitted)
        self.complete(request, self.env.now)

    def _record(self, strand: Strand, ahead: Stretch, start_s: float) -> None:
        counts = [0] * self._size
        for batch in strand.batches:
            for instance, size in batch.masters:
                counts[instance] += size
        context = strand.loop.batches[0].context_tokens
        strand.track.run(
            start_s, ahead.run, ahead.linear_s, ahead.head_s, tuple(counts), len(self._queue), self._used_blocks(),
            context, communication_s=ahead.communication_s,
        )  # fmt: skip

    def _used_blocks(self) -> int:
        return -(-sum(self.slots.used) // self.setup.kv.block_tokens)

    # Macro-iterations

    def _macro(self, chosen: list[Request]) -> Generator[simpy.Event, Any, None]:
        """Prefills beside the decodes that go on; it lasts until the prefills have ended."""
        sums = sums_of(chosen)
        yield from self._compact(sums)
        available = self._make_room(sums)
        prefills = self._batches(chosen, available)
        now = self.env.now
        end_s = now + max(prefill.timing.duration_s for prefill in prefills)
        macro = Macro(now, end_s, max(prefill.predicted_s for prefill in prefills), len(prefills))
        self.macros += 1
        self._coroutines = [self._independent(self._main, [], macro)] if self._main.batches else []
        for strand, prefill in zip(self._side, prefills, strict=False):
            self._coroutines.append(self._independent(strand, [prefill], macro))
        processes = [self.env.process(coroutine) for coroutine in self._coroutines]
        yield processes[0] if len(processes) == 1 else self.env.all_of(processes)
        self._steps_since = 0
        self._join()

    def _compact(self, sums: Sums) -> Generator[simpy.Event, Any, None]:
        """Migrate KV out of the emptiest instances: as many as the prompts need, more where prefill gains by it."""
        slots, law = self.slots, self._law
        room = self._options.dispatch.room
        used = slots.used
        least = -(-sum(used) // slots.capacity)
        order = slots.fullest_first(index for index in range(self._size) if used[index])
        idle, most_idle = self._size - len(order), self._size - least
        if idle >= most_idle or sums.tokens > most_idle * room:
            return
        target = least - 1
        delay_s = 0.0
        while idle < most_idle:
            source = order.pop()
            tokens = slots.used[source]
            if sums.tokens <= idle * room:
                gain_s = law.seconds(idle, sums.tokens, sums.squares) - law.seconds(idle + 1, sums.tokens, sums.squares)
                if gain_s < self._cost.send_s(tokens):
                    break
            while slots.used[source]:
                part = min(slots.used[source], slots.free(order[target]))
                if part:
                    self._migrate(source, order[target], part)
                else:
                    target -= 1
            slots.release_empty(self._owner(order[target]))
            delay_s += self._cost.send_s(tokens)
            self.migrated_tokens += tokens
            idle += 1
        if delay_s:
            yield self.env.timeout(delay_s)

    def _owner(self, instance: int) -> Batch:
        return next(batch for batch in self._main.batches if instance in batch.instances)

    def _migrate(self, source: int, target: int, tokens: int) -> None:
        into, batch = self._owner(target), self._owner(source)
        if into is not batch:
            self.slots.merge(into, batch)
            self._main.batches.remove(batch)
        self.slots.move(into, self._main, source, target, tokens)

    def _make_room(self, sums: Sums) -> list[int]:
        """Pause decode batches for the prompts: those whose slots are needed, then those whose instances are worth it.

        Returns the instances for prefill.
        """
        main, slots = self._main, self.slots
        available = self._idle_instances()
        needed = sums.tokens - len(available) * self._options.dispatch.room
        spare = sorted(main.batches, key=lambda batch: sum(map(slots.free, batch.instances)))
        while needed > 0 and spare:
            batch = spare.pop()
            needed -= sum(map(self._room, batch.instances))
            available += batch.instances
            self._park(batch)
        for batch in spare:
            if self._worth_pausing(batch, len(available), sums):
                available += batch.instances
                self._park(batch)
        if main.batches and not self._keep_decoding(available, sums):
            for batch in list(main.batches):
                self._park(batch)
            available = list(range(self._size))
        if main.batches:
            for batch in self._parked:
                slots.detach(batch)
        return available

    def _room(self, instance: int) -> int:
        return min(self.slots.free(instance), self._options.dispatch.instance_tokens)

    def _park(self, batch: Batch) -> None:
        self._main.batches.remove(batch)
        self._parked.append(batch)
        self.pauses += 1

    def _worth_pausing(self, batch: Batch, available: int, sums: Sums) -> bool:
        """[T(k) - T(k + m)] * sum(1 / len) >= T(k + m) * decodes * (decodes / sum(out))."""
        with_s = self._law.seconds(available + len(batch.instances), sums.tokens, sums.squares)
        gain_s = self._law.seconds(available, sums.tokens, sums.squares) - with_s
        emitted = sum(self._emitted(request, batch) for request in batch.members.values())
        decodes = len(batch.members)
        return gain_s * sums.inverse >= with_s * decodes * decodes / emitted

    def _keep_decoding(self, available: list[int], sums: Sums) -> bool:
        """Whether the decodes that are left can go on, with idle instances that the prefill can spare."""
        extra: list[int] = []
        while not self._masters.prepare(self._main, extra):
            idle = [index for index in available if not self.slots.used[index]]
            rest = sum(self._room(index) for index in available) - (self._room(idle[-1]) if idle else 0)
            if not idle or rest < sums.tokens:
                available += extra
                return False
            available.remove(idle[-1])
            extra.append(idle[-1])
        available += extra  # those that it did not take
        return True

    def _batches(self, requests: list[Request], instances: Sequence[int]) -> list[Prefill]:
        """The dynamic programme's batches, their slots reserved and their times drawn."""
        by_length = sorted(requests, key=lambda request: -request.target_tokens)
        order = sorted(instances, key=lambda index: (self.slots.pools[index].held, index))
        lengths = [request.target_tokens for request in by_length]
        rooms = [self._room(index) for index in order]
        shares = partition(lengths, rooms, self._law, self._options.split_batches)
        prefills = []
        for share in shares:
            batch, used = by_length[share.first : share.last], order[share.left : share.right]
            self.slots.place(batch, used)
            timing = self._cost.prefill(lengths[share.first : share.last], len(used))
            if self._main.noise.std:
                timing = timing._replace(duration_s=timing.duration_s * self._main.noise.factor())
            sums = sums_of(batch)
            prefills.append(Prefill(batch, used, timing, self._law.seconds(len(used), sums.tokens, sums.squares)))
            for request in batch:
                request.status = "prefill"
                if request.prefill_start_s < 0:
                    request.prefill_start_s = self.env.now
        return prefills

    def _independent(self, strand: Strand, prefills: list[Prefill], macro: Macro) -> Generator[simpy.Event, Any, None]:
        """One coroutine of a macro-iteration: a prefill and then its decodes, or the decodes that go on."""
        first = bool(prefills)
        released: list[int] = []
        while True:
            if prefills:
                released += yield from self._prefill(strand, prefills)
                macro.running -= first
                first = False
            if not strand.batches:
                prefills = yield from self._prefill_meanwhile(released, macro)
                if not prefills:
                    return
                released = []
                continue
            prefills = []
            if macro.running == 0 or not self._masters.prepare(strand, []):
                return
            for batch in strand.batches:
                self.slots.attach(batch, strand, self.ledger)
            released += yield from self._decode(strand, macro.end_s, 1 << 30)

    def _prefill(self, strand: Strand, prefills: list[Prefill]) -> Generator[simpy.Event, Any, list[int]]:
        """Run prefill batches side by side until the longest has ended; returns instances that hold none of them."""
        start_s = self.env.now
        yield self.env.timeout(max(prefill.timing.duration_s for prefill in prefills))
        released: list[int] = []
        for prefill in prefills:
            self._record_prefill(strand, prefill, start_s)
            staying = [request for request in prefill.requests if self._first_token(request)]
            batch = self.slots.batch_of(staying)
            released += [index for index in prefill.instances if index not in batch.used]
            if staying:
                strand.batches.append(batch)
        return released

    def _first_token(self, request: Request) -> bool:
        """Emit the token of a prefill; true if the request goes on."""
        request.prefilled = request.target_tokens
        self.ledger.emit(request, self.env.now)
        if self.ledger.oracle.left(request) > 0:
            request.status = "paused"
            return True
        request.group = next(iter(self.slots.held[request.id].tokens))
        self.slots.drop(request, None)
        self._finish(request)
        return False

    def _record_prefill(self, strand: Strand, prefill: Prefill, start_s: float) -> None:
        tokens = sum(request.target_tokens for request in prefill.requests)
        share, rest = divmod(tokens, len(prefill.instances))
        shards = [0] * self._size
        for place, index in enumerate(prefill.instances):
            shards[index] = share + (place < rest)
        zeros = (0,) * self._size
        strand.track.iteration(
            start_s, start_s + prefill.timing.duration_s, prefill.timing, tuple(shards), zeros, len(self._queue),
            self._used_blocks(), 0,
        )  # fmt: skip

    def _prefill_meanwhile(self, instances: list[int], macro: Macro) -> Generator[simpy.Event, Any, list[Prefill]]:
        """Instances without work look for prompts whose prefill fits the time left."""
        while macro.running > 0:
            left_s = macro.planned_s - (self.env.now - macro.start_s)
            if left_s <= 0:
                return []
            chosen: list[Request] = []
            if len(self._queue):
                free = [self.slots.free(index) for index in instances]
                chosen, rest = self._dispatcher.choose_within(self._pop, free, left_s)
                for request in rest:
                    self._queue.push(request)
            if chosen:
                return self._batches(chosen, instances)
            yield self.env.timeout(POLL_S)
        return []

    def _join(self) -> None:
        """All batches decode on in the main strand; those that share an instance, paused and new ones, merge."""
        main = self._main
        batches = [batch for strand in self._strands for batch in strand.batches] + self._parked
        self._parked = []
        for strand in self._strands:
            strand.batches = []
        for batch in batches:
            self.slots.attach(batch, main, self.ledger)
            for other in list(main.batches):
                if set(batch.instances) & set(other.instances):
                    self.slots.merge(other, batch)
                    main.batches.remove(other)
                    batch = other
            main.batches.append(batch)
