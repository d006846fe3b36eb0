"""Arrivals as recorded, scaled in time when a rate is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from traces.arrivals.base import Floats, OpenArrivals, scaled


@dataclass(frozen=True)
class Recorded(OpenArrivals):
    """The trace's own times; requests with one timestamp arrive together, in file order."""

    mode = "recorded"

    def times(
        self, recorded_s: Floats, native: float | None, rate: float | None, seed: int
    ) -> tuple[Floats, dict[str, Any]]:
        """Recorded times, stretched to `rate`."""
        return scaled(recorded_s, native, rate, self.mode), {}
