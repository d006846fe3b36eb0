"""Small trace files and tables for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from traces.readers.base import record_batch
from traces.trace import SCHEMA, Trace


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def mooncake_row(timestamp: Any, prompt: int = 20, output: int = 8, **more: Any) -> dict[str, Any]:
    row = {"timestamp": timestamp, "input_length": prompt, "output_length": output}
    return {**row, "hash_ids": list(range(-(-prompt // 512))), **more}


def bailian_row(chat: int, parent: int, timestamp: float, prompt: int, output: int, turn: int = 1) -> dict[str, Any]:
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": prompt,
        "output_length": output,
        "type": "text",
        "turn": turn,
        "hash_ids": list(range(-(-prompt // 16))),
    }


def make_trace(
    arrival_s: list[float], prompt: int | list[int] = 100, output: int | list[int] = 10, **columns: Any
) -> Trace:
    count = len(arrival_s)
    batch = record_batch(
        {
            "request_id": np.arange(count, dtype=np.int64),
            "arrival_s": np.array(arrival_s, dtype=np.float64),
            "prompt_tokens": np.broadcast_to(np.array(prompt, dtype=np.int64), count).copy(),
            "output_tokens": np.broadcast_to(np.array(output, dtype=np.int64), count).copy(),
            **columns,
        }
    )
    return Trace(pa.Table.from_batches([batch], schema=SCHEMA), 0, {"name": "test", "synthetic": False})
