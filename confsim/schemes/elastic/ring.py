"""What prefill and decode cost on a ring of instances, and the fitted law that the scheduler plans with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from confsim.latency.base import LatencyModel
from confsim.run.plan import IterationTiming
from confsim.schemes.base import Setup
from confsim.schemes.link import KvLink

BATCHES = (1, 2, 4, 8)  # requests of a fitted batch
LEAST_LENGTH = 128  # shortest fitted prompt
PARTIAL_BYTES = 4  # an element of a partial attention output travels in float32


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class PrefillLaw:
    """T(k) = A_k + B_k * sum(len) + C_k * sum(len^2) seconds on k instances; no instances take forever."""

    coefficients: tuple[tuple[float, float, float], ...]  # of k = 1, 2, ...

    def seconds(self, degree: int, tokens: float, squares: float) -> float:
        """Predicted time of a batch."""
        if degree < 1:
            return float("inf")
        a, b, c = self.coefficients[degree - 1]
        return a + b * tokens + c * squares


def fit_law(cost: RingCost, instances: int, instance_tokens: int) -> PrefillLaw:
    """Fit T(k) to batches of equal prompts whose stripes are up to `instance_tokens`, by least relative squares."""
    before = cost.latency.extrapolations
    law = PrefillLaw(tuple(_fit(cost, degree, instance_tokens * degree) for degree in range(1, instances + 1)))
    cost.latency.extrapolations = before  # the fit's own questions are not the run's
    return law


def _fit(cost: RingCost, degree: int, most_tokens: int) -> tuple[float, float, float]:
    rows: list[tuple[float, float, float]] = []
    times: list[float] = []
    length = LEAST_LENGTH
    while length <= max(most_tokens, LEAST_LENGTH):
        for batch in BATCHES:
            if batch == 1 or batch * length <= most_tokens:
                rows.append((1.0, float(batch * length), float(batch) * length**2))
                times.append(cost.prefill([length] * batch, degree).duration_s)
        length *= 2
    relative = np.array(rows) / np.array(times)[:, None]
    return _non_negative(relative)


def _non_negative(relative: np.ndarray) -> tuple[float, float, float]:
    """Coefficients that bring every row closest to 1; one that would be negative is 0."""
    active = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(relative[:, active], np.ones(len(relative)), rcond=None)
        if found.min() >= 0 or len(active) == 1:
            break
        active.pop(int(found.argmin()))
    out = [0.0, 0.0, 0.0]
    for index, value in zip(active, found, strict=True):
        out[index] = max(float(value), 0.0)
    return out[0], out[1], out[2]
