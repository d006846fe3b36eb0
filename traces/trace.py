"""The canonical trace: one pyarrow table and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.int64(), nullable=False),  # row number in the file, from 0
        pa.field("arrival_s", pa.float64(), nullable=False),  # from 0 at the first arrival
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("block_ids", pa.list_(pa.int64())),  # null where the format has none
        pa.field("session", pa.int64()),  # request_id of the session's first turn
        pa.field("turn", pa.int32()),  # from 1
        pa.field("parent_id", pa.int64()),  # request_id of the previous turn
        pa.field("kind", pa.string()),  # the format's own label of the request
    ]
)


@dataclass(frozen=True)
class Trace:
    """Requests in arrival order.

    `table` has `SCHEMA`. `block_tokens` is the prefix block size of `block_ids` (0: no ids). `provenance` is
    plain JSON data: format, path and hash (or preset and seed), `synthetic`, and every count of rows read, dropped,
    sampled or truncated.
    """

    table: pa.Table
    block_tokens: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.table.num_rows)
