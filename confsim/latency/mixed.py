"""Attention of both phases in one variable-length call, as engines run chunked prefill: a grid of ratios to the sum.

A kernel made for prefill tiles spends more on decode rows than one made for decodes: their keys are not split over
SMs, and query heads that share a KV head read it each on their own. How much more depends on the kernel and the GPU,
so the ratios are measured; a grid of another GPU is borrowed and labelled so.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from confsim.latency.curve import check_numbers

FORMAT = 1
GRIDS = Path(__file__).parent / "mixed_grids"
AXES = ("chunk_tokens", "cached_tokens", "sequences", "context_each")
# Prefixes start at 0: they are spaced by the log of what they hold beyond so many tokens.
CACHED_OFFSET = 16.0


class MixedAttention:
    """Ratio of one call's time to the sum of its parts alone, by chunk, cached prefix, decodes and context of each.

    Linear in the logs between the points of the grid, the edge's value beyond it; there the extra time follows the
    decodes and that part of the prefill attention which the grid reaches. `data` is plain JSON data: `gpu`, `model`,
    `source`, ascending lists for `AXES`, `ratio` (row-major, the last axis fastest) and `errors`.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self._axes = [_axis(data, name, where) for name in AXES]
        self._ratio = _ratios(data, [len(axis) for axis in self._axes], where)
        self._most_chunk, self._most_cached = float(data[AXES[0]][-1]), float(data[AXES[1]][-1])

    @property
    def gpu(self) -> str:
        """The GPU that it was measured on."""
        return str(self.data.get("gpu"))

    def ratio(self, chunk_tokens: float, cached_tokens: float, sequences: float, context_each: float) -> float:
        """Time over the sum of the parts; above 0, and below 1 where two small kernels become one."""
        places = zip(self._axes, (chunk_tokens, cached_tokens + CACHED_OFFSET, sequences, context_each), strict=True)
        corners = [(0, 1.0)]
        for axis, value in places:
            at = math.log(value) if value > 0 else axis[0]
            low = min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)
            share = min(max((at - axis[low]) / (axis[low + 1] - axis[low]), 0.0), 1.0)
            corners = [
                (index * len(axis) + low + step, mass * part)
                for index, mass in corners
                for step, part in ((0, 1.0 - share), (1, share))
                if part > 0.0
            ]
        ratio = self._ratio
        return math.exp(sum(mass * ratio[index] for index, mass in corners))

    def seconds(
        self,
        chunk_tokens: int,
        cached_tokens: float,
        sequences: int,
        context_tokens: int,
        prefill_s: float,
        decode_s: float,
    ) -> float:
        """Seconds of one call over `chunk_tokens` behind `cached_tokens` and `sequences` of `context_tokens` in all.

        `prefill_s` and `decode_s` are its parts alone; never less than the longer of them.
        """
        if not chunk_tokens or not sequences:
            return prefill_s + decode_s
        inside = _pairs(min(chunk_tokens, self._most_chunk), min(cached_tokens, self._most_cached))
        reached_s = prefill_s * inside / _pairs(chunk_tokens, cached_tokens)
        extra = self.ratio(chunk_tokens, cached_tokens, sequences, context_tokens / sequences) - 1.0
        return max(prefill_s + decode_s + extra * (reached_s + decode_s), prefill_s, decode_s)


def _pairs(tokens: float, cached: float) -> float:
    """Query-key pairs of a causal chunk."""
    return tokens * (cached + tokens / 2.0)


def _axis(data: Mapping[str, Any], name: str, where: str) -> list[float]:
    values = data.get(name)
    if not isinstance(values, list) or len(values) < 2:
        raise InputError(f"{where}: {name} is not a list of two numbers or more")
    check_numbers(values, f"{where}: {name}", 0.0 if name == "cached_tokens" else 1.0)
    if any(b <= a for a, b in pairwise(values)):
        raise InputError(f"{where}: {name} does not ascend")
    offset = CACHED_OFFSET if name == "cached_tokens" else 0.0
    return [math.log(value + offset) for value in values]


def _ratios(data: Mapping[str, Any], sizes: list[int], where: str) -> list[float]:
    values = data.get("ratio")
    if not isinstance(values, list) or len(values) != math.prod(sizes):
        raise InputError(f"{where}: ratio is not a list of {' x '.join(map(str, sizes))} numbers")
    check_numbers(values, f"{where}: ratio", 1e-3)
    return [math.log(value) for value in values]


def packaged_grids() -> list[str]:
    """Names of the grids in the package, sorted."""
    return sorted(path.stem for path in GRIDS.glob("*.json"))


def chosen_grid(choice: str, own: MixedAttention | None) -> MixedAttention | None:
    """What `latency.mixed_attention` names: `auto` is the profile's `own`, if any; else a packaged grid or a file.

    None, for `separate` too: both phases in separate calls, whose times add up.

    Raises:
        InputError: for a choice that names nothing, or a file that is no grid.
    """
    if choice == "auto":
        return own
    if choice == "separate":
        return None
    packaged = GRIDS / f"{choice}.json"
    if not packaged.is_file() and not choice.endswith(".json"):
        known = ", ".join(["auto", "separate", *packaged_grids()])
        raise InputError(f"latency.mixed_attention={choice}: use one of {known}, or the path of a grid (.json)")
    return _load(str(packaged if packaged.is_file() else Path(choice).expanduser()))


def describe_grid(grid: MixedAttention | None, gpu: str) -> dict[str, Any]:
    """What a result records: whose grid, whether it is borrowed from another GPU, and its errors."""
    if grid is None:
        return {"one_kernel": False}
    about = {key: grid.data.get(key) for key in ("gpu", "model", "source", "errors")}
    return {"one_kernel": True, "borrowed": grid.gpu != gpu, **about}


@lru_cache(maxsize=4)
def _load(path: str) -> MixedAttention:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"mixed attention {path} cannot be read ({error}): check latency.mixed_attention") from None
    if not isinstance(data, dict) or data.get("kind") != "mixed_attention" or data.get("format") != FORMAT:
        raise InputError(f'mixed attention {path} is none: it needs "kind": "mixed_attention" and "format": {FORMAT}')
    return MixedAttention(data, f"mixed attention {path}")
