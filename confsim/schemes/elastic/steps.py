"""Decode iterations of batches in lockstep: who stores where, and how long the next iterations take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from confsim.run.record import DecodeRun
from confsim.schemes.elastic.ring import RingCost
from confsim.schemes.elastic.state import Batch, Slots, Strand

LONGEST_RUN = 256  # iterations computed ahead


class Masters:
    """Makes room for the next token of every decode and chooses the masters."""

    def __init__(self, slots: Slots, compute_bound_batch: int) -> None:
        self._slots = slots
        self._bound = compute_bound_batch

    def prepare(self, strand: Strand, extra: list[int]) -> bool:
        """Merge or scale up batches short of slots, then choose masters; false where the slots do not suffice.

        `extra` are idle instances that may be taken; those that were are removed from it.
        """
        slack = {batch: self._slack(batch) for batch in strand.batches}
        if sum(slack.values()) + len(extra) * self._slots.capacity < 0:
            return False
        short = sorted((batch for batch in slack if slack[batch] < 0), key=slack.__getitem__)
        if short:
            able = sorted((batch for batch in slack if slack[batch] >= 0), key=slack.__getitem__)
            self._relieve(strand, short, able, slack, extra)
        for batch in strand.batches:
            batch.masters = self._choose(batch, extra)
            self._slots.assign(batch, strand)
        return True

    def _slack(self, batch: Batch) -> int:
        return sum(map(self._slots.free, batch.instances)) - len(batch.members)

    def _relieve(
        self, strand: Strand, short: list[Batch], able: list[Batch], slack: dict[Batch, int], extra: list[int]
    ) -> None:
        """Batches short of slots merge with those that have most to spare, or take idle instances."""
        for batch in short:
            room = slack[batch]
            while room < 0 and able:
                other = able.pop()
                room += slack[other]
                self._slots.merge(batch, other)
                strand.batches.remove(other)
            while room < 0:
                batch.instances.append(extra.pop(0))
                room += self._slots.capacity
            slack[batch] = room
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
        batch.instances = sorted(index for index in order if index in needed or batch.used.get(index))
        return masters


@dataclass(frozen=True)
class Stretch:
    """Iterations of the same decodes: when each ends, and their parts (means where they change)."""

    run: DecodeRun
    linear_s: float
    communication_s: float
    head_s: float

    @property
    def ends_s(self) -> list[float]:
        """End of each iteration."""
        return self.run.ends_s


@dataclass
class _Lines:
    """Attention of every instance of a batch as lines in the steps, and what else its iterations take."""

    value_s: list[float]
    step_s: list[float]
    fixed_s: float
    steps: int  # for which all of it holds
    linear_s: float
    exchange_s: float
    head_s: float
    overhead_s: float


def stretch(cost: RingCost, slots: Slots, strand: Strand, start_s: float, until_s: float, most: int) -> Stretch:
    """The next iterations of a strand, at least one, at most `most`, the last one starting before `until_s`.

    It ends early where a decode ends, a master runs out of slots, or the latency model bends.
    """
    lines = [_lines(cost, slots, batch) for batch in strand.batches]
    steps = min(most, LONGEST_RUN, strand.loop.steps_to_end(), *(line.steps for line in lines))
    attention_s, seconds = _durations(lines, steps, cost.overlap)
    if strand.noise.std:
        seconds *= np.array([strand.noise.factor() for _ in range(steps)])
    ends = start_s + np.cumsum(seconds)
    count = min(steps, int(np.searchsorted(ends, until_s, side="left")) + 1)
    strand.noise.put_back(steps - count)
    return Stretch(
        DecodeRun(
            ends[:count].tolist(),
            attention_s[:count].tolist(),
            max(line.overhead_s for line in lines),
            hidden=False,
            noise=strand.noise,
        ),
        max(line.linear_s for line in lines),
        max(line.exchange_s for line in lines),
        max(line.head_s for line in lines),
    )


def _lines(cost: RingCost, slots: Slots, batch: Batch) -> _Lines:
    latency, count = cost.latency, len(batch.members)
    stored = dict(batch.masters)
    peak = max(stored.values())
    steps = min(slots.free(instance) // size for instance, size in batch.masters)
    value_s: list[float] = []
    step_s: list[float] = []
    for instance in batch.instances:
        size = stored.get(instance, 0)
        context = batch.used.get(instance, 0) + size
        line = latency.decode_attention_line(count, context)
        value_s.append(line.value_s)
        step_s.append(line.slope_s * size)
        if size and line.valid_until != float("inf"):
            steps = min(steps, int((line.valid_until - context) // size) + 1)
    linear_s, head_s, overhead_s = latency.linear_s(peak), latency.head_s(peak), latency.overhead_s(count)
    exchange_s = cost.exchange_s(peak, len(batch.instances) - 1)
    fixed_s = linear_s + head_s + overhead_s
    return _Lines(value_s, step_s, fixed_s, max(1, steps), linear_s, exchange_s, head_s, overhead_s)


def _durations(
    lines: list[_Lines], steps: int, overlap: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Longest attention and longest iteration of each step over all batches: all wait for the slowest."""
    at = np.arange(steps, dtype=np.float64)
    longest = np.zeros(steps)
    seconds = np.zeros(steps)
    for line in lines:
        attention = np.zeros(steps)
        for value_s, step_s in zip(line.value_s, line.step_s, strict=True):
            np.maximum(attention, value_s + step_s * at, out=attention)
        np.maximum(longest, attention, out=longest)
        stage = np.maximum(attention, line.exchange_s) if overlap else attention + line.exchange_s
        np.maximum(seconds, line.fixed_s + stage, out=seconds)
    return longest, seconds
