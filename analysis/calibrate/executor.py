"""Source `executor`: whole stages as real ranks ran them, from the Parquet files that `confsim profile` wrote.

Each cell (one plan) was measured once a round; its time is the median over rounds, and the medians of even and of odd
rounds tell how far repeated measurements are apart. Cells in which both phases ran are held out of every table; the
fitted profile predicts them as whole iterations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.calibrate.measurements import (
    CollectiveTable,
    DecodeTable,
    Floats,
    Ints,
    Measurements,
    PrefillTable,
    StageTable,
)
from analysis.calibrate.smooth import error_summary, monotone
from confsim.errors import InputError
from confsim.latency.base import LatencyModel
from confsim.latency.curve import rounded
from confsim.latency.profile import Profile
from confsim.parallel import kv_token_bytes
from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from confsim.run.request import Request
from confsim.schemes.cost import CoBatchCost, in_turn, overlapped
from confsim.specs import GpuSpec, ModelSpec

FORMAT = 2
STAGES = ("linear_s", "prefill_attention_s", "decode_attention_s", "communication_s", "head_s", "transfer_s")
TIMES = ("duration_s", *STAGES, "overhead_s")
HELD_OUT = "mixed"
COMMON = ("model", "gpu")  # of all layouts in a folder
LEAST_SHARE = 0.05  # a time read off outside the measured contexts is no smaller a share of the least measured one


@dataclass(frozen=True)
class Cell:
    """One plan on one layout: `seconds[name]` by round (positions of `rounds`), and the context of each round."""

    part: str
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
        InputError: where there is no profile in it, or two of different models or GPUs.
    """
    files = sorted(folder.glob("*/profile.json")) or sorted(folder.glob("profile.json"))
    if not files:
        raise InputError(f"profile={folder}: no profile.json below it, run `confsim profile output={folder}` first")
    heads = [read_head(file) for file in files]
    for file, head in zip(files, heads, strict=True):
        for key in COMMON:
            if head[key] != heads[0][key]:
                raise InputError(f"{file}: measured another {key} than {files[0]}: keep one a folder")
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


def specs(folder: Path) -> tuple[ModelSpec, GpuSpec]:
    """Model and GPU that a folder's profile was measured for."""
    head = read(folder).head
    return ModelSpec(**head["model"]), GpuSpec(**head["gpu"])


# Tables --------------------------------------------------------------------------------------------------------------


def load(model: ModelSpec, gpu: GpuSpec, folder: Path) -> Measurements:
    """The tables of a profile's folder: whole stages.

    Raises:
        InputError: where the folder holds no profile, or lacks a component.
    """
    raw = read(folder)
    prefill, decode = raw.of("prefill"), raw.of("decode")
    if not prefill or not decode:
        raise InputError(f"profile={folder}: holds no prefill or no decode cells, measure again")
    layers = model.num_hidden_layers
    overhead, sequence = _overheads(decode)
    slowdowns = _slowdowns(raw)
    return Measurements(
        provenance=_provenance(raw, folder),
        linear=_stage(_linear_points(prefill, decode), layers),
        exchange=_stage([(c, c.shard_tokens, c.median("communication_s")) for c in _own(prefill) if c.sp > 1], layers),
        head=_stage([(c, c.sequences, c.median("head_s")) for c in decode], 1),
        transfer=_transfer(raw, model),
        decode=_decode(decode, model),
        prefill=_prefill(prefill, model, overhead + sequence),
        iteration_overhead_s=overhead,
        sequence_overhead_s=sequence,
        prefill_slowdown=slowdowns[0],
        decode_slowdown=slowdowns[1],
    )


Point = tuple[Cell, int, float]  # tokens, seconds of a pass


def _own(prefill: list[Cell]) -> list[Cell]:
    """Chunks without a cached prefix."""
    return [cell for cell in prefill if not cell.cached[0]]


def _linear_points(prefill: list[Cell], decode: list[Cell]) -> list[Point]:
    """Decodes as far as they go, chunks beyond: few tokens are mostly decodes, whose weights are in the caches."""
    most = max(cell.sequences for cell in decode)
    chunks = [(c, c.shard_tokens, c.median("linear_s")) for c in prefill if c.shard_tokens > most]
    return chunks + [(cell, cell.sequences, cell.median("linear_s")) for cell in decode]


def _stage(points: list[Point], layers: int) -> StageTable | None:
    if not points:
        return None
    return StageTable(
        tp=np.array([cell.tp for cell, _, _ in points]),
        sp=np.array([cell.sp for cell, _, _ in points]),
        tokens=np.array([tokens for _, tokens, _ in points]),
        seconds=np.array([seconds for _, _, seconds in points]) / layers,
    )


