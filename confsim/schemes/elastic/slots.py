"""KV slots of every instance, one token each, and which request holds them where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from confsim.kv.pools import BlockPool
from confsim.run.ledger import Oracle
from confsim.run.plan import DecodeBatch
from confsim.run.request import Request, RequestState
from confsim.schemes.elastic.batch import Batch, Strand


class Held:
    """KV of one request by instance; while it steps, what `master` has stored since step `since` comes on top."""

    __slots__ = ("master", "since", "tokens")

    def __init__(self, tokens: dict[int, int]) -> None:
        self.tokens = tokens
        self.master = -1
        self.since = 0


class Slots:
    """The books of all slots. A decode's new tokens are written down (`settle`) only when somebody has to know."""

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

    def free_on(self, instances: Iterable[int]) -> int:
        """Free slots of several instances together."""
        free = 0
        for instance in instances:
            free += self.capacity - self.pools[instance].held
        return free

    def fullest_first(self, instances: Iterable[int]) -> list[int]:
        """Instances by their use, descending."""
        return sorted(instances, key=lambda index: -self.pools[index].held)

    # Whole prompts

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

    def batch_of(self, requests: Sequence[Request]) -> Batch:
        """A batch on the instances that hold its tokens; the others of its prefill are released (scale-down)."""
        batch = Batch([], {request.id: request for request in requests})
        for request in requests:
            for instance, tokens in self.held[request.id].tokens.items():
                batch.hold(instance, tokens)
        batch.instances = sorted(batch.used)
        return batch

    def admit(self, request: Request, batch: Batch, instances: Sequence[int]) -> None:
        """A request whose KV exists joins a batch: it lies on some of the batch's instances, filled fullest first."""
        self.place([request], instances)
        for instance, tokens in self.held[request.id].tokens.items():
            batch.hold(instance, tokens)
        request.prefilled = request.target_tokens
        request.move_to(RequestState.PAUSED)
        batch.members[request.id] = request

    def drop(self, request: Request, batch: Batch | None) -> None:
        """Free the settled KV of a request, counted in `batch` where it has one."""
        for instance, tokens in self.held.pop(request.id).tokens.items():
            self.pools[instance].held -= tokens
            if batch is not None and tokens:
                batch.used[instance] -= tokens

    # While requests decode

    def attach(self, batch: Batch, strand: Strand, oracle: Oracle) -> None:
        """Have a batch's members step in a strand."""
        if batch.strand is strand:
            return
        self.detach(batch)
        for request in batch.members.values():
            request.target_tokens = request.prompt_tokens + request.emitted - 1  # what is stored
            strand.loop.join(request, 0, oracle.left(request))
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
            request.move_to(RequestState.PAUSED)
        batch.strand = None

    def leave(self, request: Request, batch: Batch, strand: Strand) -> None:
        """Take one request out of the strand and of its batch, and free its slots."""
        held = self.settle(request, strand)
        strand.loop.leave(request)
        request.group = max(held.master, 0)
        self.drop(request, batch)
        del batch.members[request.id]

    def settle(self, request: Request, strand: Strand) -> Held:
        """Write down what its master has stored."""
        held = self.held[request.id]
        if held.master >= 0:
            stored = strand.step - held.since
            held.tokens[held.master] = held.tokens.get(held.master, 0) + stored
            held.since = strand.step
        return held

    def move(self, batch: Batch, strand: Strand, source: int, target: int, tokens: int) -> None:
        """Migrate KV inside a batch, request by request."""
        self.pools[source].held -= tokens
        self.pools[target].held += tokens
        batch.used[source] -= tokens
        batch.hold(target, tokens)
        for request in batch.members.values():
            held = self.settle(request, strand)
            part = min(tokens, held.tokens.get(source, 0))
            if part:
                held.tokens[source] -= part
                held.tokens[target] = held.tokens.get(target, 0) + part
                tokens -= part

    def assign(self, batch: Batch, strand: Strand, sizes: Sequence[tuple[int, int]]) -> None:
        """Give every member a master, by its place in the batch; `sizes` are (instance, decodes that store there)."""
        step = strand.step
        shares = {index: DecodeBatch(index) for index in batch.instances}
        masters = iter(sizes)
        instance, left = -1, 0
        for request_id, request in batch.members.items():
            while not left:
                instance, left = next(masters)
            left -= 1
            shares[instance].members[request_id] = request
            held = self.held[request_id]
            if held.master != instance:
                self.settle(request, strand)
                held.master, held.since = instance, step
        for index, share in shares.items():
            share.count = len(share.members)
            share.context_tokens = batch.used.get(index, 0) + share.count
        batch.shares = tuple(shares.values())

    def grow(self, batch: Batch, steps: int) -> None:
        """Take the slots of a batch's next iterations."""
        for share in batch.shares:
            if share.count:
                self.pools[share.group].held += share.count * steps
                batch.hold(share.group, share.count * steps)

    def steps_of(self, batch: Batch) -> int:
        """Iterations for which its masters have slots."""
        return min([self.free(share.group) // share.count for share in batch.shares if share.count])

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
                    counted[held.master] += strand.step - held.since + strand.unfinished
        for index, pool in enumerate(self.pools):
            assert pool.held == counted[index], (index, pool.held, counted[index])
            assert 0 <= pool.held <= pool.capacity and not pool.cached
