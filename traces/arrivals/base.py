"""What every arrival mode shares: the protocol, rates, closed sessions and the label of what ran."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from traces.errors import InputError
from traces.load import Load
from traces.select import is_number
from traces.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SESSIONS = ("open", "closed")


def native_rate(arrival_s: Floats) -> float | None:
    """Requests per second as recorded, (n - 1) / (last - first); None when that is not defined."""
    if arrival_s.size < 2 or arrival_s[-1] <= arrival_s[0]:
        return None
    return float((arrival_s.size - 1) / (arrival_s[-1] - arrival_s[0]))


def check_rate(rate: float | None) -> None:
    """Raise `InputError` for a rate that is no positive finite number."""
    if rate is not None and (not is_number(rate) or not 0 < rate < float("inf")):
        raise InputError(f"rate={rate}: expected requests per second above 0, or null for the trace's own rate")


def unit_gaps_to_times(gaps: Floats, rate: float) -> Floats:
    """Arrival times from 0 whose n - 1 gaps are `gaps / rate`."""
    return np.concatenate(([0.0], np.cumsum(gaps) / rate))


def parent_rows(trace: Trace) -> Ints:
    """Row of each request's parent in the trace, -1 for roots and for parents that the trace does not have."""
    ids = trace.table["request_id"].to_numpy()
    parents = trace.table["parent_id"]
    if parents.null_count == len(parents):
        return np.full(ids.size, -1, dtype=np.int64)
    wanted = pc.fill_null(parents, -1).to_numpy()
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids[order], wanted), ids.size - 1)
    rows = order[place]
    found: Ints = np.where((wanted >= 0) & (ids[rows] == wanted), rows, -1)
    return found


class Arrivals(ABC):
    """Makes a load of a trace. `check` first: it raises `InputError` for contradictions without touching a trace."""

    mode: ClassVar[str]

    @abstractmethod
    def check(self, rate: float | None) -> None:
        """Raise `InputError` for settings that make no sense or contradict `rate`."""

    @abstractmethod
    def apply(self, trace: Trace, rate: float | None, seed: int) -> Load:
        """The load that `trace` makes at `rate` requests per second (None: its own)."""


@dataclass(frozen=True)
class OpenArrivals(Arrivals):
    """Open-loop modes: times depend on the trace, the rate and the seed alone.

    `sessions=closed` has a turn come `think_s` after its parent's last token instead (None: the recorded gap
    between the two arrivals, whatever the rate: it is the user's time); roots keep the mode's times.
    """

    sessions: str = "open"
    think_s: float | None = None

    def check(self, rate: float | None) -> None:
        """Raise `InputError` for settings that make no sense."""
        check_rate(rate)
        if self.sessions not in SESSIONS:
            raise InputError(f"arrivals.sessions={self.sessions}: unknown, use one of {', '.join(SESSIONS)}")
        if self.think_s is None:
            return
        if self.sessions == "open":
            raise InputError(
                f"arrivals.think_s={self.think_s} contradicts arrivals.sessions=open (recorded times); "
                "add arrivals.sessions=closed, or leave think_s out"
            )
        if not is_number(self.think_s) or not 0 <= self.think_s < float("inf"):
            raise InputError(f"arrivals.think_s={self.think_s}: expected seconds of 0 or more, or null")

    def apply(self, trace: Trace, rate: float | None, seed: int) -> Load:
        """The load at `rate`; the offset of the trace is removed first."""
        self.check(rate)
        recorded = trace.table["arrival_s"].to_numpy()
        recorded = recorded - recorded[0]
        native = native_rate(recorded)
        arrival_s, details = self.times(recorded, native, rate, seed)
        own = details.pop("rate", native)
        ran = float(rate) if rate is not None else own
        provenance: dict[str, Any] = {
            "mode": self.mode,
            "rate": ran,
            "rate_given": rate is not None,
            "native_rate": native,
            "sessions": self.sessions,
            **details,
        }
        load = Load(trace, arrival_s, self.mode, ran, label=_label(self.mode, ran, self.sessions, details))
        if self.sessions == "open":
            return _with(load, provenance)
        parents = parent_rows(trace)
        think = self._think(recorded, parents)
        provenance |= {"think_s": self.think_s if self.think_s is not None else "recorded gap"}
        provenance |= {"turns_after_parent": int((parents >= 0).sum())}
        return _with(load, provenance, think_s=think, parent_row=parents)

    @abstractmethod
    def times(
        self, recorded_s: Floats, native: float | None, rate: float | None, seed: int
    ) -> tuple[Floats, dict[str, Any]]:
        """Ascending arrival times from 0, and the mode's own provenance (`rate`: what a null rate means)."""

    def _think(self, recorded_s: Floats, parents: Ints) -> Floats:
        if self.think_s is not None:
            return np.where(parents >= 0, self.think_s, 0.0)
        gap = recorded_s - recorded_s[np.maximum(parents, 0)]
        return np.where(parents >= 0, np.maximum(gap, 0.0), 0.0)


def scaled(recorded_s: Floats, native: float | None, rate: float | None, mode: str) -> Floats:
    """Recorded times stretched to `rate`. Raises `InputError` when all requests share one timestamp."""
    if rate is None or recorded_s.size < 2:
        return recorded_s
    if native is None:
        raise InputError(
            f"rate={rate} with arrivals={mode}: all requests share one timestamp, there is no time to scale; "
            "use arrivals=poisson or leave rate out"
        )
    return recorded_s * (native / rate)


def drawn_rate(native: float | None, rate: float | None, mode: str, rows: int) -> float:
    """Rate of a drawn mode. Raises `InputError` when neither the run nor the trace has one."""
    value = rate if rate is not None else native
    if value is None and rows > 1:
        raise InputError(f"arrivals={mode} needs a rate: all requests share one timestamp; add rate=<requests per s>")
    return value if value is not None else 1.0


def _label(mode: str, rate: float | None, sessions: str, details: dict[str, Any]) -> str:
    parts = [mode]
    if mode == "gamma":
        parts.append(f"cv {details['cv']:g}")
    parts.append(f"{rate:.4g} req/s" if rate is not None else "one instant")
    if sessions == "closed":
        parts.append("closed sessions")
    return ", ".join(parts)


def _with(load: Load, provenance: dict[str, Any], **more: Any) -> Load:
    provenance = {"label": load.label, **provenance}
    return Load(load.trace, load.arrival_s, load.mode, load.rate, label=load.label, provenance=provenance, **more)
