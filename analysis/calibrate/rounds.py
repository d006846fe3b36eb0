"""The folder that `confsim profile` writes: what ranks measured, round by round.

Each cell (one plan) was measured once per round; its time is the median over rounds, and the medians of even and of odd
rounds tell how far repeated measurements are apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.calibrate.measurements import Floats
from confsim.errors import InputError

FORMAT = 2
STAGES = ("linear_s", "prefill_attention_s", "decode_attention_s", "communication_s", "head_s", "transfer_s")
TIMES = ("duration_s", *STAGES, "overhead_s")
COMMON = ("model", "gpu")  # of all layouts in a folder


@dataclass(frozen=True)
class Cell:
    """One plan on one layout: `seconds[name]` by round (positions of `rounds`), and the context of each round."""

    part: str
    name: str
    kind: str
    tp: int
    sp: int
    tokens: tuple[int, ...]
    cached: tuple[int, ...]
    last: bool
    shard_tokens: int
    sequences: int  # of each group that decodes
    busy_groups: int
    context: Floats
    rounds: Floats
    seconds: Mapping[str, Floats]

    def median(self, name: str) -> float:
        """The median over rounds."""
        return float(np.median(self.seconds[name]))

    def halves(self, name: str) -> tuple[float, float]:
        """The medians of even and of odd rounds."""
        values, even = self.seconds[name], self.rounds % 2 == 0
        return float(np.median(values[even])), float(np.median(values[~even]))

    @property
    def level(self) -> int:
        """Context of each decode when the profile began, as the cell's name ends: `joint 64@0 8x256`."""
        return int(self.name.rsplit("x", 1)[1]) if self.sequences else 0

    @property
    def context_tokens(self) -> float:
        """Total context of a group's decodes in the middle round."""
        return float(np.median(self.context))


@dataclass(frozen=True)
class Raw:
    """Everything in a profile's folder."""

    head: Mapping[str, Any]  # of the first layout
    heads: tuple[Mapping[str, Any], ...]
    cells: tuple[Cell, ...]

    def of(self, *parts: str) -> list[Cell]:
        """Cells of some parts."""
        return [cell for cell in self.cells if cell.part in parts]


# Reading -------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Raw:
    """The layouts in a folder.

    Raises:
        InputError: where there is no profile in it, or two of different models, GPUs or attention kernels.
    """
    files = sorted(folder.glob("*/profile.json")) or sorted(folder.glob("profile.json"))
    if not files:
        raise InputError(f"profile={folder}: no profile.json below it, run `confsim profile output={folder}` first")
    heads = [read_head(file) for file in files]
    for file, head in zip(files, heads, strict=True):
        for key in COMMON:
            if head[key] != heads[0][key]:
                raise InputError(f"{file}: measured another {key} than {files[0]}: keep one per folder")
        if (own := kernels(head)) != kernels(heads[0]):
            raise InputError(f"{file}: measured {own}, {files[0]} {kernels(heads[0])}: keep one per folder")
    cells = [cell for file in files for cell in _cells(file.parent)]
    return Raw(heads[0], tuple(heads), tuple(cells))


def read_head(file: Path) -> dict[str, Any]:
    """What a layout's `profile.json` says was measured on what.

    Raises:
        InputError: where it cannot be read, or is none of this format.
    """
    try:
        head = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error}): measure again") from None
    if not isinstance(head, dict) or head.get("kind") != "executor_profile" or head.get("format") != FORMAT:
        raise InputError(f"{file}: is no executor profile of format {FORMAT}: measure again")
    return head


def kernels(head: Mapping[str, Any]) -> str:
    """Family and version of the attention kernels behind a profile, as its ranks say."""
    said = {f"{rank.get('attention', '')} {rank.get('attention_version', '')}".strip() for rank in head["ranks"]}
    return ", ".join(sorted(said - {""}))


def _cells(folder: Path) -> list[Cell]:
    files = sorted(folder.glob("round-*.parquet"))
    if len(files) < 2:
        raise InputError(f"{folder}: holds {len(files)} rounds, a fit needs 2 or more: run `confsim profile` again")
    try:
        rows = pa.concat_tables([pq.read_table(file) for file in files]).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{folder}: a round cannot be read ({error}): remove its file and measure again") from None
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["cell"], []).append(row)
    return [_cell(some) for some in by_name.values()]


def _cell(rows: Sequence[Mapping[str, Any]]) -> Cell:
    first = rows[0]
    return Cell(
        first["part"],
        first["cell"],
        first["kind"],
        first["tp"],
        first["sp"],
        tuple(first["tokens"]),
        tuple(first["cached"]),
        first["last"],
        first["shard_tokens"],
        first["sequences"],
        first["busy_groups"],
        np.array([row["context_tokens"] for row in rows], dtype=np.float64),
        np.array([row["round"] for row in rows], dtype=np.float64),
        {name: np.array([row[name] for row in rows], dtype=np.float64) for name in TIMES},
    )
