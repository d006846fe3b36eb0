"""Our own Parquet: the canonical schema, with block size and provenance in the file's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from traces.errors import InputError
from traces.files import write_whole
from traces.readers.base import Counts, Mask, Meter, ReadOptions, blocks_of, null_column
from traces.readers.sniff import require_file, require_format
from traces.trace import SCHEMA, Trace

BLOCK_KEY = b"confsim.block_tokens"
PROVENANCE_KEY = b"confsim.provenance"
REQUIRED = ("request_id", "arrival_s", "prompt_tokens", "output_tokens")
BATCH_ROWS = 1 << 14


def write_parquet(trace: Trace, path: Path) -> None:
    """Write a trace so that reading it back loses nothing; the file appears whole or not at all."""
    metadata = {BLOCK_KEY: str(trace.block_tokens), PROVENANCE_KEY: json.dumps(trace.provenance, sort_keys=True)}
    table = trace.table.replace_schema_metadata(metadata)
    write_whole(path, lambda draft: pq.write_table(table, draft, compression="zstd"), durable=True)


class Reader:
    """Streams a file by row groups. Columns of `SCHEMA` that the file lacks are null, further ones are ignored."""

    name = "parquet"

    def __init__(self, path: Path, options: ReadOptions | None = None) -> None:
        self.path = path
        self.options = options or ReadOptions()
        self.counts = Counts()
        self.late_parents: list[tuple[int, int]] = []
        self._metadata: dict[bytes, bytes] | None = None

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Key-value metadata of the file's schema."""
        if self._metadata is None:
            with self._open() as file:
                self._metadata = file.schema_arrow.metadata or {}
        return self._metadata

    @property
    def block_tokens(self) -> int:
        """Tokens a prefix block, as the file's metadata says (0: no ids)."""
        value = self.metadata.get(BLOCK_KEY, b"0").decode()
        if not value.isdigit():
            raise InputError(f"{self.path}: metadata confsim.block_tokens is {value!r}, expected an integer")
        return int(value)

    @property
    def origin(self) -> dict[str, Any]:
        """Provenance of the trace that was written into the file; empty when another program wrote it."""
        try:
            origin: dict[str, Any] = json.loads(self.metadata.get(PROVENANCE_KEY, b"{}"))
        except ValueError as error:
            raise InputError(f"{self.path}: metadata confsim.provenance is not JSON; write the file again") from error
        return origin

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as record batches of `SCHEMA`, in file order."""
        self.counts = Counts()
        with self._open() as file:
            names = self._columns(file.schema_arrow.names)
            meter = Meter(self.options.progress, file.metadata.num_rows)
            for raw in file.iter_batches(BATCH_ROWS, columns=names):
                yield self._batch(raw)
                meter.update(self.counts.read, self.counts.read)
            meter.update(self.counts.read, self.counts.read, done=True)

    def _open(self) -> pq.ParquetFile:
        require_file(self.path)
        require_format(self.path, self.name)
        try:
            return pq.ParquetFile(self.path)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{self.path}: not a readable Parquet file ({reason}); check trace=<format>") from error

    def _columns(self, present: list[str]) -> list[str]:
        missing = [name for name in REQUIRED if name not in present]
        if missing:
            raise InputError(
                f"{self.path}: no column {', '.join(missing)}; a trace has {', '.join(SCHEMA.names)} "
                "(write it with traces.readers.write_parquet)"
            )
        if "block_ids" in present and self.options.block_ids and self.block_tokens == 0:
            raise InputError(f"{self.path}: has block_ids but no block size in its metadata (confsim.block_tokens)")
        return [n for n in SCHEMA.names if n in present and (n != "block_ids" or self.options.block_ids)]

    def _batch(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        start = self.counts.read
        self.counts.read += raw.num_rows
        columns = {name: raw.column(name) for name in raw.schema.names}
        for name in REQUIRED:
            if columns[name].null_count:
                raise InputError(f"{self.path}: column {name} has nulls after row {start}; fill them")
        try:
            arrays = {
                field.name: columns[field.name].cast(field.type)
                if field.name in columns
                else null_column(field.name, raw.num_rows)
                for field in SCHEMA
            }
        except pa.ArrowException as error:
            raise InputError(f"{self.path}: after row {start}: {str(error).splitlines()[0]}; see the schema") from error
        keep = self._check(arrays, start)
        arrays["block_ids"] = self._check_blocks(arrays, start)
        batch = pa.RecordBatch.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)
        return batch if keep.all() else batch.filter(pa.array(keep))

    def _check(self, arrays: dict[str, pa.Array], start: int) -> Mask:
        arrival = arrays["arrival_s"].to_numpy()
        prompt, output = arrays["prompt_tokens"].to_numpy(), arrays["output_tokens"].to_numpy()
        for name, bad in (
            ("arrival_s", ~np.isfinite(arrival)),
            ("prompt_tokens", prompt < 1),
            ("output_tokens", output < 0),
        ):
            if bad.any():
                row = int(np.flatnonzero(bad)[0])
                raise InputError(f"{self.path}: row {start + row}: {name} is {arrays[name][row]}; fix the row")
        keep: Mask = output > 0
        dropped = int(keep.size - keep.sum())
        if dropped and self.options.zero_output == "error":
            raise InputError(
                f"{self.path}: row {start + int(np.flatnonzero(~keep)[0])}: output_tokens is 0, a request emits at "
                "least one token; fix the row, or drop such rows with trace.zero_output=drop"
            )
        self.counts.dropped_zero_output += dropped
        return keep

    def _check_blocks(self, arrays: dict[str, pa.Array], start: int) -> pa.Array:
        ids = arrays["block_ids"]
        if ids.null_count == len(ids):
            return ids
        lengths = pc.fill_null(pc.list_value_length(ids), -1).to_numpy(zero_copy_only=False).astype(np.int64)
        prompt = arrays["prompt_tokens"].to_numpy().astype(np.int64)
        expected = blocks_of(prompt, self.block_tokens)
        wrong = (lengths >= 0) & (lengths != expected)
        if not wrong.any():
            return ids
        if self.options.block_mismatch == "error":
            row = int(np.flatnonzero(wrong)[0])
            raise InputError(
                f"{self.path}: row {start + row}: expected ceil({prompt[row]}/{self.block_tokens})={expected[row]} "
                f"block_ids, found {lengths[row]}; fix the row, or drop such ids with trace.block_mismatch=drop"
            )
        self.counts.dropped_block_ids += int(wrong.sum())
        return pc.if_else(pa.array(~wrong), ids, pa.scalar(None, ids.type))
