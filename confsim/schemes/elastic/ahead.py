"""Decode iterations computed ahead: how long the next ones take while the same decodes step."""

from __future__ import annotations

from dataclasses import dataclass

from confsim.run.record import DecodeRun
from confsim.schemes.elastic.batch import Batch, Strand
from confsim.schemes.elastic.ring import RingCost
from confsim.schemes.elastic.slots import Slots

MAX_STEPS = 256  # iterations computed ahead


@dataclass(slots=True)
class Stretch:
    """Iterations of the same decodes, and their parts: the largest of any batch."""

    run: DecodeRun
    linear_s: float
    communication_s: float
    head_s: float


class _Lines:
    """Attention of every instance of a batch as lines in the steps, and what else its iterations take."""

    def __init__(self, cost: RingCost, slots: Slots, batch: Batch) -> None:
        latency, count = cost.latency, len(batch.members)
        self.attention: list[tuple[float, float]] = []  # of each instance: seconds, and seconds more with each step
        self.steps = MAX_STEPS  # for which all of this holds
        peak = 0
        stored = dict(batch.masters)
        for instance, size in batch.masters:
            peak = max(peak, size)
            self.steps = min(self.steps, slots.free(instance) // size)
        for instance in batch.instances:
            size = stored.get(instance, 0)
            context = batch.used.get(instance, 0) + size
            value_s, slope_s, valid_until = latency.decode_attention_line(count, context)
            self.attention.append((value_s, slope_s * size))
            if size and valid_until != float("inf"):
                self.steps = min(self.steps, int((valid_until - context) // size) + 1)
        self.linear_s = latency.linear_s(peak)
        self.head_s = latency.head_s(peak)
        self.overhead_s = latency.overhead_s(count)
        self.exchange_s = cost.exchange_s(peak, len(batch.instances) - 1)
        self.fixed_s = self.linear_s + self.head_s + self.overhead_s

    def attention_s(self, step: int) -> float:
        """Attention of the instance that takes longest."""
        longest = 0.0
        for value_s, step_s in self.attention:
            seconds = value_s + step_s * step
            if seconds > longest:
                longest = seconds
        return longest


def stretch(cost: RingCost, slots: Slots, strand: Strand, start_s: float, until_s: float, most: int) -> Stretch:
    """The next iterations of a strand, at least one, at most `most`, the last one starting before `until_s`.

    It ends early where a decode ends, a master runs out of slots, or the latency model bends. All batches wait for the
    slowest.
    """
    lines = [_Lines(cost, slots, batch) for batch in strand.batches]
    steps = min(most, strand.loop.steps_to_end())
    for line in lines:
        steps = min(steps, max(1, line.steps))
    noise, overlap = strand.noise, cost.overlap
    ends: list[float] = []
    attention: list[float] = []
    elapsed_s = 0.0
    for step in range(steps):
        longest_s = slowest_s = 0.0
        for line in lines:
            attention_s = line.attention_s(step)
            longest_s = max(longest_s, attention_s)
            stage_s = max(attention_s, line.exchange_s) if overlap else attention_s + line.exchange_s
            slowest_s = max(slowest_s, line.fixed_s + stage_s)
        elapsed_s += slowest_s * noise.factor()
        attention.append(longest_s)
        ends.append(start_s + elapsed_s)
        if ends[-1] >= until_s:
            break
    return Stretch(
        DecodeRun(ends, attention, max([line.overhead_s for line in lines]), False, noise),
        max([line.linear_s for line in lines]),
        max([line.exchange_s for line in lines]),
        max([line.head_s for line in lines]),
    )
