"""A trace file as a configuration: read, put in order, and cut to the part that is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from traces.catalog import cache_directory
from traces.errors import InputError
from traces.readers import READERS, ParquetReader, Progress, Reader, ReadOptions
from traces.select import Ints, Selection, rebase
from traces.trace import SCHEMA, Trace

DROPS = ("error", "drop")


@dataclass(frozen=True)
class FileTrace:
    """A trace file of one format, and the part of it to use.

    `limit`, `window` and `sample` are those of `Selection`. `zero_output` and `block_mismatch` say what to do with
    rows of no output tokens and with rows whose number of block ids is not ceil(prompt / block): `error`, or
    `drop` the row (its ids) and count it.
    """

    format: str
    path: str | None = None
    limit: int | None = None
    window: Sequence[float | None] | None = None
    sample: float = 1.0
    zero_output: str = "error"
    block_mismatch: str = "error"

    def check(self) -> None:
        """Raise `InputError` for settings that make no sense, before anything is read."""
        READERS.get(self.format)
        if self.path is None or not str(self.path):
            public = {"mooncake": "toolagent", "bailian": "qwen_a"}.get(self.format)
            hint = f" (`confsim fetch {public}` downloads one)" if public else ""
            raise InputError(f"trace.path is not set: trace={self.format} reads a file, add trace.path=FILE{hint}")
        for key in ("zero_output", "block_mismatch"):
            if getattr(self, key) not in DROPS:
                raise InputError(f"trace.{key}={getattr(self, key)}: unknown, use one of {', '.join(DROPS)}")
        self._selection().check()

    def load(self, seed: int = 0, block_ids: bool = True, progress: Progress | None = None) -> Trace:
        """Read the file; `seed` is that of the session sampling. Block ids are null unless `block_ids`.

        Memory: at most 1.5 times the file, twice that while a file whose rows are out of order is sorted. The block
        ids may come in several chunks. Raises `InputError`.
        """
        self.check()
        path = found(Path(str(self.path)).expanduser())
        options = ReadOptions(block_ids, self.zero_output, self.block_mismatch, progress)
        reader: Reader = READERS.get(self.format)(path, options)
        table, out_of_order = in_order(reader)
        if table.num_rows == 0:
            raise InputError(f"{path}: no requests, a trace needs at least one")
        table, selection = self._selection().apply(table, seed)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        provenance: dict[str, Any] = {
            "name": path.name,
            "format": self.format,
            "synthetic": False,
            "path": str(self.path),
            "sha256": digest,
            "rows": {**reader.counts.as_dict(), "out_of_order": out_of_order},
            "selection": selection,
        }
        if isinstance(reader, ParquetReader) and reader.origin:
            origin = reader.origin
            provenance |= {"origin": origin, "synthetic": bool(origin.get("synthetic")), "name": origin.get("name")}
        return Trace(table, reader.block_tokens, provenance)

    def _selection(self) -> Selection:
        return Selection(self.limit, self.window, self.sample)


def in_order(reader: Reader) -> tuple[pa.Table, int]:
    """All rows of a reader by arrival, ties in file order, from 0; and how many came out of order in the file."""
    table = pa.Table.from_batches(list(reader.batches()), schema=SCHEMA)
    table = _combined(_link_late_parents(table, reader.late_parents))
    arrival = table["arrival_s"].to_numpy()
    steps = np.diff(arrival)
    out_of_order = int((steps < 0).sum())
    if out_of_order:
        table = table.take(pa.array(np.argsort(arrival, kind="stable")))
    return rebase(table), out_of_order


def _combined(table: pa.Table) -> pa.Table:
    """Every column in one piece but the block ids, whose copy would double the memory of a large trace."""
    names = [name for name in table.schema.names if name != "block_ids"]
    whole = table.select(names).combine_chunks()
    columns = [table[n] if n == "block_ids" else whole[n] for n in table.schema.names]
    return pa.table(columns, schema=table.schema)


def _link_late_parents(table: pa.Table, late: list[tuple[int, int]]) -> pa.Table:
    """Fill in parents that stand after their children in the file, and settle the sessions again.

    Raises `InputError` when the parents form a circle.
    """
    if not late:
        return table
    ids = table["request_id"].to_numpy()
    size = int(max(ids.max(), max(max(pair) for pair in late))) + 1
    parent = np.full(size, -1, dtype=np.int64)
    parent[ids] = table["parent_id"].fill_null(-1).to_numpy()
    for child, row in late:
        parent[child] = row
    root = _roots(parent)
    table = _replace(table, "session", root[ids], None)
    return _replace(table, "parent_id", parent[ids], parent[ids] < 0)


def _roots(parent: Ints) -> Ints:
    """First ancestor of each row, by doubling the step."""
    own = np.arange(parent.size)
    jump = np.where(parent < 0, own, parent)
    for _ in range(int(parent.size).bit_length()):
        jump = jump[jump]
    circle = np.flatnonzero(parent[jump] >= 0)
    if circle.size:
        raise InputError(f"row {int(circle[0])}: parent_chat_id leads back to the row itself; fix the file")
    return jump


def _replace(table: pa.Table, name: str, values: Ints, mask: Any) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), pa.array(values, mask=mask))


def found(path: Path) -> Path:
    """The path itself, or the fetched trace of that bare name where there is no such file here."""
    fetched = cache_directory() / path
    return fetched if len(path.parts) == 1 and not path.exists() and fetched.is_file() else path
