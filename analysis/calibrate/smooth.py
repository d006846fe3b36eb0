"""Robust monotone smoothing on log scales, and errors of predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def isotonic(values: Floats, weights: Floats | None = None) -> Floats:
    """The closest non-decreasing sequence by weighted least squares (pool adjacent violators)."""
    weight = np.ones(len(values)) if weights is None else weights
    level: list[float] = []
    mass: list[float] = []
    size: list[int] = []
    for value, w in zip(values.tolist(), weight.tolist(), strict=True):
        level.append(value)
        mass.append(w)
        size.append(1)
        while len(level) > 1 and level[-2] > level[-1]:
            total = mass[-2] + mass[-1]
            merged = (level[-2] * mass[-2] + level[-1] * mass[-1]) / total
            level[-2:], mass[-2:], size[-2:] = [merged], [total], [size[-2] + size[-1]]
    return np.repeat(np.asarray(level), size)


def group_mean_log(x: Floats, seconds: Floats) -> tuple[Floats, Floats, Floats]:
    """Distinct positions, the mean log time of the replicates at each, and their number."""
    where, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    total = np.bincount(inverse, weights=np.log(seconds))
    return where, total / count, count.astype(np.float64)


def monotone(x: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Distinct positions and the non-decreasing times closest to the replicates on a log scale."""
    where, level, count = group_mean_log(x, seconds)
    return where, np.exp(isotonic(level, count))


def error_summary(predicted: Floats, measured: Floats) -> dict[str, Any]:
    """Mean, median and 95th percentile of the relative error, in percent, and the rows behind them."""
    error = np.abs(predicted / measured - 1.0) * 100.0
    error = error[np.isfinite(error)]
    if not len(error):
        return {"mean_pct": None, "median_pct": None, "p95_pct": None, "rows": 0}
    return {
        "mean_pct": round(float(error.mean()), 2),
        "median_pct": round(float(np.median(error)), 2),
        "p95_pct": round(float(np.quantile(error, 0.95)), 2),
        "rows": len(error),
    }
