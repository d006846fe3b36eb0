"""Decode batches, the instances that they own, and the strands in which they step together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from confsim.run.backend import Backend
from confsim.run.ledger import Ledger
from confsim.run.plan import DecodeBatch, IterationPlan
from confsim.run.record import Track
from confsim.run.request import Request


class Strand:
    """Batches that decode in lockstep: one clock, one timeline."""

    def __init__(self, ledger: Ledger, name: str, instance: int, backend: Backend) -> None:
        self.loop = ledger.new_loop(1, 1)
        self.track: Track = ledger.new_track(name, instance)
        self.backend = backend
        self.batches: list[Batch] = []
        self.unfinished = 0  # iterations whose slots are taken and that are not in the timeline yet

    @property
    def step(self) -> int:
        """Iterations so far."""
        return len(self.loop.times)

    def plan(self, released: tuple[int, ...]) -> IterationPlan:
        """The next iteration: every batch on a ring of its own, each instance with what it stores."""
        decode = tuple([share for batch in self.batches for share in batch.shares])
        return IterationPlan((), decode, released, rings=tuple([tuple(batch.instances) for batch in self.batches]))

    def decodes(self) -> Iterator[tuple[Request, Batch]]:
        """Every request that steps here, with its batch."""
        for batch in self.batches:
            for request in batch.members.values():
                yield request, batch


@dataclass(eq=False, slots=True)
class Batch:
    """Decodes that step together, and the instances that they own."""

    instances: list[int]
    members: dict[int, Request] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)  # tokens of the batch by instance
    shares: tuple[DecodeBatch, ...] = ()  # of the next iteration, by instance: the decodes that store there
    strand: Strand | None = None  # whose loop its members are in
    slack: int = 0  # free slots of its instances beyond one for every member

    def hold(self, instance: int, tokens: int) -> None:
        """Count tokens that lie on an instance from now on."""
        self.used[instance] = self.used.get(instance, 0) + tokens

    def emitted(self, request: Request) -> int:
        """Tokens of a member that are out."""
        if self.strand is None:
            return request.emitted
        return request.emitted + self.strand.step - self.strand.loop.starts[request.id]

    def merge(self, other: Batch) -> None:
        """Take over another batch of the same strand."""
        self.members |= other.members
        self.instances = sorted({*self.instances, *other.instances})
        for instance, tokens in other.used.items():
            self.hold(instance, tokens)

    def release_empty(self) -> list[int]:
        """Give up the instances that hold no token; returns them."""
        empty = [index for index in self.instances if not self.used.get(index)]
        self.instances = [index for index in self.instances if self.used.get(index)]
        for index in empty:
            self.used.pop(index, None)
        return empty
