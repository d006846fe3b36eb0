"""Choosing an engine's constants on its fit rows: Gauss-Newton steps on relative errors, without randomness.

Residuals are relative errors over what is aimed at (3% for the time per output token, 10% for the time to first
token), with a soft-L1 loss so that single rows do not decide. The functions are nearly linear in the three constants,
so that a few steps with differences as derivatives end at the minimum; the best point visited is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.validate.silicon_engines import Constants, Predicted
from analysis.validate.silicon_rows import Measured

AIM = (0.03, 0.10)  # relative error of TPOT and TTFT that is aimed at
START = (1e-3, 2e-5, 1.0)
STEP = (5e-4, 1e-5, 0.05)  # differences of the derivatives
LOWER, UPPER = (0.0, 0.0, 0.5), (0.02, 5e-4, 2.0)
ROUNDS = 4
DIGITS = (6, 8, 4)  # decimals to which constants are rounded: a microsecond, 10 ns, 1e-4

Floats = npt.NDArray[np.float64]
Predict = Callable[[Constants], Sequence[Predicted]]


@dataclass(frozen=True)
class Fit:
    """The constants with the loss that they reach, and how many points were tried."""

    constants: Constants
    loss: float
    evaluations: int


def errors(rows: Sequence[Measured], predicted: Sequence[Predicted]) -> tuple[Floats, Floats]:
    """Relative errors of TPOT and TTFT, predicted over measured less 1."""
    tpot = np.array([p.tpot_s / row.tpot_s - 1 for row, p in zip(rows, predicted, strict=True)])
    ttft = np.array([p.ttft_s / row.ttft_s - 1 for row, p in zip(rows, predicted, strict=True)])
    return tpot, ttft


def fit(rows: Sequence[Measured], predict: Predict) -> Fit:
    """Constants for `rows`, whose predictions `predict` gives in their order."""
    visited: list[tuple[float, tuple[float, ...]]] = []

    def residuals(point: Floats) -> Floats:
        values = [round(float(value), digits) for value, digits in zip(point, DIGITS, strict=True)]
        tpot, ttft = errors(rows, predict(Constants(*values)))
        scaled = np.concatenate([tpot / AIM[0], ttft / AIM[1]])
        visited.append((_loss(scaled), tuple(values)))
        return scaled

    point = np.array(START)
    for _ in range(ROUNDS):
        point = _step(point, residuals)
    residuals(point)
    loss, best = min(visited)
    return Fit(Constants(*best), loss, len(visited))


def _loss(scaled: Floats) -> float:
    return float(np.mean(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0)))


def _step(point: Floats, residuals: Callable[[Floats], Floats]) -> Floats:
    """The minimum of the local linear model within the bounds, rows weighted as the soft-L1 loss does at `point`."""
    from scipy.optimize import lsq_linear

    here = residuals(point)
    slopes = [(residuals(point + step) - here) / size for step, size in zip(np.diag(STEP), STEP, strict=True)]
    weight = (1.0 + here**2) ** -0.25
    unit = np.array(STEP)  # in steps, so that the columns have one size
    matrix = weight[:, None] * np.stack(slopes, axis=1) * unit
    bounds = ((np.array(LOWER) - point) / unit, (np.array(UPPER) - point) / unit + 1e-9)
    solved: Floats = lsq_linear(matrix, -weight * here, bounds=bounds).x
    moved: Floats = np.clip(point + solved * unit, LOWER, UPPER)
    return moved
