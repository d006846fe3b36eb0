"""The backend that asks the latency model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from mypy_extensions import mypyc_attr

from confsim.run.plan import DecodeRun, IterationPlan, IterationTiming

NOISE_BLOCK = 4096
GIVEN = 1 << 20  # factors remembered to be put back, more than any look-ahead is long
LEAST_FACTOR = 0.05  # a charged time is never less than this share of its prediction


class Cost(Protocol):
    """Prices plans; noise is none of its business."""

    def timing(self, plan: IterationPlan) -> IterationTiming:
        """Every term of a plan's iteration."""

    def decode_run(self, plan: IterationPlan, clock: Clock) -> DecodeRun:
        """Iterations of a plan's decodes until `clock` says that one was the last."""


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


class Clock:
    """Ends of iterations looked ahead to: at most `most`, the last one starting before `until_s` or being the first."""

    def __init__(self, start_s: float, until_s: float, most: int, noise: Noise) -> None:
        self.ends_s: list[float] = []
        self._now_s = self._start_s = start_s
        self._elapsed_s = 0.0
        self._until_s = until_s
        self._most = most
        self._noise = noise if noise.std else None

    def tick(self, seconds: float) -> bool:
        """An iteration that takes `seconds` without noise; true: it is the last one."""
        noise = self._noise
        self._now_s += seconds if noise is None else seconds * noise.factor()
        self.ends_s.append(self._now_s)
        return self._now_s >= self._until_s or len(self.ends_s) == self._most

    def tick_from_start(self, seconds: float) -> bool:
        """As `tick`, where the seconds are added up before the start is: the last bits of the ends differ."""
        noise = self._noise
        self._elapsed_s += seconds if noise is None else seconds * noise.factor()
        end_s = self._start_s + self._elapsed_s
        self.ends_s.append(end_s)
        return end_s >= self._until_s or len(self.ends_s) == self._most


@mypyc_attr(allow_interpreted_subclasses=True)
class ModelBackend:
    """Charges `prediction * (1 + noise)`."""

    def __init__(self, cost: Cost, noise: Noise) -> None:
        self.can_run_ahead = True
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

    def run_ahead(self, plan: IterationPlan, start_s: float, until_s: float, most: int) -> DecodeRun:
        """Time up to `most` iterations of a plan's decodes."""
        return self.cost.decode_run(plan, Clock(start_s, until_s, most, self.noise))

    def cut(self, run: DecodeRun, steps: int) -> None:
        """Keep the first `steps` iterations of the run timed last; the noise of the others goes to what runs next."""
        self.noise.put_back(len(run.ends_s) - steps)
        del run.ends_s[steps:]
        del run.attention_s[steps:]

    def close(self) -> None:
        """Nothing is held."""


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class ModelBackendConfig:
    """`backend=model`."""

    many_loops: ClassVar[bool] = True

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> ModelBackend:
        """A backend for one loop."""
        return ModelBackend(cost, noise)
