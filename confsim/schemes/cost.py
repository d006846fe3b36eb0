"""What a co-batched iteration costs: the latency model's terms put together by a scheme's attention stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from confsim.latency.base import LatencyModel
from confsim.policies.base import Dispatch
from confsim.run.model_backend import Clock
from confsim.run.plan import DecodeBatch, DecodeLoad, DecodeRun, IterationPlan, IterationTiming
from confsim.run.request import Request


class Planned(NamedTuple):
    """The prefill side of an iteration so far."""

    tokens: int = 0
    attention_s: float = 0.0
    firsts: int = 0  # last chunks, whose prompts emit a token
    chunks: int = 0
    transfer_s: float = 0.0  # of the last chunks' KV, where it lengthens the iteration
    behind: int = 0  # cached tokens that each token has before its chunk, summed over the tokens


def in_turn(communication_s: float, prefill_s: float, decode_s: float, latency: LatencyModel) -> float:
    """One path after the other."""
    return communication_s + prefill_s + decode_s


def beside(communication_s: float, prefill_s: float, decode_s: float, latency: LatencyModel) -> float:
    """max(comm + g_p * prefill, g_d * decode): both paths at once; communication needs few SMs and is not slowed."""
    prefill_path_s = communication_s + prefill_s
    if prefill_path_s == 0.0 or decode_s == 0.0:
        return prefill_path_s + decode_s
    prefill_path_s = communication_s + latency.prefill_slowdown * prefill_s
    decode_path_s = latency.decode_slowdown * decode_s
    return prefill_path_s if prefill_path_s > decode_path_s else decode_path_s


def overlapped(communication_s: float, prefill_s: float, decode_s: float, latency: LatencyModel) -> float:
    """The paths at once, or in turn where that is shorter: a planner with a latency model knows which.

    So the stage is continuous where a path becomes empty.
    """
    turn_s = in_turn(communication_s, prefill_s, decode_s, latency)
    both_s = beside(communication_s, prefill_s, decode_s, latency)
    return both_s if both_s < turn_s else turn_s


# Seconds of the attention stage from those of communication, prefill attention and decode attention alone.
AttentionStage = Callable[[float, float, float, LatencyModel], float]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(slots=True)
class CoBatchCost:
    """Times of iterations in which prefill shards and decodes of `sp` groups share their linear layers.

    `spread` is set where decodes are spread over the groups like prefill: the latency model of all GPUs as one head
    split, which gives their attention. `co_batch` false runs the linear layers of the two phases one after the other.
    With `joint_exchange` the spread decodes share the all-to-alls of prefill instead of paying for their own.
    `overlap_transfer` false: moving a prompt's KV lengthens the iteration of its last chunk. `one_kernel`: the engine
    computes attention of both phases in one call, for what `LatencyModel.mixed` says; several chunks count as one
    behind their mean prefix.
    """

    latency: LatencyModel
    stage: AttentionStage
    co_batch: bool = True
    async_schedule: bool = True
    spread: LatencyModel | None = None
    joint_exchange: bool = False
    overlap_transfer: bool = True
    one_kernel: bool = False
    in_turn_iterations: int = 0  # iterations with both attention paths, one after the other

    def load(self, batches: Sequence[DecodeBatch]) -> DecodeLoad:
        """The decode side of the next iteration."""
        if self.spread is not None:
            batch = batches[0]
            share, rest = divmod(batch.count, self.latency.sp)
            counts = tuple(share + (group < rest) for group in range(self.latency.sp))
            exchange_s = 0.0 if self.joint_exchange else self.latency.all_to_all_s(counts[0])
            attention_s = self.spread.decode_attention_s(batch.count, batch.context_tokens)
            return DecodeLoad(counts, counts[0], batch.count, exchange_s + attention_s, batch.context_tokens)
        counts = tuple([batch.count for batch in batches])
        attention = self.latency.decode_attention_s
        attention_s = max([attention(batch.count, batch.context_tokens) for batch in batches])
        context = sum([batch.context_tokens for batch in batches])
        return DecodeLoad(counts, max(counts), sum(counts), attention_s, context)

    def linear_s(self, load: DecodeLoad, stacked: int, shard: int) -> float:
        """Linear layers of the fullest group."""
        if self.co_batch:
            return self.latency.linear_s(stacked)
        return self.latency.linear_s(shard) + self.latency.linear_s(load.peak)

    def decodes_s(self, load: DecodeLoad) -> float:
        """Predicted seconds of an iteration of the decodes alone."""
        if not load.total:
            return 0.0
        gpu_s = self.linear_s(load, load.peak, 0) + load.attention_s + self.latency.head_s(load.peak)
        if self.joint_exchange:
            gpu_s += self.latency.all_to_all_s(load.peak)
        return gpu_s + self.exposed_s(self.host_s(load.total, 0), gpu_s)

    def lockstep_wait_s(self, batches: Sequence[DecodeBatch], load: DecodeLoad) -> float:
        """Seconds of a decode-only iteration that a group waits for the slowest one, in the mean over the groups."""
        if self.spread is not None or len(batches) == 1:
            return 0.0
        latency = self.latency
        own_s = 0.0
        for batch in batches:
            attention_s = latency.decode_attention_s(batch.count, batch.context_tokens)
            own_s += latency.linear_s(batch.count) + attention_s + latency.head_s(batch.count)
        return latency.linear_s(load.peak) + load.attention_s + latency.head_s(load.peak) - own_s / len(batches)

    def predictor(
        self, load: DecodeLoad, dispatch: Dispatch, request: Request, planned: Planned
    ) -> Callable[[int], float]:
        """Predicted seconds of an iteration by the tokens of `request` that it takes beyond what is `planned`.

        A closure over everything that does not depend on them: a budget search calls it several times an iteration.
        """
        latency, stage, peak, co_batch = self.latency, self.stage, dispatch.peak, self.co_batch
        linear, exchange, prefill = latency.linear_s, latency.all_to_all_s, latency.prefill_attention_s
        cached, rest, decode_s = request.prefilled, request.remaining_prefill, load.attention_s
        before, before_s = planned.tokens, planned.attention_s
        head_s = latency.head_s(load.peak + planned.firsts)
        last_head_s = latency.head_s(load.peak + planned.firsts + 1)
        if not self.overlap_transfer:
            head_s += planned.transfer_s
            last_head_s += max(planned.transfer_s, latency.kv_transfer_s(request.target_tokens))
        overhead_s = self.host_s(load.total, planned.chunks + 1)
        hidden, joint = self.async_schedule, self.joint_exchange
        apart_s = 0.0 if co_batch else latency.linear_s(load.peak)
        mixed = latency.mixed if self.one_kernel and load.total else None
        behind = planned.behind

        def seconds(tokens: int) -> float:
            stacked, shard = peak(before + tokens)
            prefill_s = before_s + prefill(tokens, cached)
            exchange_s = exchange(stacked if joint else shard)
            if mixed is None:
                gpu_s = stage(exchange_s, prefill_s, decode_s, latency)
            else:
                mean = (behind + tokens * cached) / (before + tokens)
                gpu_s = exchange_s + mixed.seconds(
                    before + tokens, mean, load.total, load.context_tokens, prefill_s, decode_s
                )
            gpu_s += linear(stacked) if co_batch else linear(shard) + apart_s
            gpu_s += last_head_s if tokens == rest else head_s
            if hidden:
                return gpu_s if gpu_s > overhead_s else overhead_s
            return gpu_s + overhead_s

        return seconds

    def host_s(self, decodes: int, chunks: int) -> float:
        """Host time of an iteration, before any of it is hidden."""
        host_s = self.latency.overhead_s(decodes + chunks)
        return host_s + self.latency.mixed_overhead_s if decodes and chunks else host_s

    def exposed_s(self, host_s: float, gpu_s: float) -> float:
        """Host time that the GPU does not hide."""
        return max(0.0, host_s - gpu_s) if self.async_schedule else host_s

    def timing(self, plan: IterationPlan) -> IterationTiming:
        """Every term of a plan's iteration."""
        latency = self.latency
        load = plan.load or self.load(plan.decode)
        shards = plan.shards(latency.sp)
        attention_s, transfer_s = 0.0, 0.0
        firsts, tokens, behind = 0, 0, 0
        arriving: dict[int, int] = {}  # group -> tokens of KV on their way to it
        for chunk in plan.prefill:
            attention_s += latency.prefill_attention_s(chunk.tokens, chunk.start)
            tokens += chunk.tokens
            behind += chunk.tokens * chunk.start
            if chunk.last:
                firsts += 1
                if chunk.group >= 0:
                    arriving[chunk.group] = arriving.get(chunk.group, 0) + chunk.start + chunk.tokens
        if arriving:
            transfer_s = max(latency.kv_transfer_s(tokens) for tokens in arriving.values())
        stacked = max(map(add, shards, load.counts))
        shard = max(shards)
        communication_s = latency.all_to_all_s(stacked if self.joint_exchange else shard)
        stage_s = self.stage(communication_s, attention_s, load.attention_s, latency)
        if self.one_kernel and latency.mixed is not None and tokens and load.total:
            stage_s = communication_s + latency.mixed.seconds(
                tokens, behind / tokens, load.total, load.context_tokens, attention_s, load.attention_s
            )
        elif attention_s > 0.0 and load.attention_s > 0.0:
            self.in_turn_iterations += stage_s >= in_turn(communication_s, attention_s, load.attention_s, latency)
        linear_s = self.linear_s(load, stacked, shard)
        head_s = latency.head_s(load.peak + firsts)
        gpu_s = linear_s + stage_s + head_s
        overhead_s = self.exposed_s(self.host_s(load.total, len(plan.prefill)), gpu_s)
        duration_s = gpu_s + overhead_s
        if not self.overlap_transfer:
            duration_s, transfer_s = duration_s + transfer_s, 0.0
        return IterationTiming(
            duration_s,
            linear_s,
            attention_s,
            load.attention_s,
            communication_s,
            head_s,
            overhead_s,
            transfer_s,
            duration_s,
        )

    def decode_run(self, plan: IterationPlan, clock: Clock) -> DecodeRun:
        """Decode-only iterations until `clock` ends them.

        The decodes stay the same meanwhile, so each group's attention is a line in its context, cut where the latency
        model bends.
        """
        load = plan.load or self.load(plan.decode)
        linear_s, head_s = self.linear_s(load, load.peak, 0), self.latency.head_s(load.peak)
        base_s = linear_s + head_s
        overhead_s = self.host_s(load.total, 0)
        hidden = self.async_schedule
        attention: list[float] = []
        runs = [_Run(*self._attention_line(batch)) for batch in plan.decode if batch.count]
        while True:
            attention_s = 0.0
            for run in runs:
                if run.value_s > attention_s:
                    attention_s = run.value_s
            attention.append(attention_s)
            seconds = base_s + attention_s
            if hidden:
                if seconds < overhead_s:
                    seconds = overhead_s
            else:
                seconds += overhead_s
            if clock.tick(seconds):
                return DecodeRun(clock.ends_s, attention, overhead_s, hidden, linear_s, head_s)
            for run in runs:
                run.value_s += run.step_s
                run.steps -= 1
                if run.steps < 0:
                    run.bend(len(attention))

    def _attention_line(self, batch: DecodeBatch) -> tuple[LatencyModel, float, int, int]:
        if self.spread is None:
            return self.latency, 0.0, batch.count, batch.context_tokens
        exchange_s = self.latency.all_to_all_s(-(-batch.count // self.latency.sp))
        return self.spread, exchange_s, batch.count, batch.context_tokens


class _Run:
    """Decode attention of one group while it steps: a value that grows by `step_s`, exact for `steps` more steps."""

    __slots__ = ("_context", "_count", "_latency", "_offset_s", "step_s", "steps", "value_s")

    def __init__(self, latency: LatencyModel, offset_s: float, count: int, context_tokens: int) -> None:
        self._latency = latency
        self._offset_s = offset_s
        self._count = count
        self._context = context_tokens
        self.bend(0)

    def bend(self, done: int) -> None:
        """Follow the line from the context after `done` steps."""
        context = self._context + done * self._count
        value_s, slope_s, valid = self._latency.decode_attention_line(self._count, context)
        self.value_s = self._offset_s + value_s
        self.step_s = slope_s * self._count
        self.steps = int((valid - context) // self._count) if valid != float("inf") else 1 << 60
