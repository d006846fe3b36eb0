"""Instances' KV slots, the batches that hold them, and the strands in which batches step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from confsim.kv.pools import BlockPool
from confsim.run.ledger import Ledger
from confsim.run.model_backend import Noise
from confsim.run.record import Track
from confsim.run.request import Request


class Held:
    """KV of one request by instance; while it steps, what `master` has stored since step `since` comes on top."""

    __slots__ = ("master", "since", "tokens")

    def __init__(self, tokens: dict[int, int]) -> None:
        self.tokens = tokens
        self.master = -1
        self.since = 0


class Strand:
    """Batches that decode in lockstep: one clock, one timeline."""

    def __init__(self, ledger: Ledger, name: str, instance: int, noise: Noise) -> None:
        self.loop = ledger.new_loop(1, 1)
        self.track: Track = ledger.new_track(name, instance)
        self.noise = noise
        self.batches: list[Batch] = []
        self.flying = 0  # steps whose slots are taken and that are not in the timeline yet

    @property
    def step(self) -> int:
        """Iterations so far."""
        return len(self.loop.times)


@dataclass(eq=False, slots=True)
class Batch:
    """Decodes that step together, and the instances that they own; `used` are its tokens by instance."""

    instances: list[int]
    members: dict[int, Request] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    masters: list[tuple[int, int]] = field(default_factory=list)  # (instance, decodes that store there)
    strand: Strand | None = None  # whose loop its members are in


class Slots:
    """KV slots of every instance, one token each, and who holds them."""

    def __init__(self, instances: int, capacity: int) -> None:
        self.capacity = capacity
        self.pools = tuple(BlockPool(capacity) for _ in range(instances))
        self.held: dict[int, Held] = {}

    @property
    def used(self) -> list[int]:
        """Slots in use on each instance."""
        return [pool.held for pool in self.pools]

    def free(self, instance: int) -> int:
        """Free slots of an instance."""
        return self.capacity - self.pools[instance].held

    def fullest_first(self, instances: Iterable[int]) -> list[int]:
        """Instances by their use, descending."""
        return sorted(instances, key=lambda index: -self.pools[index].held)

    def place(self, requests: Sequence[Request], instances: Sequence[int]) -> None:
        """Reserve the prompts of a batch: the fullest instance is filled before the next."""
        order = iter(self.fullest_first(instances))
        here = next(order)
        for request in requests:
            tokens: dict[int, int] = {}
            left = request.target_tokens
            while left:
                while not self.free(here):
                    here = next(order)
                part = min(left, self.free(here))
                tokens[here] = part
                self.pools[here].held += part
                left -= part
            self.held[request.id] = Held(tokens)

    def admit(self, request: Request, batch: Batch, instance: int) -> None:
        """A request whose KV is on an instance joins the batch there."""
        tokens = request.target_tokens
        self.pools[instance].held += tokens
        self.held[request.id] = Held({instance: tokens})
        request.prefilled = tokens
        batch.members[request.id] = request
        batch.used[instance] = batch.used.get(instance, 0) + tokens

    def batch_of(self, requests: Sequence[Request]) -> Batch:
        """A batch on the instances that hold its tokens; the others of its prefill are released (scale-down)."""
        batch = Batch([], {request.id: request for request in requests})
        for request in requests:
            for instance, tokens in self.held[request.id].tokens.items():
                batch.used[instance] = batch.used.get(instance, 0) + tokens
        batch.instances = sorted(batch.used)
        return batch

    def settle(self, request: Request, strand: Strand) -> Held:
        """Write down what its master has stored."""
        held = self.held[request.id]
        if held.master >= 0:
            stored = strand.step - held.since
            held.tokens[held.master] = held.tokens.get(held.master, 0) + stored
            held.since = strand.step
        return held

    def drop(self, request: Request, batch: Batch | None) -> None:
        """Free the settled KV of a request, counted in `batch` where it has one."""
        for instance, tokens in self.held.pop(request.id).tokens.items():
            self.pools[instance].held -= tokens
            if batch is not None and tokens:
                batch.used[instance] -= tokens

    def release_empty(self, batch: Batch) -> list[int]:
        """Instances that a batch no longer needs."""
        empty = [index for index in batch.instances if not batch.used.get(index)]
        batch.instances = [index for index in batch.instances if batch.used.get(index)]
        for index in empty:
            batch.used.pop(index, None)
        return empty

    def attach(self, batch: Batch, strand: Strand, left: Ledger) -> None:
        """Have a batch's members step in a strand."""
        if batch.strand is strand:
            return
        self.detach(batch)
        for request in batch.members.values():
            request.target_tokens = request.prompt_tokens + request.emitted - 1  # what is stored
            strand.loop.join(request, 0, left.oracle.left(request))
            self.held[request.id].since = strand.step
        batch.strand = strand

    def detach(self, batch: Batch) -> None:
        """Take a batch's members out of the strand in which they step."""
        strand = batch.strand
        if strand is None:
            return
        for request in batch.members.values():
            self.settle(request, strand).master = -1
            strand.loop.leave(request)
            request.status = "paused"
        batch.strand = None

    def merge(self, into: Batch, other: Batch) -> None:
        """Join two batches of one strand."""
        into.members |= other.members
        into.instances = sorted({*into.instances, *other.instances})
        for instance, tokens in other.used.items():
            into.used[instance] = into.used.get(instance, 0) + tokens

    def move(self, batch: Batch, strand: Strand, source: int, target: int, tokens: int) -> None:
        """Migrate KV inside a batch, request by request."""
        self.pools[source].held -= tokens
        self.pools[target].held += tokens
        batch.used[source] -= tokens
        batch.used[target] = batch.used.get(target, 0) + tokens
        for request in batch.members.values():
            held = self.settle(request, strand)
            part = min(tokens, held.tokens.get(source, 0))
            if part:
                held.tokens[source] -= part
                held.tokens[target] = held.tokens.get(target, 0) + part
                tokens -= part

    def assign(self, batch: Batch, strand: Strand) -> None:
        """Give every member the master of its place in the batch."""
        members = iter(batch.members.values())
        for instance, size in batch.masters:
            for request in (next(members) for _ in range(size)):
                held = self.held[request.id]
                if held.master != instance:
                    self.settle(request, strand)
                    held.master, held.since = instance, strand.step

    def audit(self, strands: Sequence[Strand]) -> None:
        """Recount the slots from the requests that hold them.

        Raises:
            AssertionError: where the books do not balance.
        """
        counted = [0] * len(self.pools)
        for held in self.held.values():
            for instance, tokens in held.tokens.items():
                counted[instance] += tokens
        for strand in strands:
            for request_id in strand.loop.starts:
                held = self.held[request_id]
                if held.master >= 0:
                    counted[held.master] += strand.step - held.since + strand.flying
        for index, pool in enumerate(self.pools):
            assert pool.held == counted[index], (index, pool.held, counted[index])
            assert 0 <= pool.held <= pool.capacity and not pool.cached
