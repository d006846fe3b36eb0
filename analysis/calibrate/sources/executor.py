"""Source `executor`: whole stages as real ranks ran them, from the Parquet files that `confsim profile` wrote.

Cells in which both phases ran are held out of every table; the fitted profile predicts them as whole iterations
(`analysis.calibrate.held_out`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from analysis.calibrate.held_out import with_errors
from analysis.calibrate.measurements import (
    CollectiveTable,
    DecodeTable,
    Floats,
    Measurements,
    MixedTable,
    PrefillTable,
    StageTable,
)
from analysis.calibrate.rounds import Cell, Raw, read
from analysis.calibrate.sources.base import MeasurementSource
from analysis.calibrate.transfers import moves_in_line, robust_line, transfer_measured
from confsim.errors import InputError
from confsim.latency.profile import Profile
from confsim.specs import GpuSpec, ModelSpec

MIN_SHARE = 0.05  # a time read off outside the measured contexts is no smaller a share of the least measured one


class Source(MeasurementSource):
    """A profile's folder."""

    reads_folder = True

    @cached_property
    def raw(self) -> Raw:
        """Everything in the folder."""
        return read(self.folder)

    def specs(self) -> tuple[ModelSpec, GpuSpec]:
        """Model and GPU that the folder's profile was measured for."""
        return ModelSpec(**self.raw.head["model"]), GpuSpec(**self.raw.head["gpu"])

    def load(self, model: ModelSpec, gpu: GpuSpec) -> Measurements:
        """The tables of a profile's folder: whole stages.

        Raises:
            InputError: where the folder holds no profile, or lacks a component.
        """
        raw = self.raw
        prefill, decode = raw.of("prefill"), raw.of("decode")
        if not prefill or not decode:
            raise InputError(f"profile={self.folder}: holds no prefill or no decode cells, measure again")
        layers = model.num_hidden_layers
        overhead, sequence = _overheads(decode)
        slowdowns = _slowdowns(raw)
        return Measurements(
            provenance=_provenance(raw, self.folder),
            linear=_stage(_linear_points(prefill, decode), layers),
            exchange=_stage(
                [(c, c.shard_tokens, c.median("communication_s")) for c in _own(prefill) if c.sp > 1], layers
            ),
            head=_stage([(c, c.sequences, c.median("head_s")) for c in decode], 1),
            transfer=_transfer(raw, model),
            mixed=_joint(raw.of("joint"), layers),
            decode=_decode(decode, model),
            prefill=_prefill(prefill, model, overhead + sequence),
            iteration_overhead_s=overhead,
            sequence_overhead_s=sequence,
            prefill_slowdown=slowdowns[0],
            decode_slowdown=slowdowns[1],
        )

    def finish(self, profile: Profile, data: Measurements, model: ModelSpec, gpu: GpuSpec) -> Profile:
        """The profile with errors of whole stages, each size predicted from the others, and of mixed iterations."""
        return with_errors(profile, data, self.raw, model, gpu)


def _joint(cells: list[Cell], layers: int) -> MixedTable | None:
    """Calls of both phases and their parts, of the layout with the fewest GPUs a head."""
    if not cells:
        return None
    least = min(cell.tp for cell in cells)
    own = [cell for cell in cells if cell.tp == least]
    columns = zip(
        *(((cell.tokens or (0,))[0], (cell.cached or (0,))[0], cell.sequences, cell.level) for cell in own), strict=True
    )
    seconds = [cell.median("prefill_attention_s") + cell.median("decode_attention_s") for cell in own]
    return MixedTable(*map(np.array, columns), np.array(seconds) / layers)


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
    table = transfer_measured(raw, model)
    if table is None or not moves_in_line(raw):
        return table
    seconds = table.seconds.copy()
    for degree in np.unique(table.degree):
        own = table.degree == degree
        seconds[own] = robust_line(table.bytes[own], seconds[own])(table.bytes[own])
    return replace(table, seconds=seconds)


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
    found: list[float] = np.maximum(y[piece] + slope * (at - x[piece]), MIN_SHARE * y.min()).tolist()
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
