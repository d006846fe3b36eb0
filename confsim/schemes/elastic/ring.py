"""What prefill and decode cost on a ring of instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from confsim.latency.base import LatencyModel
from confsim.run.model_backend import Clock
from confsim.run.plan import DecodeBatch, DecodeRun, IterationPlan, IterationTiming
from confsim.schemes.base import Setup
from confsim.schemes.link import KvLink

PARTIAL_BYTES = 4  # an element of a partial attention output travels in float32


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(slots=True)
class RingCost:
    """Times on rings of instances, each a TP group with all weights.

    Prefill on `degree` instances: tokens are striped, so each has 1/degree of every prompt and attends in `degree`
    steps to the stripe that is there, passing it on in between. A step is causal attention of a stripe to a stripe of
    the same size, which is `prefill_attention_s(stripe, 0)`: half of (len / degree)^2 pairs, and degree steps make the
    len^2 / (2 * degree) pairs of an instance. A send carries the KV of an instance's stripes (`KvLink`). One after the
    other: degree * attention + (degree - 1) * send; overlapped, each of the first degree - 1 steps takes the longer of
    the two. Decode: a master sends its queries to every other instance and gets partial outputs back, in float32 with
    their log-sum-exp; every instance attends with all queries to the KV that it holds.
    """

    latency: LatencyModel
    link: KvLink | None  # None: there is one instance
    overlap: bool
    query_bytes: float  # of a decode token on one GPU, all layers, to one peer and back

    @classmethod
    def of(cls, setup: Setup, tp: int, instances: int, overlap: bool) -> RingCost:
        """Costs of a layout."""
        model = setup.model
        heads = model.split_heads(tp)[0].q_heads
        query = heads * model.head_dim * model.itemsize
        partial = heads * (model.head_dim + 1) * PARTIAL_BYTES
        link = KvLink.between(setup, tp) if instances > 1 else None
        return cls(setup.latency_of(tp, 1), link, overlap, float((query + partial) * model.num_hidden_layers))

    def send_s(self, tokens: int) -> float:
        """Passing the KV of `tokens` to another instance."""
        return self.link.seconds(tokens) if self.link is not None else 0.0

    def exchange_s(self, tokens: int, peers: int) -> float:
        """Queries of a master's `tokens` to `peers` other instances, and partial outputs back."""
        if not peers or self.link is None:
            return 0.0
        return self.link.bytes_s(tokens * peers * self.query_bytes)

    def timing(self, plan: IterationPlan) -> IterationTiming:
        """Every term of a plan: whole prompts on one ring, or decodes on several that wait for the slowest."""
        if plan.prefill:
            return self.prefill([chunk.tokens for chunk in plan.prefill], len(plan.rings[0]))
        return self._step(self._decodes(plan))

    def prefill(self, lengths: Sequence[int], degree: int) -> IterationTiming:
        """A batch of whole prompts on `degree` instances; host work is exposed."""
        latency = self.latency
        stripe = -(-sum(lengths) // degree)
        step_s = sum([latency.prefill_attention_s(-(-length // degree), 0) for length in lengths])
        send_s = self.send_s(stripe) if degree > 1 else 0.0
        steps_s = step_s + (degree - 1) * (max(step_s, send_s) if self.overlap else step_s + send_s)
        linear_s = latency.linear_s(stripe)
        head_s = latency.head_s(-(-len(lengths) // degree))
        overhead_s = latency.overhead_s(len(lengths))
        total_s = linear_s + steps_s + head_s + overhead_s
        return IterationTiming(
            total_s, linear_s, degree * step_s, 0.0, (degree - 1) * send_s, head_s, overhead_s, predicted_s=total_s
        )

    def decode_run(self, plan: IterationPlan, clock: Clock) -> DecodeRun:
        """Iterations of a plan's decodes until `clock` ends them or the latency model bends."""
        decodes = self._decodes(plan)
        steps = decodes[0].steps
        for one in decodes:
            steps = min(steps, one.steps)
        attention: list[float] = []
        while True:
            step = len(attention)
            longest_s = slowest_s = 0.0
            for one in decodes:
                attention_s = one.attention_s(step)
                longest_s = max(longest_s, attention_s)
                slowest_s = max(slowest_s, one.seconds(attention_s))
            attention.append(longest_s)
            if clock.tick_from_start(slowest_s) or step + 1 >= steps:
                break
        first = self._step(decodes)
        return DecodeRun(
            clock.ends_s, attention, first.overhead_s, False, first.linear_s, first.head_s, first.communication_s
        )

    def _decodes(self, plan: IterationPlan) -> list[_RingDecode]:
        out: list[_RingDecode] = []
        at = 0
        for ring in plan.rings:
            out.append(_RingDecode(self, plan.decode[at : at + len(ring)]))
            at += len(ring)
        return out

    def _step(self, decodes: Sequence[_RingDecode]) -> IterationTiming:
        """The next iteration: the largest of each part, and the slowest ring."""
        seconds = max([one.seconds(one.attention_s(0)) for one in decodes])
        return IterationTiming(
            seconds,
            max([one.linear_s for one in decodes]),
            0.0,
            max([one.attention_s(0) for one in decodes]),
            max([one.exchange_s for one in decodes]),
            max([one.head_s for one in decodes]),
            max([one.overhead_s for one in decodes]),
            predicted_s=seconds,
        )


class _RingDecode:
    """Decodes of one ring while they step: attention of each instance is a line, exact for `steps` iterations."""

    def __init__(self, cost: RingCost, batches: Sequence[DecodeBatch]) -> None:
        latency = cost.latency
        count = peak = 0
        for batch in batches:
            count += batch.count
            peak = max(peak, batch.count)
        self.steps = 1 << 30
        self._attention: list[tuple[float, float]] = []  # of each instance: seconds, and seconds more with each step
        for batch in batches:
            value_s, slope_s, valid_until = latency.decode_attention_line(count, batch.context_tokens)
            self._attention.append((value_s, slope_s * batch.count))
            if batch.count and valid_until != float("inf"):
                self.steps = min(self.steps, int((valid_until - batch.context_tokens) // batch.count) + 1)
        self.linear_s = latency.linear_s(peak)
        self.head_s = latency.head_s(peak)
        self.overhead_s = latency.overhead_s(count)
        self.exchange_s = cost.exchange_s(peak, len(batches) - 1)
        self._fixed_s = self.linear_s + self.head_s + self.overhead_s
        self._overlap = cost.overlap

    def attention_s(self, step: int) -> float:
        """Attention of the instance that takes longest, after some steps."""
        longest = 0.0
        for value_s, step_s in self._attention:
            seconds = value_s + step_s * step
            if seconds > longest:
                longest = seconds
        return longest

    def seconds(self, attention_s: float) -> float:
        """An iteration with this attention; host work is exposed."""
        if self._overlap:
            return self._fixed_s + max(attention_s, self.exchange_s)
        return self._fixed_s + (attention_s + self.exchange_s)
