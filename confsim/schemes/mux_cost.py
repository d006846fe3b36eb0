"""What MuxWise's two phases cost on disjoint shares of the SMs, and the share that decode needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from confsim.latency.base import LatencyModel
from confsim.latency.share import ALL_SMS, PartitionLatency, SmShares
from confsim.outcome.slo import TOLERANCE
from confsim.run.request import Request
from confsim.specs import GpuSpec

FULL = -1  # the whole GPU, in place of the index of a split
LEAST_SMS = 8  # of a green context on Hopper
# The largest slowdown of decode beside prefill that the MuxWise paper reports (arXiv 2504.14489).
WORST_SLOWDOWN = {"a100_sxm": 1.2, "h100_sxm": 1.3}
OTHER_SLOWDOWN = 1.3
DRAWS = 4096


def decode_sms(gpu: GpuSpec, partition_sms: int) -> list[int]:
    """SMs of decode in every split, ascending: prefill has 1, 2, ... partitions, and decode what is left.

    132 SMs in partitions of 16: 20, 36, ..., 116.
    """
    return [sms for sms in range(gpu.sms % partition_sms, gpu.sms, partition_sms) if sms >= LEAST_SMS]


class PrefillTime(NamedTuple):
    """Seconds of a prefill batch through all layers on one share."""

    total_s: float
    linear_s: float
    attention_s: float
    head_s: float
    overhead_s: float


class Contention:
    """Factor of a decode iteration beside a prefill: between 1 and the worst.

    `rng` draws it evenly anew for every iteration; without one it is always the mean. Only the worst was published.
    """

    def __init__(self, worst: float, rng: np.random.Generator | None) -> None:
        self._worst = worst
        self._rng = rng
        self._block: list[float] = []

    def factor(self) -> float:
        """The next factor."""
        if self._rng is None:
            return (1.0 + self._worst) / 2.0
        if not self._block:
            self._block = self._rng.uniform(1.0, self._worst, DRAWS).tolist()
        return self._block.pop()


@dataclass(frozen=True)
class MuxOptions:
    """What prices and decisions depend on.

    `target_s` is the TBT that decode has to meet at `worst_slowdown`; launching prefill layer by layer costs
    `launch_overhead` of its time; host time is hidden behind the GPU with `async_schedule`.
    """

    target_s: float
    worst_slowdown: float
    launch_overhead: float
    async_schedule: bool


class MuxCost:
    """Times of decode iterations and prefill batches on every split of the SMs; a split is known by its index.

    Splits ascend in decode's SMs. Decode of `count` sequences costs a part fixed by the count, cached here, and its
    attention scaled by the split.
    """

    def __init__(
        self, latency: LatencyModel, shares: SmShares, gpu: GpuSpec, splits: Sequence[int], options: MuxOptions
    ) -> None:
        self.latency = latency
        self.options = options
        self.splits = tuple(splits)
        speeds = [shares.speeds(gpu, sms) for sms in splits]
        self._decode = [PartitionLatency(latency, speed) for speed in speeds]
        self._attention = [1.0 / speed.decode_attention for speed in speeds]
        self._prefill = [PartitionLatency(latency, shares.speeds(gpu, gpu.sms - sms)) for sms in splits]
        self._prefill.append(PartitionLatency(latency, ALL_SMS))  # index FULL
        self._fixed: dict[int, tuple[list[float], list[float]]] = {}  # count -> linear and head of every split

    def fixed_s(self, count: int) -> tuple[list[float], list[float]]:
        """Linear layers and head of a decode iteration, by split; the last entry is the whole GPU."""
        fixed = self._fixed.get(count)
        if fixed is None:
            linear = [part.linear_s(count) for part in self._decode] + [self.latency.linear_s(count)]
            head = [part.head_s(count) for part in self._decode] + [self.latency.head_s(count)]
            fixed = self._fixed[count] = linear, head
        return fixed

    def attention_s(self, split: int, alone_s: float) -> float:
        """Decode attention on a split, from that on the whole GPU."""
        return alone_s if split == FULL else alone_s * self._attention[split]

    def exposed_s(self, sequences: int, gpu_s: float) -> float:
        """Host time that the GPU does not hide."""
        overhead_s = self.latency.overhead_s(sequences)
        return max(0.0, overhead_s - gpu_s) if self.options.async_schedule else overhead_s

    def best_fit(self, count: int, alone_s: float) -> int:
        """The smallest split on which decode meets its target at the worst slowdown; the largest where none does.

        `alone_s` is its attention on the whole GPU.
        """
        options = self.options
        limit_s = options.target_s * TOLERANCE
        if not options.async_schedule:
            limit_s -= self.latency.overhead_s(count)
        limit_s /= options.worst_slowdown
        linear, head = self.fixed_s(count)
        for split, scale in enumerate(self._attention):
            if linear[split] + head[split] + alone_s * scale <= limit_s:
                return split
        return len(self._attention) - 1

    def guarded_s(self, split: int, count: int, alone_s: float) -> float:
        """A decode iteration at the worst slowdown."""
        linear, head = self.fixed_s(count)
        gpu_s = (linear[split] + head[split] + self.attention_s(split, alone_s)) * self.options.worst_slowdown
        return gpu_s + self.exposed_s(count, gpu_s)

    def prefill_s(self, requests: Sequence[Request], split: int) -> PrefillTime:
        """The rest of the prompts of `requests` in one batch, beside decode on a split or on the whole GPU."""
        part = self._prefill[split]
        tokens, attention_s = 0, 0.0
        for request in requests:
            tokens += request.remaining_prefill
            attention_s += part.prefill_attention_s(request.remaining_prefill, request.prefilled)
        linear_s, head_s = part.linear_s(tokens), part.head_s(len(requests))
        gpu_s = linear_s + attention_s + head_s
        overhead_s = self.exposed_s(len(requests), gpu_s)
        if split != FULL:
            overhead_s += self.options.launch_overhead * gpu_s
        return PrefillTime(gpu_s + overhead_s, linear_s, attention_s, head_s, overhead_s)
