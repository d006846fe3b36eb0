"""Putting kernels together into the stages of a layer: which GEMMs, which elementwise bytes, which collectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.calibrate.gemm import GemmSurface
from analysis.calibrate.measurements import CollectiveTable, ElementwiseTable
from analysis.calibrate.smooth import Floats, error_summary, monotone
from confsim.errors import InputError
from confsim.latency.curve import Curve, curve_of
from confsim.parallel import all_reduce_bytes, kv_token_bytes, output_exchange_bytes, qkv_exchange_bytes
from confsim.specs import ModelSpec

# Tokens at which stage tables are kept; between them times are linear.
TOKENS = np.concatenate(
    [
        [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224],
        [256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 2816],
        [3072, 3328, 3584, 3840, 4096, 4608, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 24576, 32768],
    ]
).astype(np.float64)

# Prompts are longer than chunks.
TRANSFER_TOKENS = np.concatenate([TOKENS, [49152, 65536, 98304, 131072]]).astype(np.float64)


def gemm_shapes(model: ModelSpec, tp: int) -> dict[str, tuple[int, int]]:
    """(n, k) of the four GEMMs of a layer on one GPU of a `tp` group; KV projections replicated where heads are."""
    split, _ = model.split_heads(tp)
    q, kv = split.q_heads * model.head_dim, split.kv_heads * model.head_dim
    width = model.intermediate_size // tp
    return {
        "qkv": (q + 2 * kv, model.hidden_size),
        "o": (model.hidden_size, q),
        "gate_up": (2 * width, model.hidden_size),
        "down": (model.hidden_size, width),
    }


def elementwise_bytes(model: ModelSpec, tp: int) -> dict[str, list[int]]:
    """Bytes a token that each memory-bound kernel of a layer reads and writes, by term, one entry a kernel."""
    split, _ = model.split_heads(tp)
    b, d, hidden = model.itemsize, model.head_dim, model.hidden_size
    heads = (split.q_heads + split.kv_heads) * d
    width = model.intermediate_size // tp
    terms = {
        "norms": [4 * hidden * b] * 2,  # residual in and out, activation in and out
        "rope": [2 * heads * b],
        "kv_append": [2 * split.kv_heads * d * (b + model.kv_itemsize)],
        "silu_mul": [3 * width * b],
    }
    if model.qk_norm:
        terms["qk_norm"] = [2 * heads * b]
    if model.gemm_itemsize < b:
        inputs = (hidden, split.q_heads * d, hidden, width)
        terms["quantise"] = [size * (b + model.gemm_itemsize) for size in inputs]
    return terms


class Elementwise:
    """Seconds of a memory-bound kernel by its bytes."""

    def __init__(self, table: ElementwiseTable) -> None:
        self.bytes, self.times = monotone(table.bytes.astype(np.float64), table.seconds)

    def __call__(self, size: Floats) -> Floats:
        """Interpolated on log scales; beyond the largest at its bandwidth."""
        inside = np.exp(np.interp(np.log(size), np.log(self.bytes), np.log(self.times)))
        return np.asarray(inside * np.maximum(size / self.bytes[-1], 1.0), dtype=np.float64)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the largest kernel measured."""
        return float(self.bytes[-1] / self.times[-1])


class Collective:
    """Seconds of a collective by the bytes of a rank's buffer, for each degree; the faster of several tables."""

    def __init__(self, *tables: CollectiveTable) -> None:
        self.tables = tables

    def degrees(self) -> set[int]:
        """Degrees that every table measured."""
        return set.intersection(*({int(value) for value in np.unique(table.degree)} for table in self.tables))

    def __call__(self, degree: int, size: Floats) -> Floats:
        """Seconds, non-decreasing in the bytes; linear between measurements, the last bandwidth beyond."""
        options = []
        for table in self.tables:
            rows = table.degree == degree
            if not rows.any():
                raise InputError(f"no collective was measured over {degree} GPUs: use 2, 4 or 8")
            where, times = monotone(table.bytes[rows].astype(np.float64), table.seconds[rows])
            options.append(np.interp(size, where, times) * np.maximum(size / where[-1], 1.0))
        return np.asarray(np.minimum.reduce(options), dtype=np.float64)

    def curve(self, degree: int, tokens: Floats, token_bytes: float, times: float = 1.0) -> Curve:
        """Seconds of `times` such collectives by tokens of `token_bytes` each, as far as sizes were measured."""
        most = min(float(table.bytes[table.degree == degree].max(initial=0)) for table in self.tables)
        inside = tokens[tokens * token_bytes <= max(most, token_bytes * tokens[0])]
        return curve_of(inside, times * self(degree, inside * token_bytes))

    def held_out(self) -> dict[str, Any]:
        """Every inner size predicted from its neighbours, all degrees."""
        predicted, measured = [], []
        for table in self.tables:
            for degree in np.unique(table.degree):
                rows = table.degree == degree
                size, seconds = table.bytes[rows].astype(np.float64), table.seconds[rows]
                for value in np.unique(size)[1:-1]:
                    rest = size != value
                    where, times = monotone(size[rest], seconds[rest])
                    predicted.append(np.full((~rest).sum(), np.interp(value, where, times)))
                    measured.append(seconds[~rest])
        return error_summary(np.concatenate(predicted), np.concatenate(measured))

    def noise(self) -> dict[str, Any]:
        """How far repeated measurements of the same size are apart."""
        first, second = [], []
        for table in self.tables:
            key = table.degree * 2**40 + table.bytes
            order = np.argsort(key, kind="stable")
            same = key[order][1:] == key[order][:-1]
            first.append(table.seconds[order][:-1][same])
            second.append(table.seconds[order][1:][same])
        return error_summary(np.concatenate(first), np.concatenate(second))


