"""Grids of mixed attention from measured calls; `python -m analysis.calibrate.mixed FOLDER` makes the packaged ones.

FOLDER holds `mixed_attention_GPU_MODEL.csv.gz` with columns prefill_chunk, kv_prefill, n_decode, kv_decode, time_us.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from analysis.calibrate.measurements import MixedTable
from analysis.calibrate.smooth import Floats, error_summary
from confsim.errors import InputError
from confsim.latency.curve import rounded
from confsim.latency.mixed import AXES, FORMAT, GRIDS, MixedAttention

Knots = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]

# Points kept of the public grids; the rows between them are held out.
PACKAGED_KNOTS: Knots = (
    (16, 64, 256, 512, 1024, 2048),
    (0, 256, 1024, 4096, 16384),
    (1, 2, 4, 8, 16, 32, 64, 128),
    (16, 128, 512, 2048, 8192, 16384),
)
PACKAGED = {"rtx4090": "NVIDIA RTX 4090", "rtxpro6000": "NVIDIA RTX PRO 6000 Blackwell"}
SOURCE = (
    "vLLM 0.19, one variable-length call (FlashAttention-2 class kernel), 32 query and 8 KV heads of 128, bfloat16; "
    "ratios derived from the profiles of LLMServingSim (github.com/casys-kaist/LLMServingSim, MIT License, CASYS Lab "
    "at KAIST, 2024)"
)


class _Rows:
    """Calls of both phases whose parts were measured alone too: positions on `AXES`, seconds, and the parts' sum."""

    def __init__(self, table: MixedTable) -> None:
        prefill, decode = table.sequences == 0, table.tokens == 0
        alone_prefill = _medians(table.tokens[prefill], table.cached[prefill], table.seconds[prefill])
        alone_decode = _medians(table.sequences[decode], table.context[decode], table.seconds[decode])
        found: dict[tuple[int, ...], list[float]] = {}
        for *at, seconds in zip(table.tokens, table.cached, table.sequences, table.context, table.seconds, strict=True):
            tokens, cached, sequences, context = map(int, at)
            if (tokens, cached) in alone_prefill and (sequences, context) in alone_decode:
                found.setdefault((tokens, cached, sequences, context), []).append(float(seconds))
        self.at = np.array(list(found), dtype=np.float64).reshape(len(found), len(AXES))
        self.seconds = np.array([float(np.median(times)) for times in found.values()])
        self.parts = np.array([alone_prefill[at[:2]] + alone_decode[at[2:]] for at in found])


def _medians(first: Any, second: Any, seconds: Floats) -> dict[tuple[int, ...], float]:
    times: dict[tuple[int, ...], list[float]] = {}
    for a, b, value in zip(first.tolist(), second.tolist(), seconds.tolist(), strict=True):
        times.setdefault((a, b), []).append(value)
    return {at: float(np.median(values)) for at, values in times.items()}


def fit_mixed(table: MixedTable, about: dict[str, Any], knots: Knots | None = None) -> dict[str, Any]:
    """A grid as plain data, with the error of the rows that it does not hold; `about` says what was measured.

    `knots` are the points kept on each axis (None: every measured one).

    Raises:
        InputError: where a combination of the points was not measured.
    """
    rows = _Rows(table)
    kept = knots or tuple(np.unique(rows.at[:, axis]).astype(int).tolist() for axis in range(len(AXES)))
    data = _grid(rows, kept, about)
    return data | {"errors": _errors(rows, data, kept, about)}


def _grid(rows: _Rows, knots: Sequence[Sequence[int]], about: dict[str, Any]) -> dict[str, Any]:
    ratios = dict(zip(map(tuple, rows.at.tolist()), (rows.seconds / rows.parts).tolist(), strict=True))
    try:
        found = [rounded(ratios[at], 4) for at in product(*knots)]
    except KeyError as missing:
        names = ", ".join(f"{name}={value:g}" for name, value in zip(AXES, missing.args[0], strict=True))
        raise InputError(f"mixed attention was not measured, or its parts were not, at {names}") from None
    axes = {name: list(values) for name, values in zip(AXES, knots, strict=True)}
    return {"kind": "mixed_attention", "format": FORMAT, **about, **axes, "ratio": found}


def _errors(
    rows: _Rows, data: dict[str, Any], knots: Sequence[Sequence[int]], about: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Of rows beside the grid; where every row is a point of it, of each inner point predicted without its value.

    `sum_of_parts` is how far the same rows are from the sum of their parts.
    """
    off = ~np.all([np.isin(rows.at[:, axis], values) for axis, values in enumerate(knots)], axis=0)
    guesses, truths, sums = [], [], []
    beside = [(MixedAttention(data, "mixed attention"), off)]
    for grid, held in beside if off.any() else _left_out(rows, knots, about):
        ratio = np.array([grid.ratio(*at) for at in rows.at[held].tolist()])
        guesses.append(ratio * rows.parts[held])
        truths.append(rows.seconds[held])
        sums.append(rows.parts[held])
    none = np.zeros(0)
    truth = np.concatenate([none, *truths])
    return {
        "held_out": error_summary(np.concatenate([none, *guesses]), truth),
        "sum_of_parts": error_summary(np.concatenate([none, *sums]), truth),
    }


def _left_out(
    rows: _Rows, knots: Sequence[Sequence[int]], about: dict[str, Any]
) -> Iterator[tuple[MixedAttention, Any]]:
    """Grids without one inner value of one axis, and the rows at that value."""
    for axis, values in enumerate(knots):
        for value in values[1:-1]:
            rest = [[v for v in own if number != axis or v != value] for number, own in enumerate(knots)]
            yield MixedAttention(_grid(rows, rest, about), "mixed attention"), rows.at[:, axis] == value


def read_csv(path: Path) -> MixedTable:
    """The table in a compressed CSV file with the columns named above."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        columns = np.genfromtxt(lines, delimiter=",", names=True)
    ints = [
        np.rint(columns[name]).astype(np.int64) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    ]
    return MixedTable(*ints, columns["time_us"] * 1e-6)


def packaged(folder: Path) -> dict[str, dict[str, Any]]:
    """The packaged grids, by name, from the public measurements in `folder`."""
    grids = {}
    for name, title in PACKAGED.items():
        table = read_csv(folder / f"mixed_attention_{name}_llama-3.1-8b.csv.gz")
        about = {"gpu": name, "gpu_name": title, "model": "llama3_1_8b", "source": SOURCE}
        grids[name] = fit_mixed(table, about, PACKAGED_KNOTS)
    return grids


def main() -> None:
    """Write them."""
    GRIDS.mkdir(exist_ok=True)
    for name, data in packaged(Path(sys.argv[1])).items():
        (GRIDS / f"{name}.json").write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
        print(name, data["errors"])


if __name__ == "__main__":
    main()
