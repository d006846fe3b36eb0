"""Measurements in, profile out."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from analysis.calibrate import attention, stages
from analysis.calibrate.gemm import GemmSurface, Roof, noise_floor
from analysis.calibrate.measurements import Measurements, StageTable
from analysis.calibrate.mixed import fit_mixed
from analysis.calibrate.smooth import monotone
from confsim.errors import InputError
from confsim.latency.curve import Curve, curve_of
from confsim.latency.mixed import MixedAttention
from confsim.latency.profile import MODEL_FIELDS, Profile
from confsim.specs import GpuSpec, ModelSpec

DEGREES = (1, 2, 4, 8)
MOST_GPUS = 8
# Rows of a GEMM at which its surface is kept.
ROWS = np.unique(np.concatenate([stages.TOKENS, np.array([4352.0, 3.0, 5.0, 12.0, 20.0, 40.0])]))


def layouts(model: ModelSpec) -> list[tuple[int, int]]:
    """Every (tp, sp) of powers of two up to 8 GPUs that the head rule and the FFN width allow."""
    allowed = []
    for tp in DEGREES:
        for sp in DEGREES:
            if tp * sp > MOST_GPUS or model.intermediate_size % tp:
                continue
            try:
                model.split_heads(tp, sp)
            except InputError:
                continue
            allowed.append((tp, sp))
    return allowed


def _measured(data: Measurements, tp: int, sp: int) -> bool:
    """Whether a layout can be fitted: kernels cover all, whole stages those that ran."""
    if data.linear is None or data.gemm is not None:
        return True
    table = data.linear if sp == 1 or data.exchange is None else data.exchange
    return bool(((table.tp == tp) & (table.sp == sp)).any())


class _Kernels:
    """Stages from kernels, with what they share."""

    def __init__(self, data: Measurements, model: ModelSpec, gpu: GpuSpec) -> None:
        if data.gemm is None or data.elementwise is None:
            raise InputError("these measurements have neither whole linear stages nor GEMMs with elementwise kernels")
        scale = model.itemsize / model.gemm_itemsize
        roof = Roof(gpu.flops * scale, gpu.memory_bandwidth, model.gemm_itemsize)
        self.surface = GemmSurface(data.gemm, roof, ROWS)
        self.head = self.surface
        if data.head_gemm is not None:
            self.head = GemmSurface(data.head_gemm, Roof(gpu.flops, gpu.memory_bandwidth, model.itemsize), ROWS)
        self.elementwise = stages.Elementwise(data.elementwise)
        self.all_reduce = self._collective(data, "all_reduce", "custom_all_reduce")
        self.all_gather = self._collective(data, "all_gather")
        self.all_to_all = self._collective(data, "all_to_all")

    @staticmethod
    def _collective(data: Measurements, *names: str) -> stages.Collective | None:
        tables = [data.collectives[name] for name in names if name in data.collectives]
        return stages.Collective(*tables) if tables else None


def fit(data: Measurements, model: ModelSpec, gpu: GpuSpec) -> Profile:
    """Fit every layout of the model on the GPU from one source's measurements.

    Raises:
        InputError: where a component has no measurements, or heads were not measured.
    """
    allowed = [pair for pair in layouts(model) if _measured(data, *pair)]
    if not allowed:
        raise InputError(f"these measurements cover no layout that model {model.name} can have")
    degrees = sorted({tp for tp, _ in allowed})
    kernels = None if data.linear is not None and data.head is not None else _Kernels(data, model, gpu)
    heads = {degree: _local(model, degree) for degree in sorted({tp * sp for tp, sp in allowed})}
    errors = _errors(data, kernels, model, gpu, list(heads.values()))
    data, filled = _with_heads(data, [_local(model, tp) for tp in degrees], list(heads.values()))
    law = _law(data, model, gpu)
    mixed = _mixed(data, model, gpu)
    if mixed is not None:
        errors["mixed_attention"] = mixed.data["errors"]
    return Profile(
        model={"name": model.name, **{key: asdict(model)[key] for key in MODEL_FIELDS}},
        gpu=gpu.name,
        linear={tp: _linear(data, kernels, model, tp) for tp in degrees},
        once={tp: _once(kernels, model, tp) for tp in degrees},
        head={tp: _head(data, kernels, model, tp) for tp in degrees},
        decode={tp: attention.fit_decode(data.decode, *_local(model, tp)) for tp in degrees},
        prefill=_prefill(data, law, model, gpu, heads),
        exchange={pair: _exchange(data, kernels, model, *pair) for pair in allowed if pair[1] > 1},
        transfer={pair: _transfer(data, kernels, model, *pair) for pair in allowed if pair[1] > 1},
        iteration_overhead_s=data.iteration_overhead_s,
        sequence_overhead_s=data.sequence_overhead_s,
        prefill_slowdown=data.prefill_slowdown,
        decode_slowdown=data.decode_slowdown,
        mixed=mixed,
        provenance=_provenance(data, law, heads, filled),
        errors=errors,
    )


def _local(model: ModelSpec, degree: int) -> tuple[int, int]:
    split, _ = model.split_heads(degree)
    return split.q_heads, split.kv_heads


def _stage(table: StageTable, tp: int, sp: int | None = None) -> Curve | None:
    rows = (table.tp == tp) if sp is None else (table.tp == tp) & (table.sp == sp)
    if not rows.any():
        return None
    return curve_of(*monotone(table.tokens[rows].astype(np.float64), table.seconds[rows]))


def _needed(kernels: _Kernels | None, stage: str, tp: int) -> _Kernels:
    """The kernels that a stage is put together from where it was not measured whole."""
    if kernels is None:
        raise InputError(f"the {stage} was not measured for tp={tp}: measure it or supply kernels")
    return kernels


def _linear(data: Measurements, kernels: _Kernels | None, model: ModelSpec, tp: int) -> dict[str, Curve]:
    stage = _stage(data.linear, tp) if data.linear is not None else None
    if stage is not None:
        return {"stage": stage}
    kernels = _needed(kernels, "linear stage", tp)
    return stages.linear_terms(model, tp, kernels.surface, kernels.elementwise, kernels.all_reduce)


def _once(kernels: _Kernels | None, model: ModelSpec, tp: int) -> dict[str, Curve]:
    if kernels is None:
        return {}
    return stages.once_terms(model, tp, kernels.elementwise, kernels.all_reduce)


def _head(data: Measurements, kernels: _Kernels | None, model: ModelSpec, tp: int) -> dict[str, Curve]:
    stage = _stage(data.head, tp) if data.head is not None else None
    if stage is not None:
        return {"stage": stage}
    kernels = _needed(kernels, "LM head", tp)
    return stages.head_terms(model, tp, kernels.head, kernels.elementwise, kernels.all_gather)


def _exchange(data: Measurements, kernels: _Kernels | None, model: ModelSpec, tp: int, sp: int) -> dict[str, Curve]:
    stage = _stage(data.exchange, tp, sp) if data.exchange is not None else None
    if stage is not None:
        return {"stage": stage}
    if kernels is None or kernels.all_to_all is None:
        raise InputError(f"the all-to-alls were not measured for {sp} groups of {tp} GPUs")
    return stages.exchange_terms(model, tp, sp, kernels.all_to_all, kernels.elementwise)


def _transfer(data: Measurements, kernels: _Kernels | None, model: ModelSpec, tp: int, sp: int) -> Curve:
    table = data.transfer
    if table is not None and (table.degree == sp).any():
        return stages.Collective(table).curve(sp, stages.TRANSFER_TOKENS, stages.missing_kv_bytes(model, tp, sp))
    if not stages.missing_kv_bytes(model, tp, sp):
        return curve_of(stages.TRANSFER_TOKENS, np.zeros(len(stages.TRANSFER_TOKENS)))  # every group holds all heads
    if kernels is None or kernels.all_to_all is None:
        raise InputError(f"the KV transfer was not measured for {sp} groups")
    return stages.transfer_curve(model, tp, sp, kernels.all_to_all)


def _with_heads(
    data: Measurements, decodes: list[tuple[int, int]], prefills: list[tuple[int, int]]
) -> tuple[Measurements, dict[str, Any]]:
    """Measurements with rows for every head count of each phase, and which were interpolated."""
    decode, decode_filled = attention.with_heads(data.decode, decodes)
    prefill, prefill_filled = attention.with_heads(data.prefill, prefills)
    filled = {"decode_attention": decode_filled, "prefill_attention": prefill_filled}
    return replace(data, decode=decode, prefill=prefill), {key: value for key, value in filled.items() if value}


def _law(data: Measurements, model: ModelSpec, gpu: GpuSpec) -> attention.PrefillLaw | None:
    """The law for prefixes, unless the source measured them."""
    rows = attention.law_rows(data.prefill)
    if (data.prefill.cached > 0).any() or len(rows[0]) < 5:
        return None
    return attention.PrefillLaw(rows, model.head_dim, gpu.sms)


def _prefill(
    data: Measurements,
    law: attention.PrefillLaw | None,
    model: ModelSpec,
    gpu: GpuSpec,
    heads: dict[int, tuple[int, int]],
) -> dict[int, Any]:
    bandwidth = _bandwidth(data, gpu)
    tables = {}
    for degree, (q_heads, kv_heads) in heads.items():
        read = 2.0 * kv_heads * model.head_dim * model.kv_itemsize / bandwidth
        tables[degree] = attention.fit_prefill(data.prefill, law, q_heads, kv_heads, read)
    return tables


def _bandwidth(data: Measurements, gpu: GpuSpec) -> float:
    if data.elementwise is None:
        return gpu.memory_bandwidth
    return stages.Elementwise(data.elementwise).bandwidth


def _mixed(data: Measurements, model: ModelSpec, gpu: GpuSpec) -> MixedAttention | None:
    if data.mixed is None:
        return None
    about = {"gpu": gpu.name, "model": model.name, "source": data.provenance.get("source")}
    return MixedAttention(fit_mixed(data.mixed, about), "measured mixed attention")


def _provenance(
    data: Measurements,
    law: attention.PrefillLaw | None,
    heads: dict[int, tuple[int, int]],
    filled: dict[str, Any],
) -> dict[str, Any]:
    derived = [] if law is None else ["prefill_attention.cached_token (from a law: no cached prefix was measured)"]
    if data.transfer is None:
        derived.append("transfer (from the all-to-all's receive rate)")
    if data.prefill_slowdown is None:
        derived.append("slowdowns (from latency.decode_sm_share)")
    return {
        **data.provenance,
        "local_heads": {str(degree): f"{q}/{kv}" for degree, (q, kv) in heads.items()},
        "ranges": {
            "linear_tokens": [1, int(stages.TOKENS[-1])],
            "decode_sequences": [int(data.decode.sequences.min()), int(data.decode.sequences.max())],
            "decode_context_each": [int(data.decode.context.min()), int(data.decode.context.max())],
            "prefill_tokens": [int(data.prefill.tokens.min()), int(data.prefill.tokens.max())],
            "prefill_cached_tokens": [int(data.prefill.cached.min()), int(data.prefill.cached.max())],
        },
        "derived": derived,
        "interpolated_heads": filled,
        "prefill_law": None if law is None else law.summary,
    }


def _known(data: Measurements, heads: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The model's head counts that were measured in both phases, or else in each of them."""
    decode, prefill = attention.measured_heads(data.decode), attention.measured_heads(data.prefill)
    if not decode & prefill:
        return sorted(decode), sorted(prefill)
    both = [pair for pair in heads if pair in decode & prefill] or [max(decode & prefill)]
    return both, both


