"""Gamma arrivals: independent gaps with a given coefficient of variation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traces.arrivals.base import Floats, OpenArrivals, drawn_rate, unit_gaps_to_times
from traces.errors import InputError
from traces.select import is_number


@dataclass(frozen=True)
class Gamma(OpenArrivals):
    """Gamma gaps of mean 1 / rate and standard deviation `cv` / rate (shape 1 / cv^2): burstier above 1.

    The unit gaps depend on the seed and `cv` alone, so all rates of a search see the same draws.
    """

    cv: float = 2.0

    mode = "gamma"

    def check(self, rate: float | None) -> None:
        """Raise `InputError` for settings that make no sense."""
        super().check(rate)
        if not is_number(self.cv) or not 0 < self.cv <= 100:
            raise InputError(f"arrivals.cv={self.cv}: expected a coefficient of variation of gaps in (0, 100]")

    def times(
        self, recorded_s: Floats, native: float | None, rate: float | None, seed: int
    ) -> tuple[Floats, dict[str, Any]]:
        """Times of a renewal process of `rate` with gamma gaps."""
        shape = 1.0 / self.cv**2
        gaps = np.random.default_rng([seed, 0xA2]).gamma(shape, 1.0 / shape, max(recorded_s.size - 1, 0))
        times = unit_gaps_to_times(gaps, drawn_rate(native, rate, self.mode, recorded_s.size))
        return times, {"cv": float(self.cv), "seed": seed}
