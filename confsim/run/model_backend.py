"""The backend that asks the latency model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from mypy_extensions import mypyc_attr

from confsim.run.plan import IterationPlan, IterationTiming

NOISE_BLOCK = 4096
GIVEN = 1 << 20  # factors remembered to be put back, more than any look-ahead is long
LEAST_FACTOR = 0.05  # a charged time is never less than this share of its prediction


class Cost(Protocol):
    """Prices a plan."""

    def timing(self, plan: IterationPlan) -> IterationTiming:
        """Every term of a plan's iteration."""


class Noise:
    """Factors `1 + noise` from one seeded stream; `std` is relative. 0 draws nothing."""

    def __init__(self, std: float, rng: np.random.Generator) -> None:
        self.std = std
        self._rng = rng
        self._block: list[float] = []
        self._given: deque[float] = deque(maxlen=GIVEN)

    def factor(self) -> float:
        """The next factor, at least `LEAST_FACTOR`."""
        if not self.std:
            return 1.0
        if not self._block:
            draws = 1.0 + self.std * self._rng.standard_normal(NOISE_BLOCK)
            self._block = np.maximum(draws, LEAST_FACTOR).tolist()
            self._block.reverse()
        factor = self._block.pop()
        self._given.append(factor)
        return factor

    def put_back(self, count: int) -> None:
        """Return the last `count` factors, of iterations that were looked ahead to and do not run."""
        if self.std:
            self._block += [self._given.pop() for _ in range(count)]


@mypyc_attr(allow_interpreted_subclasses=True)
class ModelBackend:
    """Charges `prediction * (1 + noise)`."""

    def __init__(self, cost: Cost, noise: Noise) -> None:
        self.cost = cost
        self.noise = noise
        self._timing = IterationTiming(0.0)

    def submit(self, plan: IterationPlan) -> None:
        """Price a plan."""
        timing = self.cost.timing(plan)
        if self.noise.std:
            timing = timing._replace(duration_s=timing.duration_s * self.noise.factor())
        self._timing = timing

    def result(self) -> IterationTiming:
        """The timing of the plan submitted last."""
        return self._timing

    def close(self) -> None:
        """Nothing is held."""


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class ModelBackendConfig:
    """`backend=model`."""

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> ModelBackend:
        """A backend for one loop."""
        return ModelBackend(cost, noise)
