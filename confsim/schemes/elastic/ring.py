"""What prefill and decode cost on a ring of instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from confsim.latency.base import LatencyModel
from confsim.run.plan import IterationTiming
from confsim.schemes.base import Setup
from confsim.schemes.link import KvLink

PARTIAL_BYTES = 4  # an element of a partial attention output travels in float32


@dataclass(slots=True)
class RingCost:
    """Times on `degree` instances, each a TP group with all weights.

    Prefill: tokens are striped, so each instance has 1/degree of every prompt and attends in `degree` steps to the
    stripe that is there, passing it on in between. A step is causal attention of a stripe to a stripe of the same size,
    which is `prefill_attention_s(stripe, 0)`: half of (len / degree)^2 pairs, and degree steps make the
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

    def prefill(self, lengths: Sequence[int], degree: int) -> IterationTiming:
        """A batch of whole prompts on `degree` instances; host work is exposed."""
        latency = self.latency
        stripe = -(-sum(lengths) // degree)
        step_s = sum(latency.prefill_attention_s(-(-length // degree), 0) for length in lengths)
        send_s = self.send_s(stripe) if degree > 1 else 0.0
        steps_s = step_s + (degree - 1) * (max(step_s, send_s) if self.overlap else step_s + send_s)
        linear_s = latency.linear_s(stripe)
        head_s = latency.head_s(-(-len(lengths) // degree))
        overhead_s = latency.overhead_s(len(lengths))
        total_s = linear_s + steps_s + head_s + overhead_s
        return IterationTiming(
            total_s, linear_s, degree * step_s, 0.0, (degree - 1) * send_s, head_s, overhead_s, predicted_s=total_s
        )

    def exchange_s(self, tokens: int, peers: int) -> float:
        """Queries of a master's `tokens` to `peers` other instances, and partial outputs back."""
        if not peers or self.link is None:
            return 0.0
        return self.link.bytes_s(tokens * peers * self.query_bytes)