def _transfer(raw: Raw, model: ModelSpec) -> CollectiveTable | None:
    """As measured, or where ranks move KV themselves a line through the differences, which are small and noisy."""
    table = _transfer_measured(raw, model)
    if table is None or not _moves_in_line(raw):
        return table
    seconds = table.seconds.copy()
    for degree in np.unique(table.degree):
        own = table.degree == degree
        seconds[own] = robust_line(table.bytes[own], seconds[own])(table.bytes[own])
    return replace(table, seconds=seconds)


def _transfer_measured(raw: Raw, model: ModelSpec) -> CollectiveTable | None:
    """What one GPU of the receiving group lacks, in bytes a layer, and how long it takes."""
    degree, size, seconds = [], [], []
    for cell in raw.of("transfer"):
        local, shared = model.split_heads(cell.tp, cell.sp)
        lacking = kv_token_bytes(local.kv_heads - shared.kv_heads, model.head_dim, 1, model.kv_itemsize)
        if lacking:
            degree.append(cell.sp)
            size.append(cell.tokens[0] * lacking)
            seconds.append(_added(raw, cell) if _moves_in_line(raw) else cell.median("transfer_s"))
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


def _moves_in_line(raw: Raw) -> bool:
    """Whether moving KV lengthens an iteration: on CPU the rank itself does it."""
    return bool(raw.head["device"]["kind"] == "cpu")


def _added(raw: Raw, cell: Cell) -> float:
    """What the end of a prompt adds to its last chunk beside the head: round by round, so that drift cancels."""
    same = {"tokens": cell.tokens, "cached": cell.cached, "kind": cell.kind, "tp": cell.tp, "sp": cell.sp}
    alone = next((c for c in raw.of("prefill") if all(getattr(c, key) == value for key, value in same.items())), None)
    if alone is None or len(alone.rounds) != len(cell.rounds):
        return cell.median("transfer_s")
    heads = [c.median("head_s") for c in raw.of("decode") if c.sequences == 1 and (c.tp, c.sp) == (cell.tp, cell.sp)]
    added = cell.seconds["duration_s"][np.argsort(cell.rounds)] - alone.seconds["duration_s"][np.argsort(alone.rounds)]
    return max(float(np.median(added)) - float(np.median(heads or [0.0])), cell.median("transfer_s"))


def _decode(cells: list[Cell], model: ModelSpec) -> DecodeTable:
    """On a grid of contexts: decodes grow while they are measured, so each row is read off at the grid's contexts."""
    rows: list[tuple[int, int, int, int, float]] = []
    for tp, sp in sorted({(cell.tp, _decode_degree(cell)) for cell in cells}):
        split, _ = model.split_heads(tp * sp)
        some = [cell for cell in cells if cell.tp == tp and _decode_degree(cell) == sp]
        contexts = _common_contexts(some)
        for sequences in sorted({cell.sequences for cell in some}):
            own = sorted((c for c in some if c.sequences == sequences), key=lambda c: c.context_tokens)
            x = np.array([cell.context_tokens / sequences for cell in own])
            y = np.array([cell.median("decode_attention_s") for cell in own]) / model.num_hidden_layers
            at = contexts[: len(x) + 1]
            for context, seconds in zip(at, _read_off(x, y, at), strict=True):
                rows.append((split.q_heads, split.kv_heads, sequences, int(context), seconds))
    q_heads, kv_heads, counts, context_each, times = (np.array(column) for column in zip(*rows, strict=True))
    return DecodeTable(q_heads, kv_heads, counts, context_each, times, np.zeros(len(rows), dtype=np.int64))


def _decode_degree(cell: Cell) -> int:
    """Groups that share the heads of a decode: all of them where decodes are spread."""
    return cell.sp if cell.kind == "sp" else 1


def _common_contexts(cells: list[Cell]) -> Floats:
    """1, to which every row is continued, and those of the fewest decodes, which were measured at every level."""
    least = min(cell.sequences for cell in cells)
    contexts = sorted(round(c.context_tokens / least) for c in cells if c.sequences == least)
    return np.array([1, *contexts], dtype=np.float64)


def _read_off(x: Floats, y: Floats, at: Floats) -> list[float]:
    """Piecewise linear through the points, along the nearest piece outside them, never near or below 0."""
    if len(x) < 2:
        return [float(y[0])] * len(at)
    piece = np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2)
    slope = (y[piece + 1] - y[piece]) / (x[piece + 1] - x[piece])
    found: list[float] = np.maximum(y[piece] + slope * (at - x[piece]), LEAST_SHARE * y.min()).tolist()
    return found


