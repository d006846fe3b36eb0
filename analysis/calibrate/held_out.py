"""Errors of a profile fitted to real ranks: stages predicted from other sizes, and whole iterations held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.calibrate.measurements import CollectiveTable, Floats, Measurements
from analysis.calibrate.rounds import Cell, Raw
from analysis.calibrate.smooth import error_summary, monotone
from analysis.calibrate.transfers import moves_in_line, robust_line, transfer_measured
from confsim.latency.base import LatencyModel
from confsim.latency.curve import rounded
from confsim.latency.profile import Profile
from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from confsim.run.request import Request
from confsim.schemes.cost import CoBatchCost, beside
from confsim.schemes.rank_rules import RankRules
from confsim.specs import GpuSpec, ModelSpec

HELD_OUT = "mixed"


def with_errors(profile: Profile, data: Measurements, raw: Raw, model: ModelSpec, gpu: GpuSpec) -> Profile:
    """The profile with errors of whole stages, each size predicted from the others, and of mixed iterations.

    `replicates` compares the medians of even and odd rounds: the noise floor of a median. `single` compares single
    iterations with their cell's median.
    """
    profile = replace(profile, mixed_overhead_s=_mixed_overhead(profile, raw, model, gpu))
    errors = {
        **profile.errors,
        **{name: kinds for name, kinds in _stage_errors(data, raw, model).items() if kinds["held_out"]["rows"]},
        "pure_iterations": _iteration_errors(profile, raw.of("prefill", "decode"), model, gpu, raw),
        "mixed_iterations": _iteration_errors(profile, raw.of(HELD_OUT), model, gpu, raw),
    }
    for name, stage, part in (
        ("decode_attention", "decode_attention_s", "decode"),
        ("prefill_attention", "prefill_attention_s", "prefill"),
    ):
        errors[name] = {**errors[name], "replicates": _noise(raw.of(part), stage)}
    return replace(profile, errors=errors)


def _mixed_overhead(profile: Profile, raw: Raw, model: ModelSpec, gpu: GpuSpec) -> float:
    """What an iteration of both phases takes beyond what its parts add up to: the median over pairs, none negative.

    Host work of the second path, and caches that each path finds full of the other's data.
    """
    pairs = [cell for cell in raw.of("pair") if cell.kind != "mux"]
    if not pairs:
        return 0.0
    predict = _predictor(profile, model, gpu, raw)
    return rounded(max(0.0, float(np.median([cell.median("duration_s") - predict(cell) for cell in pairs]))))


def _stage_errors(data: Measurements, raw: Raw, model: ModelSpec) -> dict[str, dict[str, Any]]:
    tables = {"linear": data.linear, "exchange": data.exchange, "head": data.head}
    stages = {"linear": "linear_s", "exchange": "communication_s", "head": "head_s"}
    parts = {"linear": ("prefill", "decode"), "exchange": ("prefill",), "head": ("decode",)}
    points = {
        name: (table.tp * 1000 + table.sp if name == "exchange" else table.tp, table.tokens, table.seconds)
        for name, table in tables.items()
        if table is not None
    }
    errors = {
        name: {"held_out": leave_one_out(*columns), "replicates": _noise(raw.of(*parts[name]), stages[name])}
        for name, columns in points.items()
    }
    measured = transfer_measured(raw, model)
    if measured is not None:
        held_out = _line_left_out(measured) if moves_in_line(raw) else leave_one_out(*_columns(measured))
        errors["transfer"] = {"held_out": held_out, "replicates": _noise(raw.of("transfer"), "transfer_s")}
    return errors


def _columns(table: CollectiveTable) -> tuple[Any, Any, Floats]:
    return table.degree, table.bytes, table.seconds


def _line_left_out(table: CollectiveTable) -> dict[str, Any]:
    """Every size predicted by the line through the others of its degree."""
    predicted, measured = [], []
    for number in range(len(table.bytes)):
        rest = (table.degree == table.degree[number]) & (np.arange(len(table.bytes)) != number)
        if rest.sum() > 1:
            line = robust_line(table.bytes[rest], table.seconds[rest])
            predicted.append(float(line(table.bytes[number])))
            measured.append(float(table.seconds[number]))
    return error_summary(np.array(predicted), np.array(measured))


def leave_one_out(layout: Any, size: Any, seconds: Floats) -> dict[str, Any]:
    """Every inner size predicted from the other sizes of its layout."""
    predicted, measured = [], []
    for one in np.unique(layout):
        own = layout == one
        x, y = size[own].astype(np.float64), seconds[own]
        for value in np.unique(x)[1:-1]:
            rest = x != value
            where, times = monotone(x[rest], y[rest])
            predicted.append(np.full(int((~rest).sum()), np.interp(value, where, times)))
            measured.append(y[~rest])
    if not measured:
        return error_summary(np.zeros(0), np.zeros(0))
    return error_summary(np.concatenate(predicted), np.concatenate(measured))


def _noise(cells: list[Cell], name: str) -> dict[str, Any]:
    """Medians of even rounds against those of odd ones."""
    pairs = [cell.halves(name) for cell in cells if cell.median(name) > 0.0]
    if not pairs:
        return error_summary(np.zeros(0), np.zeros(0))
    first, second = np.array(pairs).T
    return error_summary(first, second)


def _iteration_errors(
    profile: Profile, cells: list[Cell], model: ModelSpec, gpu: GpuSpec, raw: Raw
) -> dict[str, dict[str, Any]]:
    """Whole iterations of `cells` as the profile predicts them."""
    cells = [cell for cell in cells if cell.kind != "mux"]
    predict = _predictor(profile, model, gpu, raw)
    predicted = np.array([predict(cell) for cell in cells])
    measured = np.array([cell.median("duration_s") for cell in cells])
    single = [np.abs(cell.seconds["duration_s"] / cell.median("duration_s") - 1.0) + 1.0 for cell in cells]
    spread = np.concatenate(single) if single else np.zeros(0)
    return {
        "held_out": error_summary(predicted, measured),
        "replicates": _noise(cells, "duration_s"),
        "single": error_summary(spread, np.ones(len(spread))),
    }


def _predictor(profile: Profile, model: ModelSpec, gpu: GpuSpec, raw: Raw) -> Callable[[Cell], float]:
    compiled: dict[tuple[int, int], LatencyModel] = {}

    def latency(tp: int, sp: int) -> LatencyModel:
        if (tp, sp) not in compiled:
            compiled[tp, sp] = profile.compile(model, gpu, tp, sp)
            compiled[tp, sp].mixed = profile.mixed
        return compiled[tp, sp]

    def seconds(cell: Cell) -> float:
        spread = cell.kind == "sp"
        cost = CoBatchCost(
            latency(cell.tp, cell.sp),
            beside,
            spread=latency(cell.tp * cell.sp, 1) if spread else None,
            joint_exchange=spread,
            one_kernel=cell.kind == "tp",
        )
        is_xp = cell.kind == "xp"
        return RankRules.of(raw.head["device"], is_xp, is_xp).apply(cost).timing(_plan(cell)).duration_s

    return seconds


def _plan(cell: Cell) -> IterationPlan:
    """The plan that a cell ran."""
    chunks = []
    for number, (tokens, cached) in enumerate(zip(cell.tokens, cell.cached, strict=True)):
        request = Request(number, 0.0, cached + tokens)
        share, rest = divmod(tokens, cell.sp)
        shards = tuple(share + ((group + number) % cell.sp < rest) for group in range(cell.sp))
        chunks.append(PrefillChunk(request, cached, shards, cell.last, 0 if cell.last else -1))
    context = round(cell.context_tokens)
    if cell.kind == "sp":
        return IterationPlan(tuple(chunks), (DecodeBatch(0, cell.sequences * cell.sp, context * cell.sp),))
    batches = tuple(
        DecodeBatch(group, cell.sequences, context) if group < cell.busy_groups else DecodeBatch(group)
        for group in range(cell.sp)
    )
    return IterationPlan(tuple(chunks), batches)
