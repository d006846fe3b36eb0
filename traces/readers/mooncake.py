"""Mooncake FAST'25 JSONL: milliseconds, 512-token prefix blocks, no sessions."""

from __future__ import annotations

from traces.readers.jsonl import JsonLinesReader


class Reader(JsonLinesReader):
    """Rows of `timestamp`, `input_length`, `output_length` and `hash_ids`."""

    name = "mooncake"
    unit_ns = 1_000_000
    block = 512