def _prefill(cells: list[Cell], model: ModelSpec, overhead_s: float) -> PrefillTable:
    """Chunks of one prompt, with what else their path takes: skew between ranks, and host work beyond `overhead_s`.

    Waiting for another rank shows in the communication stage; behind a prefix the exchange is no larger than without
    one, so more of it is skew.
    """
    rows: list[tuple[int, int, int, int, float]] = []
    exchange = {(c.tp, c.sp, c.tokens): c.median("communication_s") for c in _own(cells)}
    for cell in cells:
        split, _ = model.split_heads(cell.tp * cell.sp)
        seconds = cell.median("prefill_attention_s") + max(0.0, cell.median("overhead_s") - overhead_s)
        if cell.cached[0]:
            alone = exchange.get((cell.tp, cell.sp, cell.tokens), np.inf)
            seconds += max(0.0, cell.median("communication_s") - alone)
        rows.append((split.q_heads, split.kv_heads, cell.tokens[0], cell.cached[0], seconds / model.num_hidden_layers))
    q_heads, kv_heads, tokens, cached, times = (np.array(column) for column in zip(*rows, strict=True))
    return PrefillTable(q_heads, kv_heads, tokens, cached, times, np.zeros(len(rows), dtype=np.int64))


def _overheads(cells: list[Cell]) -> tuple[float, float]:
    """Host seconds of an iteration and of a sequence, by least squares over the medians of decodes; none negative."""
    sequences = np.array([cell.sequences * cell.busy_groups for cell in cells], dtype=np.float64)
    seconds = np.array([cell.median("overhead_s") for cell in cells])
    slope, constant = np.polyfit(sequences, seconds, 1)
    if slope <= 0.0:
        return float(seconds.mean()), 0.0
    return max(float(constant), 0.0), float(slope)


def _slowdowns(raw: Raw) -> tuple[float, float]:
    """How much longer each attention path takes beside the other; 1 where paths run in turn, as then nothing slows."""
    pairs = raw.of("pair")
    if not pairs or raw.head["device"].get("overlap", "turn") == "turn":
        return 1.0, 1.0
    alone_prefill = {(c.sp, c.tokens, c.cached): c.median("prefill_attention_s") for c in raw.of("prefill")}
    decodes = raw.of("decode")
    prefill, decode = [], []
    for cell in pairs:
        if (cell.sp, cell.tokens, cell.cached) in alone_prefill:
            alone_s = alone_prefill[cell.sp, cell.tokens, cell.cached]
            prefill.append(cell.median("prefill_attention_s") / alone_s)
        near = [c for c in decodes if c.sp == cell.sp and c.sequences == cell.sequences]
        if near:
            same = min(near, key=lambda c: abs(c.context_tokens - cell.context_tokens))
            decode.append(cell.median("decode_attention_s") / same.median("decode_attention_s"))
    return max(1.0, float(np.median(prefill or [1.0]))), max(1.0, float(np.median(decode or [1.0])))


def _provenance(raw: Raw, folder: Path) -> dict[str, Any]:
    return {
        "source": "executor",
        "folder": folder.name,
        "layouts": [head["layout"] for head in raw.heads],
        "device": raw.head["device"],
        "ranks": raw.head.get("ranks", []),
        "cells": len(raw.cells),
        "rounds": int(max(len(cell.rounds) for cell in raw.cells)),
        "overlap": raw.head["device"].get("overlap", "turn"),
    }


def _mixed_overhead(profile: Profile, raw: Raw, model: ModelSpec, gpu: GpuSpec) -> float:
    """What an iteration of both phases takes beyond what its parts add up to: the median over pairs, none negative.

    Host work of the second path, and caches that each path finds full of the other's data.
    """
    pairs = [cell for cell in raw.of("pair") if cell.kind != "mux"]
    if not pairs:
        return 0.0
    predict = _predictor(profile, model, gpu, raw)
    return rounded(max(0.0, float(np.median([cell.median("duration_s") - predict(cell) for cell in pairs]))))


# Errors --------------------------------------------------------------------------------------------------------------


def finish(profile: Profile, data: Measurements, model: ModelSpec, gpu: GpuSpec, folder: Path) -> Profile:
    """The profile with errors of whole stages, each size predicted from the others, and of mixed iterations.

    `replicates` compares the medians of even and odd rounds: the noise floor of a median. `single` compares single
    iterations with their cell's median.
    """
    raw = read(folder)
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
    measured = _transfer_measured(raw, model)
    if measured is not None:
        held_out = _line_left_out(measured) if _moves_in_line(raw) else leave_one_out(*_columns(measured))
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
    overlap = raw.head["device"].get("overlap", "turn")
    compiled: dict[tuple[int, int], LatencyModel] = {}

    def latency(tp: int, sp: int) -> LatencyModel:
        if (tp, sp) not in compiled:
            compiled[tp, sp] = profile.compile(model, gpu, tp, sp)
        return compiled[tp, sp]

    def seconds(cell: Cell) -> float:
        spread = cell.kind == "sp"
        stage = in_turn if overlap == "turn" or cell.kind != "xp" else overlapped
        cost = CoBatchCost(
            latency(cell.tp, cell.sp),
            stage,
            async_schedule=False,
            spread=latency(cell.tp * cell.sp, 1) if spread else None,
            joint_exchange=spread,
            overlap_transfer=not (_moves_in_line(raw) and cell.kind == "xp"),
        )
        return cost.timing(_plan(cell)).duration_s

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