def _errors(
    data: Measurements, kernels: _Kernels | None, model: ModelSpec, gpu: GpuSpec, heads: list[tuple[int, int]]
) -> dict[str, Any]:
    """Held-out error of each component beside how far replicates are apart; percent of the measured time."""
    kv_heads = {kv for _, kv in heads}
    decodes, prefills = _known(data, heads)
    errors: dict[str, Any] = {
        "decode_attention": {
            "held_out": attention.decode_held_out(data.decode, decodes),
            "smoothing": attention.decode_in_sample(data.decode, decodes),
            "head_interpolation": attention.heads_held_out(data.decode, kv_heads),
            "replicates": attention.decode_noise(data.decode, decodes),
        },
        "prefill_attention": {
            "held_out": attention.prefill_held_out(data.prefill, prefills),
            "law": attention.law_held_out(data.prefill, model.head_dim, gpu.sms, prefills),
            "head_interpolation": attention.heads_held_out(data.prefill, kv_heads),
            "replicates": attention.prefill_noise(data.prefill, prefills),
        },
    }
    if kernels is None or data.gemm is None:
        return errors
    errors["gemm"] = {
        **kernels.surface.held_out(1024, 16384),
        "smoothing": kernels.surface.in_sample(1024, 16384),
        "replicates": noise_floor(data.gemm, 1024, 16384),
    }
    for name in ("all_to_all", "all_reduce", "all_gather"):
        collective = getattr(kernels, name)
        if collective is not None:
            errors[name] = {"held_out": collective.held_out(), "replicates": collective.noise()}
    return errors
