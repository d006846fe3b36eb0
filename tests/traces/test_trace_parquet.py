"""Parquet round trips and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_builders import bailian_row, write_jsonl

from traces.errors import InputError
from traces.readers import ParquetReader, write_parquet
from traces.source import FileTrace
from traces.synthesis import SyntheticTrace
from traces.trace import SCHEMA, Trace

INT32 = st.integers(1, 200)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    count = draw(st.integers(1, 8))
    gaps = draw(st.lists(st.floats(0, 1e6), min_size=count - 1, max_size=count - 1))
    prompts = draw(st.lists(INT32, min_size=count, max_size=count))
    ids = [
        draw(st.none() | st.lists(st.integers(-(2**62), 2**62), min_size=-(-p // 16), max_size=-(-p // 16)))
        for p in prompts
    ]
    optional = st.lists(st.none() | st.integers(0, 2**31 - 1), min_size=count, max_size=count)
    columns = {
        "request_id": list(range(count)),
        "arrival_s": np.concatenate(([0.0], np.cumsum(gaps))),
        "prompt_tokens": prompts,
        "output_tokens": draw(st.lists(INT32, min_size=count, max_size=count)),
        "block_ids": ids,
        "session": draw(optional),
        "turn": draw(optional),
        "parent_id": draw(optional),
        "kind": draw(st.lists(st.none() | st.text(max_size=5), min_size=count, max_size=count)),
    }
    note = draw(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3))
    return Trace(pa.table(columns, schema=SCHEMA), 16, {"name": "made", "synthetic": draw(st.booleans()), "note": note})


@settings(max_examples=60, deadline=None)
@given(trace=traces())
def test_round_trip_loses_nothing(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("round") / "t.parquet"
    write_parquet(trace, path)
    again = FileTrace("parquet", str(path)).load()
    assert again.table.equals(trace.table)
    assert again.table.schema.equals(SCHEMA, check_metadata=True)
    assert again.block_tokens == trace.block_tokens
    assert again.provenance["origin"] == trace.provenance
    assert again.provenance["synthetic"] == trace.provenance["synthetic"]
    assert [p.name for p in path.parent.iterdir()] == ["t.parquet"]


def test_round_trip_of_a_session_trace(tmp_path: Path) -> None:
    rows = [bailian_row(1, -1, 0.0, 30, 5), bailian_row(2, 1, 61.114, 70, 5, 2), bailian_row(3, 9, 62.0, 20, 5)]
    trace = FileTrace("bailian", str(write_jsonl(tmp_path / "t.jsonl", rows))).load()
    write_parquet(trace, tmp_path / "t.parquet")
    again = FileTrace("parquet", str(tmp_path / "t.parquet")).load()
    assert again.table.equals(trace.table)
    assert again.provenance["origin"]["rows"]["orphans"] == 1


def test_a_synthetic_trace_stays_labelled(tmp_path: Path) -> None:
    write_parquet(SyntheticTrace("toolagent", 50).load(1), tmp_path / "t.parquet")
    again = FileTrace("parquet", str(tmp_path / "t.parquet")).load(block_ids=False)
    assert again.provenance["synthetic"] is True
    assert again.provenance["name"] == "toolagent (synthetic)"
    assert again.table["block_ids"].null_count == 50


def test_streams_row_groups(tmp_path: Path) -> None:
    write_parquet(SyntheticTrace("conversation", 40_000).load(0, block_ids=False), tmp_path / "t.parquet")
    reader = ParquetReader(tmp_path / "t.parquet")
    assert [batch.num_rows for batch in reader.batches()] == [16384, 16384, 7232]


def write(path: Path, block_tokens: int = 16, **columns: object) -> Path:
    base: dict[str, object] = {
        "request_id": [0, 1],
        "arrival_s": [0.0, 1.0],
        "prompt_tokens": [20, 20],
        "output_tokens": [5, 5],
    }
    table = pa.table({**base, **columns})
    metadata = {"confsim.block_tokens": str(block_tokens)} if block_tokens else {}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def test_foreign_parquet_with_the_four_columns_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", 0, arrival_s=[3.0, 2.0], extra=["a", "b"])
    trace = FileTrace("parquet", str(path)).load()
    assert trace.table["request_id"].to_pylist() == [1, 0]
    assert trace.table["arrival_s"].to_pylist() == [0.0, 1.0]
    assert trace.table.schema.equals(SCHEMA)


def test_X1_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    ids = pa.array([[1, 2], [1, 2, 3]], pa.list_(pa.int64()))
    for options, part in (
        ({"output_tokens": [5, 0]}, "row 1: output_tokens is 0"),
        ({"prompt_tokens": [0, 5]}, "row 0: prompt_tokens is 0"),
        ({"arrival_s": [0.0, float("nan")]}, "row 1: arrival_s is nan"),
        ({"output_tokens": [5, None]}, "output_tokens has nulls"),
        ({"prompt_tokens": ["a", "b"]}, "after row 0"),
        ({"prompt_tokens": [2**40, 5]}, "after row 0"),
        ({"block_ids": ids}, "row 1: expected ceil(20/16)=2 block_ids, found 3"),
        ({"block_ids": ids, "block_tokens": 0}, "no block size"),
    ):
        with pytest.raises(InputError) as error:
            FileTrace("parquet", str(write(path, **options))).load()  # type: ignore[arg-type]
        assert part in str(error.value)
    kept = FileTrace("parquet", str(write(path, block_ids=ids)), block_mismatch="drop").load()
    assert kept.table["block_ids"].to_pylist() == [[1, 2], None]
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(InputError, match="no column request_id, arrival_s, prompt_tokens, output_tokens"):
        FileTrace("parquet", str(path)).load()
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        FileTrace("parquet", str(path)).load()
