"""What an arrival mode makes of a trace: the load that a simulation injects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """A trace with its arrival times settled.

    `arrival_s` has one entry a row of `trace.table`, ascending, from 0. Open loop: requests arrive at these times.
    `concurrency` set: closed loop; the first `concurrency` rows arrive at 0 and the next row whenever a request
    ends. `think_s` set: closed sessions; a row whose `parent_row` is not -1 arrives `think_s[row]` after the last
    token of that row instead of at `arrival_s[row]`. `label` names mode and rate as they ran, and `provenance` is
    the same as plain JSON data.
    """

    trace: Trace
    arrival_s: Floats
    mode: str
    rate: float | None
    concurrency: int | None = None
    think_s: Floats | None = None
    parent_row: Ints | None = None
    label: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.trace)
