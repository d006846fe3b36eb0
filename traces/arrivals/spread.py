"""Recorded arrivals with the requests of a coarse timestamp spread over its tick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traces.arrivals.base import Floats, OpenArrivals, native_rate, scaled
from traces.errors import InputError

WITHIN = ("even", "random")


@dataclass(frozen=True)
class Spread(OpenArrivals):
    """Requests that share a timestamp are spread up to the next one; the last tick is as wide as the median tick.

    `within=even` puts request k of n at k/n of the tick, in file order; `random` draws sorted uniform times with the
    seed, in file order. Spreading comes before scaling to the rate.
    """

    within: str = "even"

    mode = "spread"

    def check(self, rate: float | None) -> None:
        """Raise `InputError` for settings that make no sense."""
        super().check(rate)
        if self.within not in WITHIN:
            raise InputError(f"arrivals.within={self.within}: unknown, use one of {', '.join(WITHIN)}")

    def times(
        self, recorded_s: Floats, native: float | None, rate: float | None, seed: int
    ) -> tuple[Floats, dict[str, Any]]:
        """Spread times, stretched to `rate` by their own native rate."""
        spread = self._spread(recorded_s, seed)
        spread = spread - spread[0]
        own = native_rate(spread)
        detail: dict[str, Any] = {
            "rate": own,
            "within": self.within,
            "spread_requests": int((np.diff(recorded_s) == 0).sum()),
        }
        if self.within == "random":
            detail["seed"] = seed
        return scaled(spread, own, rate, self.mode), detail

    def _spread(self, recorded_s: Floats, seed: int) -> Floats:
        ticks, start, count = np.unique(recorded_s, return_index=True, return_counts=True)
        if ticks.size < 2:
            return recorded_s
        widths = np.diff(ticks)
        width = np.append(widths, np.median(widths))
        tick = np.repeat(np.arange(ticks.size), count)
        if self.within == "random":
            place = np.random.default_rng([seed, 0x5B]).random(recorded_s.size)
            place = place[np.lexsort((place, tick))]
        else:
            place = (np.arange(recorded_s.size) - start[tick]) / count[tick]
        spread: Floats = ticks[tick] + place * width[tick]
        return spread
