"""Taking part of a trace: limit, then window, then whole sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from traces.errors import InputError
from traces.prefix import WORD, mix64

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
NS = 1e9
EXACT_S = 9e9  # whole nanoseconds of this many seconds still fit an int64


@dataclass(frozen=True)
class Selection:
    """What to keep, in this order: the first `limit` requests by arrival, arrivals in `window` [start, end) seconds
    (end null: to the end), and a share `sample` of the sessions (whole ones; a request without session is one).
    """

    limit: int | None = None
    window: Sequence[float | None] | None = None
    sample: float = 1.0

    def check(self) -> None:
        """Raise `InputError` for values that make no sense."""
        if self.limit is not None and not (type(self.limit) is int and self.limit > 0):
            raise InputError(f"trace.limit={self.limit}: expected a number of requests above 0, or null for all")
        if not is_number(self.sample) or not 0 < self.sample <= 1:
            raise InputError(f"trace.sample={self.sample}: expected a share of the sessions in (0, 1]")
        if self.window is not None:
            self._bounds()

    def apply(self, table: pa.Table, seed: int) -> tuple[pa.Table, dict[str, Any]]:
        """The kept rows, arrivals counted from the first of them, and what was cut as provenance.

        Raises `InputError` when nothing is left.
        """
        done: dict[str, Any] = {}
        total = table.num_rows
        if self.limit is not None:
            table = table.slice(0, self.limit)
            done["limit"] = f"{table.num_rows} of {total}"
        if self.window is not None:
            table, done["window"] = self._window(table)
        if self.sample < 1:
            table, done["sample"] = sample_sessions(table, float(self.sample), seed)
        if table.num_rows == 0:
            raise InputError(f"trace.window={list(self.window or ())}: no request of {total} is left; widen it")
        if table.num_rows != total:
            done["kept"] = f"{table.num_rows} of {total}"
        return rebase(table), done

    def _bounds(self) -> tuple[float, float]:
        bounds = self.window
        wanted = f"trace.window={bounds}: expected [start, end] in seconds with 0 <= start < end (end may be null)"
        if bounds is None or isinstance(bounds, str | float | int) or len(bounds) != 2:
            raise InputError(wanted)
        start, end = bounds[0], bounds[1] if bounds[1] is not None else float("inf")
        if not (is_number(start) and is_number(end)) or not 0 <= float(start or 0) < float(end):
            raise InputError(wanted)
        return float(start or 0), float(end)

    def _window(self, table: pa.Table) -> tuple[pa.Table, dict[str, Any]]:
        start, end = self._bounds()
        arrival = table["arrival_s"].to_numpy()
        kept = table.slice(int(np.searchsorted(arrival, start)))
        kept = kept.slice(0, int(np.searchsorted(kept["arrival_s"].to_numpy(), end)))
        finite = end if np.isfinite(end) else None
        return kept, {"start_s": start, "end_s": finite, "kept": f"{kept.num_rows} of {table.num_rows}"}


def is_number(value: object) -> bool:
    """Whether a configured value is an int or float (a bool or text is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def rebase(table: pa.Table) -> pa.Table:
    """The table with arrivals counted from its first row.

    Subtracts whole nanoseconds, so that equal recordings with different offsets give identical floats.
    """
    arrival = table["arrival_s"].to_numpy()
    if arrival.size == 0 or arrival[0] == 0:
        return table
    if np.abs(arrival[[0, -1]]).max() < EXACT_S:
        whole = np.rint(arrival * NS).astype(np.int64)
        shifted = (whole - whole[0]) / NS
    else:
        shifted = arrival - arrival[0]
    index = table.schema.get_field_index("arrival_s")
    return table.set_column(index, table.schema.field(index), pa.array(shifted))


def session_keys(table: pa.Table) -> Ints:
    """Session of each row; a row without session is its own, by request id."""
    keys: Ints = pc.coalesce(table["session"], table["request_id"]).to_numpy()
    return keys


def sample_sessions(table: pa.Table, share: float, seed: int) -> tuple[pa.Table, dict[str, Any]]:
    """Keep round(share * sessions), at least one, whole sessions.

    Sessions are ranked by a hash of seed and session, so that a smaller share keeps a subset of a larger one's.
    """
    keys = session_keys(table)
    sessions = np.unique(keys)
    count = max(1, round(share * sessions.size)) if sessions.size else 0
    ranked = sessions[np.argsort(_mix(sessions, seed), kind="stable")]
    keep = np.isin(keys, ranked[:count])
    kept = table.filter(pa.array(keep))
    done = {
        "share": share,
        "seed": seed,
        "sessions": f"{count} of {sessions.size}",
        "requests": f"{kept.num_rows} of {table.num_rows}",
    }
    return kept, done


def _mix(values: Ints, seed: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 of each value, started from a seed."""
    state = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    with np.errstate(over="ignore"):
        return mix64(values.astype(np.uint64) * WORD + state)
