"""What a fit starts from: one typed table a component, whatever measured it.

A source fills the tables that it has: kernels (GEMMs, elementwise work, collectives), which the fit puts together
into stages, or whole stages as real ranks run them, which it takes as they are and prefers where both are given.
All columns of a table are arrays of one length; times are seconds; repeated rows are replicates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GemmTable:
    """`[m, k] @ [k, n]` in the GEMM dtype of the model; `replicate` numbers the runs (engines)."""

    m: Ints
    n: Ints
    k: Ints
    seconds: Floats
    replicate: Ints


@dataclass(frozen=True)
class ElementwiseTable:
    """A memory-bound elementwise kernel by the bytes that it reads and writes."""

    bytes: Ints
    seconds: Floats


@dataclass(frozen=True)
class CollectiveTable:
    """A collective by the bytes of one rank's whole buffer."""

    degree: Ints
    bytes: Ints
    seconds: Floats


@dataclass(frozen=True)
class DecodeTable:
    """Decode attention of one layer: `sequences` tokens behind `context` tokens of KV each (their own included)."""

    q_heads: Ints
    kv_heads: Ints
    sequences: Ints
    context: Ints
    seconds: Floats
    replicate: Ints


@dataclass(frozen=True)
class PrefillTable:
    """Causal attention of one layer: one chunk of `tokens` behind `cached` tokens, with the heads of one GPU."""

    q_heads: Ints
    kv_heads: Ints
    tokens: Ints
    cached: Ints
    seconds: Floats
    replicate: Ints


@dataclass(frozen=True)
class MixedTable:
    """One attention call of a layer over both phases: a chunk of `tokens` behind `cached` ones beside `sequences`.

    Each of the sequences has `context` tokens of KV. Where a side is 0 the phase is absent: its rows tell the parts.
    """

    tokens: Ints
    cached: Ints
    sequences: Ints
    context: Ints
    seconds: Floats


@dataclass(frozen=True)
class StageTable:
    """A stage of one layer (linear, exchange) or of one pass (head) by tokens, on groups of `tp` GPUs."""

    tp: Ints
    sp: Ints
    tokens: Ints
    seconds: Floats


@dataclass(frozen=True)
class Measurements:
    """All tables of one source for one model on one GPU type, with the source's own account of itself."""

    provenance: dict[str, Any]
    decode: DecodeTable
    prefill: PrefillTable
    gemm: GemmTable | None = None
    head_gemm: GemmTable | None = None  # GEMMs in the activations' dtype, where the layers' are in another
    elementwise: ElementwiseTable | None = None
    collectives: dict[str, CollectiveTable] = field(default_factory=dict)  # all_to_all, all_reduce, all_gather
    linear: StageTable | None = None  # whole stages, as ranks run them
    exchange: StageTable | None = None  # both all-to-alls with packing, by shard tokens
    head: StageTable | None = None
    mixed: MixedTable | None = None  # both phases in one attention call
    transfer: CollectiveTable | None = None  # KV received by one GPU of a group of `degree` groups, by bytes a layer
    iteration_overhead_s: float = 0.002
    sequence_overhead_s: float = 3.7e-5
    prefill_slowdown: float | None = None  # measured g_p
    decode_slowdown: float | None = None  # measured g_d
