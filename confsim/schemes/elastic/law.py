"""The fitted law T(k) that the scheduler plans prefills with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from confsim.run.request import Request
from confsim.schemes.elastic.ring import RingCost

BATCHES = (1, 2, 4, 8)  # requests of a fitted batch
MIN_LENGTH = 128  # shortest fitted prompt


@dataclass(slots=True)
class Sums:
    """Prompts as the law and the objective see them: sums over their lengths."""

    tokens: int = 0
    squares: int = 0
    inverse: float = 0.0

    def plus(self, length: int) -> Sums:
        """With one prompt more."""
        return Sums(self.tokens + length, self.squares + length**2, self.inverse + 1.0 / length)


def sums_of(requests: Iterable[Request]) -> Sums:
    """The sums of whole prompts."""
    out = Sums()
    for request in requests:
        out = out.plus(request.target_tokens)
    return out


@dataclass(slots=True)
class PrefillLaw:
    """T(k) = A_k + B_k * sum(len) + C_k * sum(len^2) seconds on k instances; no instances take forever."""

    coefficients: tuple[tuple[float, float, float], ...]  # of k = 1, 2, ...

    def seconds(self, degree: int, tokens: int, squares: int) -> float:
        """Predicted time of a batch whose lengths and their squares add up to these."""
        if degree < 1:
            return float("inf")
        a, b, c = self.coefficients[degree - 1]
        return a + b * tokens + c * squares

    def batch_s(self, degree: int, sums: Sums) -> float:
        """Predicted time of a batch."""
        return self.seconds(degree, sums.tokens, sums.squares)


def fit_law(cost: RingCost, instances: int, instance_tokens: int) -> PrefillLaw:
    """Fit T(k) to batches of equal prompts whose stripes are up to `instance_tokens`, by least relative squares."""
    before = cost.latency.extrapolations
    law = PrefillLaw(tuple(_fit(cost, degree, instance_tokens * degree) for degree in range(1, instances + 1)))
    cost.latency.extrapolations = before  # the fit's own questions are not the run's
    return law


def _fit(cost: RingCost, degree: int, most_tokens: int) -> tuple[float, float, float]:
    rows: list[tuple[float, float, float]] = []
    times: list[float] = []
    length = MIN_LENGTH
    while length <= max(most_tokens, MIN_LENGTH):
        for batch in BATCHES:
            if batch == 1 or batch * length <= most_tokens:
                rows.append((1.0, float(batch * length), float(batch) * length**2))
                times.append(cost.prefill([length] * batch, degree).duration_s)
        length *= 2
    relative = np.array(rows) / np.array(times)[:, None]
    return _non_negative(relative)


def _non_negative(relative: npt.NDArray[Any]) -> tuple[float, float, float]:
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
