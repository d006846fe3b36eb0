"""GEMM times of any weight shape from a measured grid of shapes.

Kernels change with the rows: where a tile of 256 rows more starts another wave, one row more can cost 40%. Such a step
is kept where engines that call the same kernel measured it alike; everything else is smoothed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.calibrate.measurements import GemmTable, Ints
from analysis.calibrate.smooth import Floats, error_summary, monotone

# Rows of the model's size; small shapes never occur in a served model at any degree.
LEAST_SHAPE = 512
# A step: every engine that measured `m` and `m + 1` rows, two or more of them, took longer by at least this share.
STEP = 0.05
LEAST_ENGINES = 2
# Batches by the tokens that they stack on a GPU: decodes alone, decodes with prefill chunks, large prefills.
BATCH_KINDS = {"decode_batches": (1, 256), "mixed_batches": (257, 4096), "prefill_batches": (4097, 1 << 30)}


@dataclass(frozen=True)
class Roof:
    """The time that peak rates allow: what shapes share, so that only the rest is interpolated between them."""

    flops: float
    bandwidth: float
    itemsize: int

    def __call__(self, m: Floats, n: float, k: float) -> Floats:
        """Seconds of `[m, k] @ [k, n]`: arithmetic plus traffic (outputs are 2 bytes)."""
        traffic = (n * k + m * k) * self.itemsize + 2.0 * m * n
        return np.asarray(np.hypot(2.0 * m * n * k / self.flops, traffic / self.bandwidth), dtype=np.float64)


def agreed_steps(m: Floats, seconds: Floats, replicate: Ints) -> Floats:
    """Rows after which the time of one shape steps up, by the agreement of its replicates; ascending."""
    times: dict[float, dict[int, float]] = {}
    for rows, second, engine in zip(m.tolist(), seconds.tolist(), replicate.tolist(), strict=True):
        times.setdefault(rows, {})[engine] = second
    found = []
    for rows, before in sorted(times.items()):
        after = times.get(rows + 1.0, {})
        ratios = [after[engine] / before[engine] for engine in before if engine in after]
        if len(ratios) >= LEAST_ENGINES and min(ratios) >= 1.0 + STEP:
            found.append(rows)
    return np.asarray(found, dtype=np.float64)


class GemmSurface:
    """Log of time over roof at every measured (n, k), smoothed over m; bilinear in log n and log k between them.

    `m_grid` is the grid given and both sides of every step; `steps` are the rows after which some shape steps up.
    """

    def __init__(self, table: GemmTable, roof: Roof, m_grid: Floats) -> None:
        keep = (table.n >= LEAST_SHAPE) & (table.k >= LEAST_SHAPE)
        self.table, self.keep, self.roof = table, keep, roof
        self.n = np.unique(table.n[keep]).astype(np.float64)
        self.k = np.unique(table.k[keep]).astype(np.float64)
        shapes = [[self._smooth_shape(n, k) for k in self.k] for n in self.n]
        self.steps = np.unique(np.concatenate([steps for row in shapes for _, _, steps in row]))
        self.m_grid = np.unique(np.concatenate([m_grid, self.steps, self.steps + 1.0]))
        self.grid = np.array([[self._at_grid(m_grid, *shape) for shape in row] for row in shapes])

    def _rows(self, n: float, k: float) -> tuple[Floats, Floats, Ints]:
        rows = (self.table.n == n) & (self.table.k == k)
        return self.table.m[rows].astype(np.float64), self.table.seconds[rows], self.table.replicate[rows]

    def _smooth_shape(self, n: float, k: float) -> tuple[Floats, Floats, Floats]:
        """Rows, log of time over roof there, and the rows after which it steps up."""
        m, seconds, replicate = self._rows(n, k)
        if not len(m):
            return m, seconds, m
        steps = agreed_steps(m, seconds, replicate)
        where, times = monotone(m, seconds)
        return where, np.log(times / self.roof(where, n, k)), steps

    def _at_grid(self, given: Floats, where: Floats, level: Floats, steps: Floats) -> Floats:
        """Levels at `m_grid`; next to the steps of other shapes a line between the points that are this one's."""
        if not len(where):
            return np.full(len(self.m_grid), np.nan)
        own = self.m_grid[np.isin(self.m_grid, np.concatenate([given, steps, steps + 1.0]))]
        levels = np.interp(np.log(own), np.log(where), level)
        return np.asarray(np.interp(np.log(self.m_grid), np.log(own), levels), dtype=np.float64)

    def seconds(self, n: float, k: float) -> Floats:
        """Seconds at `m_grid`, non-decreasing in m; shapes beyond the grid keep the ratio of its edge."""
        i, u = _cell(self.n, n)
        j, v = _cell(self.k, k)
        corners = ((i, j, (1 - u) * (1 - v)), (i + 1, j, u * (1 - v)), (i, j + 1, (1 - u) * v), (i + 1, j + 1, u * v))
        return self._blend(corners, n, k)

    def _blend(self, corners: tuple[tuple[int, int, float], ...], n: float, k: float) -> Floats:
        level, mass = np.zeros(len(self.m_grid)), 0.0
        for i, j, weight in corners:
            if weight > 0.0 and not np.isnan(self.grid[i, j, 0]):
                level += weight * self.grid[i, j]
                mass += weight
        times = np.exp(level / mass) * self.roof(self.m_grid, n, k)
        return np.asarray(np.maximum.accumulate(times), dtype=np.float64)

    def without(self, i: int, j: int) -> Floats:
        """Seconds at `m_grid` of measured shape (i, j), from its neighbours along n and along k alone."""
        n, k = self.n[i], self.k[j]
        u = np.log(n / self.n[i - 1]) / np.log(self.n[i + 1] / self.n[i - 1])
        v = np.log(k / self.k[j - 1]) / np.log(self.k[j + 1] / self.k[j - 1])
        along = ((i - 1, j, 1 - u), (i + 1, j, u), (i, j - 1, 1 - v), (i, j + 1, v))
        return self._blend(along, n, k)

    def held_out(self, least: int, most: int) -> dict[str, dict[str, Any]]:
        """Error over all rows of every inner shape with n, k in [least, most], each predicted without its own rows.

        Of all rows (`held_out`), and by the batches that stack that many tokens on a GPU (`BATCH_KINDS`).
        """
        predicted, measured, stacked = [], [], []
        for i in range(1, len(self.n) - 1):
            for j in range(1, len(self.k) - 1):
                if not (least <= self.n[i] <= most and least <= self.k[j] <= most):
                    continue
                m, seconds, _ = self._rows(self.n[i], self.k[j])
                curve = self.without(i, j)
                predicted.append(np.exp(np.interp(np.log(m), np.log(self.m_grid), np.log(curve))))
                measured.append(seconds)
                stacked.append(m)
        guess, truth, tokens = np.concatenate(predicted), np.concatenate(measured), np.concatenate(stacked)
        errors = {"held_out": error_summary(guess, truth)}
        for name, (low, high) in BATCH_KINDS.items():
            inside = (tokens >= low) & (tokens <= high)
            errors[name] = error_summary(guess[inside], truth[inside])
        return errors

    def in_sample(self, least: int, most: int) -> dict[str, Any]:
        """Error of the smoothing alone, over the same rows."""
        predicted, measured = [], []
        for n in self.n[(self.n >= least) & (self.n <= most)]:
            for k in self.k[(self.k >= least) & (self.k <= most)]:
                m, seconds, _ = self._rows(n, k)
                curve = self.seconds(n, k)
                predicted.append(np.exp(np.interp(np.log(m), np.log(self.m_grid), np.log(curve))))
                measured.append(seconds)
        return error_summary(np.concatenate(predicted), np.concatenate(measured))


def noise_floor(table: GemmTable, least: int, most: int) -> dict[str, Any]:
    """How far one replicate is from another at the same (m, n, k); a perfect model errs by 1 / sqrt(2) of it."""
    inside = (table.n >= least) & (table.n <= most) & (table.k >= least) & (table.k <= most)
    m, n, k = table.m[inside], table.n[inside], table.k[inside]
    key = (m * 131072 + n) * 131072 + k
    order = np.lexsort((table.replicate[inside], key))
    key, seconds = key[order], table.seconds[inside][order]
    same = key[1:] == key[:-1]
    return error_summary(seconds[:-1][same], seconds[1:][same])


def _cell(grid: Floats, value: float) -> tuple[int, float]:
    """Index of the cell and the position in it on a log scale, held at the edges of the grid."""
    index = min(max(int(np.searchsorted(grid, value)) - 1, 0), len(grid) - 2)
    position = np.log(value / grid[index]) / np.log(grid[index + 1] / grid[index])
    return index, float(min(max(position, 0.0), 1.0))
