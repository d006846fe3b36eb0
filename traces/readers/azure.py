"""Azure LLM inference CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens; no blocks, no sessions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from traces.errors import InputError
from traces.readers.base import INT32_MAX, NS, Chunk, Counts, Ints, Mask, Meter, ReadOptions, record_batch, text_chunks
from traces.readers.sniff import AZURE_FIELDS, require_format

UTC = re.compile(r"(Z|[+-]00:?00)$")


class Reader:
    """Streams the 2023 and 2024 releases; columns are found by the header, further ones are ignored."""

    name = "azure"

    def __init__(self, path: Path, options: ReadOptions | None = None) -> None:
        self.path = path
        self.options = options or ReadOptions()
        self.counts = Counts()
        self.late_parents: list[tuple[int, int]] = []
        self._origin_ns: int | None = None
        self._columns: tuple[int, ...] | None = None

    @property
    def block_tokens(self) -> int:
        """The format has no block ids."""
        return 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as record batches of `SCHEMA`, in file order."""
        require_format(self.path, self.name)
        meter = Meter(self.options.progress, self.path.stat().st_size)
        self.counts, self._origin_ns, self._columns = Counts(), None, None
        position = 0
        for chunk, position in text_chunks(self.path):
            rows = [line.split(",") for line in chunk.lines if not line.isspace()]
            skip = 0
            if self._columns is None and rows:
                self._columns, skip = self._header(rows[0]), 1
            if len(rows) > skip:
                yield self._batch(chunk, rows[skip:], skip)
                meter.update(self.counts.read, position)
        meter.update(self.counts.read, position, done=True)

    def _header(self, names: list[str]) -> tuple[int, ...]:
        clean = [name.strip().strip('"') for name in names]
        missing = [name for name in AZURE_FIELDS if name not in clean]
        if missing:
            raise InputError(
                f"{self.path}:1: no column {', '.join(missing)}; an azure file opens with {','.join(AZURE_FIELDS)}"
            )
        return tuple(clean.index(name) for name in AZURE_FIELDS)

    def _batch(self, chunk: Chunk, rows: list[list[str]], skip: int) -> pa.RecordBatch:
        try:
            time_ns, prompt, output = self._convert(rows)
        except (ValueError, IndexError, OverflowError) as error:
            raise self._fault(chunk, rows, skip) from error
        keep = self._check(chunk, prompt, output, skip)
        if self._origin_ns is None:
            self._origin_ns = int(time_ns[0])
        start = self.counts.read
        self.counts.read += len(rows)
        batch = record_batch(
            {
                "request_id": np.arange(start, self.counts.read, dtype=np.int64),
                "arrival_s": (time_ns - self._origin_ns) / NS,
                "prompt_tokens": prompt,
                "output_tokens": output,
            }
        )
        return batch if keep.all() else batch.filter(pa.array(keep))

    def _convert(self, rows: list[list[str]]) -> tuple[Ints, Ints, Ints]:
        assert self._columns is not None
        when, prompt, output = self._columns
        stamps = np.array([UTC.sub("", row[when].strip()) for row in rows], dtype="datetime64[ns]")
        if np.isnat(stamps).any():
            raise ValueError("no time")
        counts = [np.array([int(row[column]) for row in rows], dtype=np.int64) for column in (prompt, output)]
        return stamps.astype(np.int64), counts[0], counts[1]

    def _check(self, chunk: Chunk, prompt: Ints, output: Ints, skip: int) -> Mask:
        for name, values, least in (("ContextTokens", prompt, 1), ("GeneratedTokens", output, 0)):
            bad = np.flatnonzero((values < least) | (values > INT32_MAX))
            if bad.size:
                line = chunk.line_of(int(bad[0]) + skip)
                raise InputError(
                    f"{self.path}:{line}: {name} is {values[bad[0]]}, expected at least {least}; fix the row"
                )
        keep: Mask = output > 0
        dropped = int(keep.size - keep.sum())
        if dropped and self.options.zero_output == "error":
            line = chunk.line_of(int(np.flatnonzero(~keep)[0]) + skip)
            raise InputError(
                f"{self.path}:{line}: GeneratedTokens is 0, a request emits at least one token; "
                "fix the row, or drop such rows with trace.zero_output=drop"
            )
        self.counts.dropped_zero_output += dropped
        return keep

    def _fault(self, chunk: Chunk, rows: list[list[str]], skip: int) -> InputError:
        for i, row in enumerate(rows):
            try:
                self._convert([row])
            except (ValueError, IndexError, OverflowError):
                return InputError(
                    f"{self.path}:{chunk.line_of(i + skip)}: {','.join(row).strip()!r} is no azure row; "
                    "expected a date and time (UTC or without zone) and two token counts"
                )
        return InputError(f"{self.path}:{chunk.first}: an azure row of this part cannot be read; fix the file")
