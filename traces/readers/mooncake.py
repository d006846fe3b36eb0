"""Mooncake FAST'25 JSONL: milliseconds, 512-token prefix blocks, no sessions."""

from __future__ import annotations

import pyarrow as pa

from traces.readers.base import Chunk, Floats, Ints
from traces.readers.jsonl import JsonLinesReader, Row


class MooncakeReader(JsonLinesReader):
    """Rows of `timestamp`, `input_length`, `output_length` and `hash_ids`."""

    name = "mooncake"
    unit_ns = 1_000_000
    block = 512
    fields = ("input_length", "output_length")

    def links(self, chunk: Chunk, rows: list[Row], ids: Ints) -> dict[str, pa.Array | Ints | Floats]:
        """The format has no sessions."""
        return {}

    def finish(self) -> None:
        """Nothing needs the whole file."""
