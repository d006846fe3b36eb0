"""Arrival modes, one file each."""

from traces.arrivals.base import Arrivals, OpenArrivals, native_rate
from traces.arrivals.closed_loop import ClosedLoop
from traces.arrivals.gamma import Gamma
from traces.arrivals.poisson import Poisson
from traces.arrivals.recorded import Recorded
from traces.arrivals.spread import Spread

__all__ = ["Arrivals", "ClosedLoop", "Gamma", "OpenArrivals", "Poisson", "Recorded", "Spread", "native_rate"]
