"""What happened, kept cheaply while it happens and turned into tables once, afterwards."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from confsim.run.plan import DecodeRun, IterationTiming

ITERATIONS = pa.schema(
    [
        ("loop", pa.dictionary(pa.int16(), pa.string())),
        ("instance", pa.int16()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("prefill_tokens", pa.int32()),
        ("decode_tokens", pa.int32()),
        ("prefill_per_group", pa.list_(pa.int32())),
        ("decode_per_group", pa.list_(pa.int32())),
        ("linear_s", pa.float64()),
        ("prefill_attention_s", pa.float64()),
        ("decode_attention_s", pa.float64()),
        ("communication_s", pa.float64()),
        ("head_s", pa.float64()),
        ("overhead_s", pa.float64()),
        ("predicted_s", pa.float64()),
        ("queued", pa.int32()),
        ("kv_used_blocks", pa.int64()),
        ("context_tokens", pa.int64()),
    ]
)


class Row(NamedTuple):
    """One or, where nothing but decodes ran, several iterations."""

    steps: int
    start_s: float
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    linear_s: float
    prefill_attention_s: float
    communication_s: float
    head_s: float
    overhead_s: float  # exposed; of a run the host's, with `hidden`
    predicted_s: float  # -1: the sum of the parts
    queued: int
    kv_used_blocks: int  # of the first step
    context_tokens: int
    hidden: bool = False  # only what outlasts the GPU is exposed
    growth: Sequence[tuple[int, int]] = ()  # (step, blocks) taken within a run


@dataclass(slots=True)
class Track:
    """The iterations of one loop, in order."""

    name: str
    instance: int = 0
    rows: list[Row] = field(default_factory=list)
    ends: array[float] = field(default_factory=lambda: array("d"))
    attention: array[float] = field(default_factory=lambda: array("d"))  # decode attention of each iteration

    def iteration(
        self,
        start_s: float,
        end_s: float,
        timing: IterationTiming,
        prefill: tuple[int, ...],
        decode: tuple[int, ...],
        queued: int,
        kv_used_blocks: int,
        context_tokens: int,
    ) -> None:
        """Record one iteration; queue and KV as they were once it was planned."""
        self.ends.append(end_s)
        self.attention.append(timing.decode_attention_s)
        row = Row(
            1, start_s, prefill, decode, timing.linear_s, timing.prefill_attention_s, timing.communication_s,
            timing.head_s, timing.overhead_s, timing.predicted_s, queued, kv_used_blocks, context_tokens,
        )  # fmt: skip
        self.rows.append(row)

    def run(
        self,
        start_s: float,
        run: DecodeRun,
        decode: tuple[int, ...],
        queued: int,
        kv_used_blocks: int,
        context_tokens: int,
        growth: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Record iterations of nothing but the same decodes."""
        self.ends.extend(run.ends_s)
        self.attention.extend(run.attention_s)
        row = Row(
            len(run.ends_s), start_s, (0,) * len(decode), decode, run.linear_s, 0.0, run.communication_s, run.head_s,
            run.overhead_s, -1.0, queued, kv_used_blocks, context_tokens, run.hidden, growth,
        )  # fmt: skip
        self.rows.append(row)

    def cut(self, now_s: float) -> None:
        """Drop iterations that end after `now_s`."""
        while self.ends and self.ends[-1] > now_s:
            self.ends.pop()
            self.attention.pop()
            row = self.rows.pop()
            if row.steps > 1:
                self.rows.append(row._replace(steps=row.steps - 1))

    def cut_run(self, steps: int) -> None:
        """Keep the first `steps` iterations of the run that was recorded last."""
        row = self.rows[-1]
        dropped = row.steps - steps
        del self.ends[len(self.ends) - dropped :]
        del self.attention[len(self.attention) - dropped :]
        growth = [(step, blocks) for step, blocks in row.growth if step < steps]
        self.rows[-1] = row._replace(steps=steps, growth=growth)

    def busy_s(self) -> float:
        """Seconds in which an iteration ran."""
        steps = np.fromiter((row.steps for row in self.rows), np.int64, len(self.rows))
        starts = np.fromiter((row.start_s for row in self.rows), np.float64, len(self.rows))
        ends = np.frombuffer(self.ends, np.float64)[np.cumsum(steps) - 1] if len(steps) else starts
        return float(np.sum(ends - starts))

    def table(self) -> pa.Table:
        """One row an iteration, by `ITERATIONS`."""
        columns: list[Any] = list(zip(*self.rows, strict=True)) if self.rows else [()] * len(Row._fields)
        by_name = dict(zip(Row._fields, columns, strict=True))
        steps = np.array(by_name["steps"], np.int64)
        first = np.cumsum(steps) - steps
        ends = np.array(self.ends, np.float64)
        starts = np.concatenate([[0.0], ends[:-1]]) if len(ends) else ends
        starts[first] = by_name["start_s"]
        out: dict[str, Any] = {
            name: np.repeat(np.array(by_name[name], np.float64), steps)
            for name in Row._fields
            if name.endswith("_s") and name != "start_s"
        }
        attention = np.array(self.attention, np.float64)
        gpu = out["linear_s"] + attention + out["communication_s"] + out["head_s"]
        hidden = np.repeat(np.array(by_name["hidden"], bool), steps)
        out["overhead_s"] = np.where(hidden, np.maximum(out["overhead_s"] - gpu, 0.0), out["overhead_s"])
        out["decode_attention_s"] = attention
        out["predicted_s"] = np.where(out["predicted_s"] < 0, gpu + out["overhead_s"], out["predicted_s"])
        decode_tokens = np.array([sum(groups) for groups in by_name["decode"]], np.int64)
        within = np.arange(len(ends)) - np.repeat(first, steps)
        context = np.repeat(np.array(by_name["context_tokens"], np.int64), steps)
        out |= {
            "loop": pa.array([self.name], pa.string()).dictionary_encode().take(pa.array(np.zeros(len(ends), np.int8))),
            "instance": np.full(len(ends), self.instance, np.int16),
            "start_s": starts,
            "end_s": ends,
            "prefill_tokens": np.repeat(np.array([sum(groups) for groups in by_name["prefill"]], np.int32), steps),
            "decode_tokens": np.repeat(decode_tokens, steps),
            "prefill_per_group": _repeat_lists(by_name["prefill"], steps),
            "decode_per_group": _repeat_lists(by_name["decode"], steps),
            "queued": np.repeat(np.array(by_name["queued"], np.int32), steps),
            "kv_used_blocks": np.repeat(np.array(by_name["kv_used_blocks"], np.int64), steps)
            + _grown(by_name["growth"], first, steps),
            "context_tokens": context + within * np.repeat(decode_tokens, steps),
        }
        arrays = [_column(out[field.name], field.type) for field in ITERATIONS]
        return pa.Table.from_arrays(arrays, schema=ITERATIONS)


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values).cast(kind)


def _grown(growth: Any, first: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Blocks that each iteration has beyond those of its run's first one."""
    change = np.zeros(int(steps.sum()) + 1, np.int64)
    for start, count, taken in zip(first.tolist(), steps.tolist(), growth, strict=True):
        for step, blocks in taken:
            if step < count:
                change[start + step] += blocks
                change[start + count] -= blocks
    return np.cumsum(change)[:-1]


def _repeat_lists(groups: Any, steps: Any) -> pa.Array:
    sizes = np.fromiter(map(len, groups), np.int32, len(groups))
    flat = np.fromiter(chain.from_iterable(groups), np.int32, int(sizes.sum()))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
    return lists.take(pa.array(np.repeat(np.arange(len(steps)), steps)))


def iterations_table(tracks: Sequence[Track]) -> pa.Table:
    """All iterations, by end time; ties in the order of the tracks."""
    tables = [track.table().unify_dictionaries() for track in tracks]
    if not tables:
        return ITERATIONS.empty_table()
    if len(tables) == 1:
        return tables[0]
    whole = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
    order = np.argsort(whole["end_s"].to_numpy(), kind="stable")
    return whole.take(pa.array(order))
