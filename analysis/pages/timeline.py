"""A result's iterations as Chrome trace events, for https://ui.perfetto.dev or chrome://tracing.

Each loop of an instance is a process; its tracks are the iterations, and for each group the prefill and the decode
part of every iteration. Queue length and KV use are counters. Times are microseconds of simulated time.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from confsim.errors import InputError
from traces.files import write_whole

PARTS = (
    "linear_s",
    "prefill_attention_s",
    "decode_attention_s",
    "communication_s",
    "head_s",
    "overhead_s",
    "predicted_s",
)
BATCH = 2048  # iterations encoded together


def write_timeline(path: Path, result: Any, limit: int | None = None) -> None:
    """Write the first `limit` iterations of a `Result` (None: all) as gzip; equal results give equal bytes.

    Raises:
        InputError: if the limit is not positive.
    """
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise InputError(f"output.timeline_iterations={limit}: use a number of iterations, or null for all")
    table = result.iterations
    shown = table.slice(0, limit) if limit is not None else table

    def pack(draft: Path) -> None:
        with draft.open("wb") as file, gzip.GzipFile("", "wb", 5, file, mtime=0) as packed:
            text = io.TextIOWrapper(packed, encoding="utf-8", write_through=False)
            _write(text, shown, _about(result, shown.num_rows, table.num_rows))
            text.flush()
            text.detach()

    write_whole(path, pack)


def _about(result: Any, shown: int, total: int) -> dict[str, Any]:
    summary = result.summary
    keys = ("label", "scheme", "policy", "model", "gpu")
    return {**{key: summary.get(key) for key in keys}, "iterations": f"{shown} of {total}"}


def _write(text: io.TextIOWrapper, table: pa.Table, about: dict[str, Any]) -> None:
    text.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(about) + ',"traceEvents":[\n')
    tracks = _tracks(table)
    text.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in _names(tracks)))
    for batch in table.to_batches(max_chunksize=BATCH):
        lines = [line for row in batch.to_pylist() for line in _events(row, tracks[_track(row)][0])]
        if lines:
            text.write(",\n" + ",\n".join(lines))
    text.write("\n]}\n")


def _track(row: dict[str, Any]) -> tuple[int, str]:
    return int(row["instance"]), str(row["loop"])


def _tracks(table: pa.Table) -> dict[tuple[int, str], tuple[int, int]]:
    """Process number and number of groups of each loop, in the order of instance and name."""
    pairs = table.select(["instance", "loop"]).group_by(["instance", "loop"]).aggregate([]).to_pylist()
    keys = sorted(_track(pair) for pair in pairs)
    groups = dict.fromkeys(keys, 0)
    for name in ("prefill_per_group", "decode_per_group"):
        widths = pc.list_value_length(table[name])
        wide = pa.table({"instance": table["instance"], "loop": table["loop"], "n": widths})
        for row in wide.group_by(["instance", "loop"]).aggregate([("n", "max")]).to_pylist():
            groups[_track(row)] = max(groups[_track(row)], int(row["n_max"] or 0))
    return {key: (number + 1, groups[key]) for number, key in enumerate(keys)}


def _names(tracks: dict[tuple[int, str], tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for (instance, loop), (process, groups) in tracks.items():
        name = f"instance {instance}, {loop}"
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
        names = ["iterations"] + [f"group {group} {part}" for group in range(groups) for part in ("prefill", "decode")]
        for thread, title in enumerate(names):
            yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": title}}
            yield {
                "ph": "M",
                "pid": process,
                "tid": thread,
                "name": "thread_sort_index",
                "args": {"sort_index": thread},
            }


def _events(row: dict[str, Any], process: int) -> Iterator[str]:
    start, end = (round(row[f"{side}_s"] * 1e6, 3) for side in ("start", "end"))  # so that no slice overlaps the next
    span = f'"ts":{start:.3f},"dur":{end - start:.3f},"pid":{process}'
    parts = ",".join(f'"{name[:-2]}_ms":{row[name] * 1e3:.4f}' for name in PARTS if row[name])
    yield (
        f'{{"ph":"X","name":"{row["prefill_tokens"]} prefill, {row["decode_tokens"]} decode",{span},"tid":0,'
        f'"args":{{"queued":{row["queued"]},"context_tokens":{row["context_tokens"]}{"," if parts else ""}{parts}}}}}'
    )
    for group, tokens in enumerate(row["prefill_per_group"] or ()):
        if tokens:
            yield f'{{"ph":"X","name":"prefill {tokens}",{span},"tid":{2 * group + 1}}}'
    for group, tokens in enumerate(row["decode_per_group"] or ()):
        if tokens:
            yield f'{{"ph":"X","name":"decode {tokens}",{span},"tid":{2 * group + 2}}}'
    counter = f'"ph":"C","ts":{start:.3f},"pid":{process}'
    yield f'{{{counter},"name":"queued requests","args":{{"requests":{row["queued"]}}}}}'
    yield f'{{{counter},"name":"KV in use","args":{{"blocks":{row["kv_used_blocks"]}}}}}'
