"""Scale-up: room for the next token of every decode, and the masters that store it."""

from __future__ import annotations

from confsim.schemes.elastic.batch import Batch, Strand
from confsim.schemes.elastic.slots import Slots


def _slack(batch: Batch) -> int:
    return batch.slack


class Masters:
    """Makes room for the next token of every decode and chooses the masters."""

    def __init__(self, slots: Slots, compute_bound_batch: int) -> None:
        self._slots = slots
        self._bound = compute_bound_batch

    def prepare(self, strand: Strand, extra: list[int]) -> bool:
        """Merge or scale up batches short of slots, then choose masters; false where the slots do not suffice.

        `extra` are idle instances that may be taken; those that were are removed from it.
        """
        spare = len(extra) * self._slots.capacity
        short = False
        for batch in strand.batches:
            batch.slack = self._slots.free_on(batch.instances) - len(batch.members)
            spare += batch.slack
            short = short or batch.slack < 0
        if spare < 0:
            return False
        if short:
            self._relieve(strand, extra)
        for batch in strand.batches:
            self._slots.assign(batch, strand, self._choose(batch, extra))
        return True

    def _relieve(self, strand: Strand, extra: list[int]) -> None:
        """Batches short of slots merge with those that have most to spare, or take idle instances."""
        order = sorted(strand.batches, key=_slack)
        able = [batch for batch in order if batch.slack >= 0]
        for batch in [batch for batch in order if batch.slack < 0]:
            while batch.slack < 0 and able:
                other = able.pop()
                batch.slack += other.slack
                batch.merge(other)
                strand.batches.remove(other)
            while batch.slack < 0:
                batch.instances.append(extra.pop(0))
                batch.slack += self._slots.capacity
            able.append(batch)

    def _choose(self, batch: Batch, extra: list[int]) -> list[tuple[int, int]]:
        """Fullest instance first, each takes its even share of the rest, or up to the compute-bound batch.

        A batch whose share is compute bound grows into idle instances.
        """
        order = self._slots.fullest_first(batch.instances)
        rest = len(batch.members)
        masters: list[tuple[int, int]] = []
        done = 0
        while done < len(order):
            free = self._slots.free(order[done])
            if free and rest:
                while rest // (len(order) - done) > self._bound and extra:
                    order.append(extra.pop())
                size = min(rest, free, max(rest // (len(order) - done), self._bound))
                masters.append((order[done], size))
                rest -= size
            done += 1
        assert not rest
        needed = {index for index, _ in masters}
        batch.instances = sorted([index for index in order if index in needed or batch.used.get(index)])
        return masters
