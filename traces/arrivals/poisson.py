"""Poisson arrivals: independent exponential gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traces.arrivals.base import Floats, OpenArrivals, drawn_rate, unit_gaps_to_times


@dataclass(frozen=True)
class Poisson(OpenArrivals):
    """Exponential gaps; the trace gives the order of the requests only.

    The unit gaps depend on the seed alone, so all rates of a search see the same draws.
    """

    mode = "poisson"

    def times(
        self, recorded_s: Floats, native: float | None, rate: float | None, seed: int
    ) -> tuple[Floats, dict[str, Any]]:
        """Times of a Poisson process of `rate`."""
        gaps = np.random.default_rng([seed, 0xA1]).standard_exponential(max(recorded_s.size - 1, 0))
        times = unit_gaps_to_times(gaps, drawn_rate(native, rate, self.mode, recorded_s.size))
        return times, {"cv": 1.0, "seed": seed}