def linear_terms(
    model: ModelSpec, tp: int, surface: GemmSurface, elementwise: Elementwise, all_reduce: Collective | None
) -> dict[str, Curve]:
    """Terms of the linear stage of a layer by the tokens stacked on a group."""
    terms: dict[str, Curve] = {}
    for name, (n, k) in gemm_shapes(model, tp).items():
        terms[name] = _gemm_curve(surface, n, k, TOKENS)
    sizes = elementwise_bytes(model, tp)
    quantise = sizes.pop("quantise", [])
    terms["elementwise"] = curve_of(TOKENS, sum_of(elementwise, [size for part in sizes.values() for size in part]))
    if quantise:
        terms["quantise"] = curve_of(TOKENS, sum_of(elementwise, quantise))
    if tp > 1 and all_reduce is not None:
        terms["all_reduce"] = all_reduce.curve(tp, TOKENS, _reduced(model), times=2.0)
    return terms


def _gemm_curve(surface: GemmSurface, n: float, k: float, tokens: Floats) -> Curve:
    """A GEMM at `tokens`, and at both sides of every step in between."""
    steps = surface.steps[surface.steps < tokens[-1]]
    tokens = np.unique(np.concatenate([tokens, steps, steps + 1.0]))
    times = np.exp(np.interp(np.log(tokens), np.log(surface.m_grid), np.log(surface.seconds(n, k))))
    return curve_of(tokens, times)


def _reduced(model: ModelSpec) -> int:
    return all_reduce_bytes(1, model.hidden_size, model.itemsize)


def sum_of(elementwise: Elementwise, sizes: list[int]) -> Floats:
    """Seconds of one kernel a size, at `TOKENS`."""
    return np.asarray(sum(elementwise(TOKENS * size) for size in sizes), dtype=np.float64)


def once_terms(model: ModelSpec, tp: int, elementwise: Elementwise, all_reduce: Collective | None) -> dict[str, Curve]:
    """Paid once a pass by the stacked tokens: reading the embedding rows, and their all-reduce over TP."""
    size = 2 * model.hidden_size * model.itemsize
    terms = {"embedding": curve_of(TOKENS, elementwise(TOKENS * size))}
    if tp > 1 and all_reduce is not None:
        terms["all_reduce"] = all_reduce.curve(tp, TOKENS, _reduced(model))
    return terms


def head_terms(
    model: ModelSpec, tp: int, surface: GemmSurface, elementwise: Elementwise, all_gather: Collective | None
) -> dict[str, Curve]:
    """LM head of a pass by the tokens that need logits: final norm, GEMM (in the activations' dtype), gather over TP.

    A vocabulary wider than the widest GEMM measured keeps that one's ratio to the roof.
    """
    tokens = TOKENS[TOKENS <= 4096]
    gemm = _gemm_curve(surface, model.vocab_size / tp, model.hidden_size, tokens)
    terms = {"gemm": gemm, "norm": curve_of(tokens, elementwise(tokens * 4 * _reduced(model)))}
    if tp > 1 and all_gather is not None:
        terms["gather"] = all_gather.curve(tp, tokens, model.vocab_size * model.itemsize)
    return terms


def exchange_terms(
    model: ModelSpec, tp: int, sp: int, all_to_all: Collective, elementwise: Elementwise
) -> dict[str, Curve]:
    """Both all-to-alls of a layer by the largest shard, and packing and unpacking each (read and write)."""
    heads, kv, d, b = model.num_attention_heads, model.num_key_value_heads, model.head_dim, model.itemsize
    first = qkv_exchange_bytes(1, heads, kv, d, b, tp, sp)
    second = output_exchange_bytes(1, heads, d, b, tp)
    pack = sum(2.0 * elementwise(TOKENS * 2 * size) for size in (first, second))
    return {
        "qkv": all_to_all.curve(sp, TOKENS, first),
        "output": all_to_all.curve(sp, TOKENS, second),
        "pack": curve_of(TOKENS, np.asarray(pack)),
    }


def missing_kv_bytes(model: ModelSpec, tp: int, sp: int) -> float:
    """Bytes a token and layer that a GPU of the decode group lacks after a prefill: one replica of each other head."""
    local, shared = model.split_heads(tp, sp)
    lacking = local.kv_heads - shared.kv_heads
    return float(kv_token_bytes(lacking, model.head_dim, 1, model.kv_itemsize))


def transfer_curve(model: ModelSpec, tp: int, sp: int, receive: Collective) -> Curve:
    """Seconds a layer to gather a prompt's KV on one group: what each of its GPUs receives, at the all-to-all's rate.

    In an all-to-all over P ranks a buffer of S bytes brings S * (P - 1) / P into each rank; the transfer of a layer
    takes as long as the all-to-all that brings as much. Derived: many-to-one was not measured.
    """
    missing = missing_kv_bytes(model, tp, sp)
    if not missing:
        return curve_of(TRANSFER_TOKENS, np.zeros(len(TRANSFER_TOKENS)))
    return receive.curve(sp, TRANSFER_TOKENS, missing * sp / (sp - 1))
