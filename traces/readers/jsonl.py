"""What JSONL formats share: one object per line, checked by the batch, errors by the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from traces.errors import InputError
from traces.readers.base import (
    INT32_MAX,
    NS,
    Chunk,
    Counts,
    Floats,
    Ints,
    Mask,
    Meter,
    ReadOptions,
    blocks_of,
    integers,
    list_column,
    nanoseconds,
    record_batch,
    text_chunks,
)
from traces.readers.sniff import require_format

Row = dict[str, Any]


class JsonLinesReader:
    """Streams a JSONL trace whose rows have `timestamp`, `input_length`, `output_length` and perhaps `hash_ids`.

    A batch is checked as a whole; only a bad one is searched for the line at fault.
    """

    name: ClassVar[str]
    unit_ns: ClassVar[int]  # unit of `timestamp`
    block: ClassVar[int]  # tokens a block of `hash_ids`
    fields: ClassVar[tuple[str, ...]] = ("input_length", "output_length")  # required integers besides the timestamp

    def __init__(self, path: Path, options: ReadOptions | None = None) -> None:
        self.path = path
        self.options = options or ReadOptions()
        self.counts = Counts()
        self.late_parents: list[tuple[int, int]] = []
        self._origin_ns: int | None = None

    @property
    def block_tokens(self) -> int:
        """Tokens a prefix block."""
        return self.block

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as record batches of `SCHEMA`, in file order."""
        require_format(self.path, self.name)
        meter = Meter(self.options.progress, self.path.stat().st_size)
        self.counts, self.late_parents, self._origin_ns = Counts(), [], None
        position = 0
        for chunk, position in text_chunks(self.path):
            rows = self._parse(chunk)
            if rows:
                yield self._batch(chunk, rows)
                meter.update(self.counts.read, position)
        meter.update(self.counts.read, position, done=True)
        self.finish()

    def links(self, chunk: Chunk, rows: list[Row], ids: Ints) -> dict[str, pa.Array | Ints | Floats]:
        """Columns for session, turn, parent and kind, if the format has any; `ids` are the rows' request ids."""
        return {}

    def finish(self) -> None:
        """Settle what needs the whole file; nothing does here."""

    def _parse(self, chunk: Chunk) -> list[Row]:
        loads = json.loads
        try:
            rows = [loads(line) for line in chunk.lines if not line.isspace()]
        except ValueError:
            rows = [self._parse_line(line, chunk.first + i) for i, line in enumerate(chunk.lines) if not line.isspace()]
        for i, row in enumerate(rows):
            if type(row) is not dict:
                raise InputError(f"{self.path}:{chunk.line_of(i)}: not a JSON object; a {self.name} row is one a line")
        return rows

    def _parse_line(self, line: str, number: int) -> Row:
        try:
            row: Row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{self.path}:{number}: not JSON ({error}); is the file cut off or damaged?") from error
        return row

    def _batch(self, chunk: Chunk, rows: list[Row]) -> pa.RecordBatch:
        try:
            time_ns = nanoseconds([row["timestamp"] for row in rows], self.unit_ns)
            numbers = {name: integers([row[name] for row in rows]) for name in self.fields}
            hashes = [row.get("hash_ids") for row in rows]
            lengths = np.array([-1 if ids is None else len(ids) for ids in hashes], dtype=np.int64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._fault(chunk, rows) from error
        prompt, output = numbers["input_length"], numbers["output_length"]
        self._check_range(chunk, "input_length", prompt, 1)
        self._check_range(chunk, "output_length", output, 0)
        keep_ids = self._check_blocks(chunk, prompt, lengths)
        keep = self._check_outputs(chunk, output)
        ids = np.arange(self.counts.read, self.counts.read + len(rows), dtype=np.int64)
        if self._origin_ns is None:
            self._origin_ns = int(time_ns[0])
        columns: dict[str, pa.Array | Ints | Floats] = {
            "request_id": ids,
            "arrival_s": (time_ns - self._origin_ns) / NS,
            "prompt_tokens": prompt,
            "output_tokens": output,
            **self.links(chunk, rows, ids),
        }
        if self.options.block_ids:
            columns["block_ids"] = self._id_column(chunk, rows, hashes, keep_ids)
        self.counts.read += len(rows)
        batch = record_batch(columns)
        return batch if keep.all() else batch.filter(pa.array(keep))

    def _id_column(self, chunk: Chunk, rows: list[Row], hashes: list[list[int] | None], keep: Mask) -> pa.Array:
        try:
            return list_column(hashes, keep)
        except (TypeError, OverflowError) as error:
            raise self._fault(chunk, rows) from error

    def _check_range(self, chunk: Chunk, name: str, values: Ints, least: int) -> None:
        bad = np.flatnonzero((values < least) | (values > INT32_MAX))
        if bad.size:
            line, value = chunk.line_of(int(bad[0])), int(values[bad[0]])
            raise InputError(f"{self.path}:{line}: {name} is {value}, expected at least {least}; fix the row")

    def _check_outputs(self, chunk: Chunk, output: Ints) -> Mask:
        keep: Mask = output > 0
        dropped = int(keep.size - keep.sum())
        if dropped and self.options.zero_output == "error":
            line = chunk.line_of(int(np.flatnonzero(~keep)[0]))
            raise InputError(
                f"{self.path}:{line}: output_length is 0, a request emits at least one token; "
                "fix the row, or drop such rows with trace.zero_output=drop"
            )
        self.counts.dropped_zero_output += dropped
        return keep

    def _check_blocks(self, chunk: Chunk, prompt: Ints, lengths: Ints) -> Mask:
        expected = blocks_of(prompt, self.block)
        wrong: Mask = (lengths >= 0) & (lengths != expected)
        if wrong.any() and self.options.block_mismatch == "error":
            row = int(np.flatnonzero(wrong)[0])
            raise InputError(
                f"{self.path}:{chunk.line_of(row)}: expected ceil({prompt[row]}/{self.block})={expected[row]} "
                f"hash_ids, found {lengths[row]}; fix the row, or drop such ids with trace.block_mismatch=drop"
            )
        self.counts.dropped_block_ids += int(wrong.sum())
        return ~wrong

    def _fault(self, chunk: Chunk, rows: list[Row]) -> InputError:
        """The error of the first row at fault."""
        for i, row in enumerate(rows):
            problem = self._problem(row)
            if problem:
                return InputError(f"{self.path}:{chunk.line_of(i)}: {problem}")
        return InputError(f"{self.path}:{chunk.first}: a {self.name} row of this part cannot be read; fix the file")

    def _problem(self, row: Row) -> str | None:
        for name in ("timestamp", *self.fields):
            if name not in row:
                wanted = ", ".join(("timestamp", *self.fields, "hash_ids"))
                return f"no field {name}, a {self.name} row has {wanted}; check trace=<format>"
        try:
            nanoseconds([row["timestamp"]], self.unit_ns)
        except (TypeError, ValueError, OverflowError):
            return f"timestamp is {row['timestamp']!r}, expected a number of {self._unit()}; fix the row"
        for name in self.fields:
            if type(row[name]) is not int or abs(row[name]) > INT32_MAX:
                return f"{name} is {row[name]!r}, expected an integer; fix the row"
        hashes = row.get("hash_ids")
        if hashes is not None and (type(hashes) is not list or set(map(type, hashes)) - {int}):
            return "hash_ids is no list of integers; fix the row"
        return None

    def _unit(self) -> str:
        return "seconds" if self.unit_ns == NS else "milliseconds"
