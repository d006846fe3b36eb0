"""What MuxWise's two phases cost on disjoint shares of the SMs, and the share that decode needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from mypy_extensions import mypyc_attr

from confsim.latency.base import LatencyModel
from confsim.latency.share import ALL_SMS, PartitionLatency, SmShares
from confsim.outcome.slo import TOLERANCE
from confsim.run.model_backend import Clock
from confsim.run.plan import WHOLE_GPU, DecodeBatch, DecodeLoad, DecodeRun, IterationPlan, IterationTiming, PrefillChunk
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.specs import GpuSpec

LEAST_SMS = 8  # of a green context on Hopper
KERNELS = "linear"  # its implementation runs FlashInfer
# The largest slowdown of decode beside prefill that the MuxWise paper reports (arXiv 2504.14489).
WORST_SLOWDOWN = {"a100_sxm": 1.2, "h100_sxm": 1.3}
OTHER_SLOWDOWN = 1.3
DRAWS = 4096


def decode_sms(gpu: GpuSpec, partition_sms: int) -> list[int]:
    """SMs of decode in every split, ascending: prefill has 1, 2, ... partitions, and decode what is left.

    132 SMs in partitions of 16: 20, 36, ..., 116.
    """
    return [sms for sms in range(gpu.sms % partition_sms, gpu.sms, partition_sms) if sms >= LEAST_SMS]


class Division(NamedTuple):
    """SMs of decode beside a prefill, from so many decodes on (the last division that they reach counts)."""

    decode_sms: int
    from_decodes: int


def automatic_divisions(gpu: GpuSpec, groups: int, divisor: int, sm_multiple: int) -> list[Division]:
    """The divisions that SGLang's pdmux makes where its configuration names none; none where the GPU is too small.

    Prefill has multiples of `sm_multiple` SMs, at least half of them all, and decode at least 16. Of these counts
    `groups - 2` are taken at even steps from the smallest prefill up: 112/20, 104/28, ..., 72/60 of 132 in steps of 8,
    84/24, 78/30, ..., 54/54 of 108 in steps of 2. With g groups that exist, `n` decodes have division
    `clamp(n * (g - 2) // divisor, 1, g - 2)`.
    """
    prefills = [sms for sms in range(sm_multiple, gpu.sms, sm_multiple) if 16 <= gpu.sms - sms <= sms]
    wanted = groups - 2
    if len(prefills) > wanted:
        prefills = prefills[:: len(prefills) // wanted][:wanted]
    prefills.reverse()
    count = len(prefills)
    # n * count // divisor >= index, from n = ceil(index * divisor / count) on
    starts = [1] + [-(-index * divisor // count) for index in range(2, count + 1)]
    return [Division(gpu.sms - sms, start) for sms, start in zip(prefills, starts, strict=False)]


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


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class MuxOptions:
    """What prices and decisions depend on.

    `target_s` is the TBT that decode has to meet at `worst_slowdown`; launching prefill layer by layer costs
    `launch_overhead` of its time; host time is hidden behind the GPU with `async_schedule`. `from_decodes` gives for
    every split the decodes from which on it is taken; None: splits are chosen by predictions (`best_fit`).
    """

    target_s: float
    worst_slowdown: float
    launch_overhead: float
    async_schedule: bool
    from_decodes: tuple[int, ...] | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class MuxCost:
    """Times of decode iterations and prefill batches on every split of the SMs; a split is known by its index.

    `splits` are decode's SMs, ascending where splits are chosen by predictions. Decode of `count` sequences costs a
    part fixed by the count, cached here, and its attention scaled by the split; beside prefill, `contention` is what it
    really suffers. `layers` of the model are run by a prefill batch.
    """

    def __init__(
        self,
        latency: LatencyModel,
        shares: SmShares,
        gpu: GpuSpec,
        splits: Sequence[int],
        layers: int,
        options: MuxOptions,
        contention: Contention,
    ) -> None:
        self.latency = latency
        self.layers = layers
        self.options = options
        self.splits = tuple(splits)
        self._contention = contention
        self._alone = CoBatchCost(latency, in_turn, async_schedule=options.async_schedule)
        self._priced: list[tuple[Sequence[PrefillChunk], dict[int, PrefillTime]]] = []  # batches, and times by split
        speeds = [shares.speeds(gpu, sms, KERNELS) for sms in splits]
        self._decode = [PartitionLatency(latency, speed) for speed in speeds]
        self._attention = [1.0 / speed.decode_attention for speed in speeds]
        self._prefill = [PartitionLatency(latency, shares.speeds(gpu, gpu.sms - sms)) for sms in splits]
        self._prefill.append(PartitionLatency(latency, ALL_SMS))  # index WHOLE_GPU
        self._fixed: dict[int, tuple[list[float], list[float]]] = {}  # count -> linear and head of every split

    def load(self, batches: Sequence[DecodeBatch]) -> DecodeLoad:
        """The decode side of the next iteration, as it weighs on the whole GPU."""
        return self._alone.load(batches)

    def timing(self, plan: IterationPlan) -> IterationTiming:
        """Every term of a decode iteration, or of a group of a prefill batch's layers."""
        if plan.prefill:
            return self._layers_timing(plan)
        load, split = plan.load or self.load(plan.decode), plan.split
        linear, head = self.fixed_s(load.total)
        attention_s = self.attention_s(split, load.attention_s)
        solo_s = linear[split] + head[split] + attention_s
        factor = 1.0 if split == WHOLE_GPU else self._contention.factor()
        gpu_s = solo_s * factor
        overhead_s = self.exposed_s(load.total, gpu_s)
        predicted_s = solo_s + self.exposed_s(load.total, solo_s)
        return IterationTiming(
            gpu_s + overhead_s, linear[split] * factor, 0.0, attention_s * factor, 0.0, head[split] * factor,
            overhead_s, 0.0, predicted_s,
        )  # fmt: skip

    def _layers_timing(self, plan: IterationPlan) -> IterationTiming:
        first, end = plan.layers or (0, self.layers)
        time = self.batch_s(plan.prefill, plan.split)
        share = (end - first) / self.layers
        total_s = time.total_s * share
        return IterationTiming(
            total_s, time.linear_s * share, time.attention_s * share, 0.0, 0.0, time.head_s * share,
            time.overhead_s * share, 0.0, total_s,
        )  # fmt: skip

    def decode_run(self, plan: IterationPlan, clock: Clock) -> DecodeRun:
        """Iterations of decodes alone on the whole GPU until `clock` ends them."""
        return self._alone.decode_run(plan, clock)

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
        return alone_s if split == WHOLE_GPU else alone_s * self._attention[split]

    def exposed_s(self, sequences: int, gpu_s: float) -> float:
        """Host time that the GPU does not hide."""
        overhead_s = self.latency.overhead_s(sequences)
        return max(0.0, overhead_s - gpu_s) if self.options.async_schedule else overhead_s

    def choose(self, count: int, alone_s: float) -> int:
        """The split for `count` decodes beside a prefill: by the table of divisions, or the best fit."""
        if self.options.from_decodes is None:
            return self.best_fit(count, alone_s)
        chosen = 0
        for split, start in enumerate(self.options.from_decodes):
            if count >= start:
                chosen = split
        return chosen

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

    def batch_s(self, chunks: Sequence[PrefillChunk], split: int) -> PrefillTime:
        """`prefill_s` of a batch, remembered for the last two: one that runs, and one that it preempted."""
        if not self._priced or self._priced[0][0] is not chunks:
            known = [pair for pair in self._priced if pair[0] is chunks]
            others = [pair for pair in self._priced if pair[0] is not chunks]
            self._priced = [*(known or [(chunks, {})]), *others[:1]]
        times = self._priced[0][1]
        time = times.get(split)
        if time is None:
            time = times[split] = self.prefill_s(chunks, split)
        return time

    def prefill_s(self, chunks: Sequence[PrefillChunk], split: int) -> PrefillTime:
        """All layers of `chunks` in one batch, beside decode on a split or on the whole GPU."""
        part = self._prefill[split]
        tokens, attention_s = 0, 0.0
        for chunk in chunks:
            tokens += chunk.tokens
            attention_s += part.prefill_attention_s(chunk.tokens, chunk.start)
        linear_s, head_s = part.linear_s(tokens), part.head_s(len(chunks))
        gpu_s = linear_s + attention_s + head_s
        overhead_s = self.exposed_s(len(chunks), gpu_s)
        if split != WHOLE_GPU:
            overhead_s += self.options.launch_overhead * gpu_s
        return PrefillTime(gpu_s + overhead_s, linear_s, attention_s, head_s, overhead_s)
