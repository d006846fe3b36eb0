"""Closed loop: a fixed number of requests in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traces.arrivals.base import Arrivals
from traces.errors import InputError
from traces.load import Load
from traces.trace import Trace


@dataclass(frozen=True)
class ClosedLoop(Arrivals):
    """The first `concurrency` requests arrive at 0, the next in trace order whenever one ends; no rate."""

    concurrency: int = 16

    mode = "closed_loop"

    def check(self, rate: float | None) -> None:
        """Raise `InputError` for a rate, which a closed loop does not have, or a senseless concurrency."""
        if rate is not None:
            raise InputError(
                f"rate={rate} contradicts arrivals=closed_loop, whose rate follows from arrivals.concurrency; "
                "leave rate out, or use arrivals=poisson"
            )
        if type(self.concurrency) is not int or self.concurrency < 1:
            raise InputError(f"arrivals.concurrency={self.concurrency}: expected a number of requests of 1 or more")

    def apply(self, trace: Trace, rate: float | None, seed: int) -> Load:
        """The load; `arrival_s` is 0 throughout, the simulator decides when the later rows arrive."""
        self.check(rate)
        label = f"closed_loop, {self.concurrency} in flight"
        provenance = {"label": label, "mode": self.mode, "rate": None, "concurrency": self.concurrency}
        arrival_s = np.zeros(len(trace), dtype=np.float64)
        return Load(trace, arrival_s, self.mode, None, self.concurrency, label=label, provenance=provenance)
