"""How long ranks take to move a prompt's KV to where it decodes, from the rounds of a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from analysis.calibrate.measurements import CollectiveTable, Floats, Ints
from analysis.calibrate.rounds import Cell, Raw
from confsim.parallel import kv_token_bytes
from confsim.schemes.rank_rules import RankRules
from confsim.specs import ModelSpec


def transfer_measured(raw: Raw, model: ModelSpec) -> CollectiveTable | None:
    """What one GPU of the receiving group lacks, in bytes a layer, and how long it takes."""
    degree, size, seconds = [], [], []
    for cell in raw.of("transfer"):
        local, shared = model.split_heads(cell.tp, cell.sp)
        lacking = kv_token_bytes(local.kv_heads - shared.kv_heads, model.head_dim, 1, model.kv_itemsize)
        if lacking:
            degree.append(cell.sp)
            size.append(cell.tokens[0] * lacking)
            seconds.append(_added(raw, cell) if moves_in_line(raw) else cell.median("transfer_s"))
    if not size:
        return None
    times = np.maximum(np.array(seconds) / model.num_hidden_layers, 1e-12)
    return CollectiveTable(np.array(degree), np.array(size), times)


def robust_line(x: Ints, y: Floats) -> Callable[[Any], Floats]:
    """Theil and Sen's line: the median slope of all pairs, through the median of what it leaves; rising, above 0."""
    first, second = np.triu_indices(len(x), 1)
    apart = x[first] != x[second]
    pairs = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
    slope = max(float(np.median(pairs)), 0.0) if len(pairs) else 0.0
    offset = max(float(np.median(y - slope * x)), 0.0)
    return lambda at: np.maximum(offset + slope * np.asarray(at, dtype=np.float64), 1e-12)


def moves_in_line(raw: Raw) -> bool:
    """Whether moving KV lengthens an iteration."""
    return RankRules.of(raw.head["device"]).moves_in_line


def _added(raw: Raw, cell: Cell) -> float:
    """What the end of a prompt adds to its last chunk beside the head: round by round, so that drift cancels."""
    same = {"tokens": cell.tokens, "cached": cell.cached, "kind": cell.kind, "tp": cell.tp, "sp": cell.sp}
    alone = next((c for c in raw.of("prefill") if all(getattr(c, key) == value for key, value in same.items())), None)
    if alone is None or len(alone.rounds) != len(cell.rounds):
        return cell.median("transfer_s")
    heads = [c.median("head_s") for c in raw.of("decode") if c.sequences == 1 and (c.tp, c.sp) == (cell.tp, cell.sp)]
    added = cell.seconds["duration_s"][np.argsort(cell.rounds)] - alone.seconds["duration_s"][np.argsort(alone.rounds)]
    return max(float(np.median(added)) - float(np.median(heads or [0.0])), cell.median("transfer_s"))
