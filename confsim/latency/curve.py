"""Monotone tables: the only thing that a profile is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from confsim.errors import InputError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Seconds `y` at ascending positions `x` (tokens, bytes, sequences), linear between them, never decreasing."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __call__(self, at: Floats) -> Floats:
        """Seconds at the positions `at`; beyond the last point along the last slope, below the first its value."""
        x, y = np.asarray(self.x), np.asarray(self.y)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        return np.asarray(np.interp(at, x, y) + np.maximum(at - x[-1], 0.0) * slope, dtype=np.float64)


def check_numbers(values: Sequence[float], name: str, least: float = 0.0) -> None:
    """Refuse what could put a bad time on the clock.

    Raises:
        InputError: naming the entry, where a value is not a number, infinite or below `least`.
    """
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            raise InputError(f"{name}[{index}] is {value!r}: give a finite number of at least {least:g}")


def check_curve(curve: Curve, name: str) -> None:
    """Refuse a table that is empty, uneven, not ascending, decreasing or not finite.

    Raises:
        InputError: naming the table and the entry.
    """
    check_numbers(curve.x, f"{name}.x")
    check_numbers(curve.y, f"{name}.y")
    if not curve.x or len(curve.x) != len(curve.y):
        raise InputError(f"{name} has {len(curve.x)} positions and {len(curve.y)} times: give one time a position")
    for index in range(1, len(curve.x)):
        if curve.x[index] <= curve.x[index - 1]:
            raise InputError(f"{name}.x[{index}] does not ascend: sort the positions and drop repeated ones")
        if curve.y[index] < curve.y[index - 1]:
            raise InputError(f"{name}.y[{index}] is below the entry before it: more work cannot take less time")


def rounded(value: float, digits: int = 5) -> float:
    """A value at `digits` significant digits, so that tables stay readable; monotone."""
    return float(f"{value:.{digits}g}")


def curve_of(x: Floats, y: Floats) -> Curve:
    """A curve at rounded values, made non-decreasing against rounding."""
    times = np.maximum.accumulate(np.asarray([rounded(value) for value in y.tolist()]))
    return Curve(tuple(x.tolist()), tuple(times.tolist()))
