"""What every part of the scheduler looks at: time, queue, slots, running and paused batches, costs and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

import simpy

from confsim.policies.base import Order
from confsim.run.ledger import Ledger
from confsim.run.request import Request
from confsim.schemes.elastic.batch import Batch, Strand
from confsim.schemes.elastic.dispatch import DispatchLimits
from confsim.schemes.elastic.law import PrefillLaw
from confsim.schemes.elastic.ring import RingCost
from confsim.schemes.elastic.slots import Slots


@dataclass(eq=False, slots=True)
class State:
    """The state of the scheduler between and within macro-iterations."""

    env: simpy.Environment
    ledger: Ledger
    queue: Order
    slots: Slots
    main: Strand  # all decodes between macro-iterations, those that go on within one
    side: list[Strand]  # prefills of a macro-iteration and the decodes that follow them
    cost: RingCost
    law: PrefillLaw
    limits: DispatchLimits
    block_tokens: int
    parked: list[Batch] = field(default_factory=list)  # paused for the macro-iteration
    prefilling: set[int] = field(default_factory=set)  # instances of prefills that have not ended
    released: list[int] = field(default_factory=list)  # requests whose KV was freed since the last plan

    @property
    def instances(self) -> int:
        """All instances."""
        return len(self.slots.pools)

    def strands(self) -> list[Strand]:
        """Every strand."""
        return [self.main, *self.side]

    def idle_instances(self) -> list[int]:
        """Instances that hold no KV and belong to no batch of the main strand and to no paused one."""
        owned: set[int] = set()
        for batch in (*self.main.batches, *self.parked):
            owned.update(batch.instances)
        return [index for index, pool in enumerate(self.slots.pools) if not pool.held and index not in owned]

    def room(self, instance: int) -> int:
        """Prompt tokens that an instance can take at once."""
        return min(self.slots.free(instance), self.limits.instance_tokens)

    def room_on(self, instances: list[int]) -> int:
        """Prompt tokens that several instances can take together."""
        return sum([self.room(instance) for instance in instances])

    def used_blocks(self) -> int:
        """KV in use, in blocks."""
        return -(-sum(self.slots.used) // self.block_tokens)

    def take_released(self) -> tuple[int, ...]:
        """What the next plan says of freed KV."""
        released = tuple(self.released)
        self.released.clear()
        return released

    def pop(self) -> Request | None:
        """The next request of the queue."""
        return self.queue.pop(self.env.now, self._predict_s)

    def push(self, requests: list[Request]) -> None:
        """Queue requests, or return them."""
        for request in requests:
            self.queue.push(request)

    def _predict_s(self, request: Request) -> float:
        tokens = request.target_tokens
        return self.law.seconds(self.instances, tokens, tokens**2)
