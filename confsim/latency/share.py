"""What a part of a GPU's SMs does to the times of a forward pass: one model, in one place.

First principles. Arithmetic scales with the SMs. One SM can keep only so many reads in flight, so that a few SMs do
not reach the memory's bandwidth, while the last ones add little: every further SM adds in proportion to what is
still unused, `db/ds = (1 - b) / k`, hence `b(s) = (1 - exp(-s / k)) / (1 - exp(-1 / k))` for a share `s`. Collectives
are bound by links and need few SMs.

Reading the weights. Public measurements of the bandwidth reached by a share of the SMs, beside the law:

- A100, decode iterations of a 70B model on TP8 (coefficients of SGLang's pdmux, weights' part): 64%, 92% and 99% on
  24, 56 and 88 of 108 SMs; k = 0.22 gives 64%, 91%, 99%.
- H100 SXM5, float4 copy (a public CUDA study's table): 59% and 86% on 32 and 64 of 132 SMs; k = 0.27 gives 60%, 85%.
- H100 PCIe, decode matmuls: 90% on about 40 of 114 SMs (github.com/zejia-lin/BulletServe/issues/1); k = 0.15.

The default, 0.22, lies between them. The same A100 coefficients put prefill's time at 4.6, 2.1 and 1.4 times the
full GPU's on 24, 56 and 88 of 108 SMs for 32K tokens, where arithmetic alone says 4.5, 1.9 and 1.2. For links:
24 SMs brought 337 GB/s of about 380 reachable on NVLink 4 (github.com/deepseek-ai/DeepEP/issues/16).

Decode attention reads KV, and how many SMs that takes depends on the kernel (`FAMILIES`):

- `tma` (FlashAttention-3): the law above with 90% of the bandwidth on a share of 0.32. By Little's law 90% of 3.0 TB/s
  at 0.6 to 0.8 us needs 1.6 to 2.2 MB in flight, 38 to 51 KB on each of 42 SMs, which TMA stages can hold. The figure
  itself follows from ConfluxServe's attention stage: 28.0 ms where confsim predicts 36.3 ms in turn (docs/latency.md).
- `linear` (FlashInfer, cp.async kernels: about 10 KB in flight an SM): the context term of the decode fits that
  SGLang's pdmux ships for 8 A100 (`LINEAR`), nearly linear in the SMs. Its fits for H800 give .19, .45, .65 on 24, 56,
  88 of 132, slightly less still.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from confsim.errors import InputError
from confsim.latency.base import LatencyModel
from confsim.specs import GpuSpec

FORMAT = 1
FAMILIES = ("tma", "linear")
BANDWIDTH_SHARE = 0.9  # of its bandwidth that decode attention keeps on the SMs that Conflux gives it
TMA_SHARE = 0.32  # of the SMs, with which `tma` kernels reach it
# Speed of `linear` kernels by the share of SMs: 24, 56, 88 and 108 of 108.
LINEAR = ((0.0, 24 / 108, 56 / 108, 88 / 108, 1.0), (0.0, 0.23, 0.53, 0.77, 1.0))
SATURATED_TOKENS = 8192  # by this many tokens a GEMM computes at its best rate
SMALL_TOKENS = 256


class Speeds(NamedTuple):
    """Speeds on a part of the SMs, relative to all of them: above 0, at most 1."""

    compute: float  # GEMMs with many tokens
    bandwidth: float  # reading weights
    prefill_attention: float
    decode_attention: float
    collective: float


ALL_SMS = Speeds(1.0, 1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class SmShares:
    """`latency.shares`: the laws' parameters, or a measured table in their place.

    `bandwidth_scale` is the `k` of reading weights. `kernels` names the family of the decode attention kernels
    (`FAMILIES`); `auto` is the one that a scheme's implementation uses. `tma_share` is the share of the SMs on which
    `tma` kernels reach 90% of their bandwidth (None: `latency.decode_sm_share`, 0.32 where that does not exist).

    `table` is the path of a JSON object: `"kind": "sm_shares"`, `"format": 1`, `"gpu"` (a name of `conf/gpu`), `"sms"`
    (ascending counts, the last one all SMs of the GPU) and, for each name of `Speeds` that was measured, a list of
    speeds at these counts relative to the last, which is 1. Names left out follow the law; between counts, and from 0
    at no SM, speeds are interpolated linearly.

    Raises:
        InputError: for parameters that cannot be.
    """

    bandwidth_scale: float = 0.22
    collective_sms: int = 24
    kernels: str = "auto"
    tma_share: float | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        if self.kernels not in ("auto", *FAMILIES):
            raise InputError(f"latency.shares.kernels={self.kernels}: use auto or one of {', '.join(FAMILIES)}")
        if self.tma_share is not None and not 0.0 < self.tma_share < BANDWIDTH_SHARE:
            raise InputError(f"latency.shares.tma_share={self.tma_share}: give a share of SMs above 0 and below 0.9")
        if not (math.isfinite(self.bandwidth_scale) and self.bandwidth_scale > 0):
            raise InputError(f"latency.shares.bandwidth_scale={self.bandwidth_scale}: give a share of SMs above 0")
        if self.collective_sms < 1:
            raise InputError(f"latency.shares.collective_sms={self.collective_sms}: give 1 or more SMs")

    def speeds(self, gpu: GpuSpec, sms: int, kernels: str = "tma") -> Speeds:
        """Speeds on `sms` SMs of the GPU, for a scheme whose implementation uses decode attention of `kernels`.

        Raises:
            InputError: where the table is missing, malformed, or of another GPU.
        """
        if not 1 <= sms <= gpu.sms:
            raise InputError(f"{sms} SMs: {gpu.name} has {gpu.sms}")
        share = sms / gpu.sms
        law = Speeds(
            compute=share,
            bandwidth=_saturating(share, self.bandwidth_scale),
            prefill_attention=share,
            decode_attention=self._decode_attention(share, kernels),
            collective=min(1.0, sms / min(self.collective_sms, gpu.sms)),
        )
        table = self._table(gpu)
        measured = {name: _interpolate(table["sms"], table[name], sms) for name in Speeds._fields if name in table}
        return law._replace(**measured)

    def decode_share(self, gpu: GpuSpec, kernels: str = "tma") -> float:
        """The smallest share of the SMs on which decode attention reaches 90% of its bandwidth.

        Raises:
            InputError: as `speeds`.
        """
        table = self._table(gpu)
        if "decode_attention" in table:
            return float(np.interp(BANDWIDTH_SHARE, [0.0, *table["decode_attention"]], [0, *table["sms"]])) / gpu.sms
        if self._family(kernels) == "linear":
            return float(np.interp(BANDWIDTH_SHARE, LINEAR[1], LINEAR[0]))
        return self.tma_share or TMA_SHARE

    def _family(self, kernels: str) -> str:
        return kernels if self.kernels == "auto" else self.kernels

    def _decode_attention(self, share: float, kernels: str) -> float:
        if self._family(kernels) == "linear":
            return float(np.interp(share, *LINEAR))
        return _saturating(share, _scale(self.tma_share or TMA_SHARE))

    def _table(self, gpu: GpuSpec) -> Mapping[str, Any]:
        if self.table is None:
            return {}
        table = _load(self.table)
        _check_gpu(table, gpu, self.table)
        return table


def _saturating(share: float, scale: float) -> float:
    return math.expm1(-share / scale) / math.expm1(-1.0 / scale)


@lru_cache(maxsize=64)
def _scale(share: float) -> float:
    """The scale at which `share` of the SMs reaches 90% of the bandwidth, found by bisection."""
    narrow, wide = share / 40.0, 1e4
    for _ in range(200):
        middle = math.sqrt(narrow * wide)
        narrow, wide = (middle, wide) if _saturating(share, middle) > BANDWIDTH_SHARE else (narrow, middle)
    return narrow


class PartitionLatency:
    """Times of a latency model (all layers, seconds) while its kernels run on a part of every GPU's SMs.

    Linear layers: reading the weights takes `floor`, the time of one token; what more tokens add is arithmetic,
    and in no case is a token faster than in a saturated GEMM. With weights at speed `b` and arithmetic at speed `c`,
    `T(n) = max(floor / b + (T_all(n) - floor) / c, n * token / c)`, plus the all-reduces at the collectives' speed.
    With all SMs this is the latency model's own time. Every method is monotone in its token arguments and falls
    with the SMs.
    """

    __slots__ = ("_floor_s", "_head_floor_s", "_latency", "_speeds", "_token_s")

    def __init__(self, latency: LatencyModel, speeds: Speeds) -> None:
        self._latency = latency
        self._speeds = speeds
        self._floor_s = latency.linear_s(1) - latency.collective_s(1)
        self._head_floor_s = latency.head_s(1)
        self._token_s = _saturated_token_s(latency)

    def linear_s(self, tokens: int) -> float:
        """Linear layers of `tokens`, their all-reduces included."""
        if tokens <= 0:
            return 0.0
        latency, speeds = self._latency, self._speeds
        collective_s = latency.collective_s(tokens)
        excess_s = latency.linear_s(tokens) - collective_s - self._floor_s
        seconds = self._floor_s / speeds.bandwidth + max(excess_s, 0.0) / speeds.compute
        return max(seconds, tokens * self._token_s / speeds.compute) + collective_s / speeds.collective

    def head_s(self, tokens: int) -> float:
        """The LM head, whose weights are read once."""
        if tokens <= 0:
            return 0.0
        excess_s = self._latency.head_s(tokens) - self._head_floor_s
        return self._head_floor_s / self._speeds.bandwidth + excess_s / self._speeds.compute

    def prefill_attention_s(self, tokens: int, cached_tokens: int) -> float:
        """Attention of a chunk: arithmetic."""
        return self._latency.prefill_attention_s(tokens, cached_tokens) / self._speeds.prefill_attention

    def decode_attention_s(self, sequences: int, context_tokens: int) -> float:
        """Decode attention: reading KV."""
        return self._latency.decode_attention_s(sequences, context_tokens) / self._speeds.decode_attention


def _saturated_token_s(latency: LatencyModel) -> float:
    """Seconds a token of the linear layers at their best efficiency, all-reduces aside."""

    def local_s(tokens: int) -> float:
        return latency.linear_s(tokens) - latency.collective_s(tokens)

    sizes = [SATURATED_TOKENS]
    while sizes[-1] > SMALL_TOKENS:
        sizes.append(sizes[-1] // 2)
    slope = (local_s(2 * SATURATED_TOKENS) - local_s(SATURATED_TOKENS)) / SATURATED_TOKENS
    return min(slope, *(local_s(tokens) / tokens for tokens in sizes))


def _interpolate(counts: list[int], speeds: list[float], sms: int) -> float:
    low, before = 0, 0.0
    for high, after in zip(counts, speeds, strict=True):
        if sms <= high:
            return before + (after - before) * (sms - low) / (high - low)
        low, before = high, after
    return 1.0


@lru_cache(maxsize=4)
def _load(path: str) -> Mapping[str, Any]:
    try:
        data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"SM share table {path} cannot be read ({error}): check latency.shares.table") from None
    if not isinstance(data, dict) or data.get("kind") != "sm_shares" or data.get("format") != FORMAT:
        raise InputError(f'SM share table {path} is not one: it needs "kind": "sm_shares" and "format": {FORMAT}')
    _check_ascending(data.get("sms"), f"{path}: sms", 1, None)
    for name in Speeds._fields:
        if name in data:
            _check_ascending(data[name], f"{path}: {name}", 1e-6, 1.0)
            if len(data[name]) != len(data["sms"]):
                raise InputError(f"SM share table {path}: {name} needs one speed for each of sms")
    return data


def _check_ascending(values: Any, where: str, least: float, last: float | None) -> None:
    numbers = isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )
    if not numbers or not values or values[0] < least:
        raise InputError(f"SM share table {where} is not a list of numbers of at least {least:g}")
    rising = all(a <= b for a, b in pairwise(values)) if last else all(a < b for a, b in pairwise(values))
    if not rising or (last is not None and values[-1] != last):
        raise InputError(f"SM share table {where} has to ascend" + (f" to {last:g}" if last else ""))


def _check_gpu(table: Mapping[str, Any], gpu: GpuSpec, path: str) -> None:
    if table.get("gpu") != gpu.name or table["sms"][-1] != gpu.sms:
        raise InputError(
            f"SM share table {path} is of gpu={table.get('gpu')} with {table['sms'][-1]} SMs, "
            f"not {gpu.name} with {gpu.sms}: measure one there, or set latency.shares.table=null"
        )
