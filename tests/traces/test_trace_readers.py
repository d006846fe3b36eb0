"""Readers: what they read, and what they refuse with file and line."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from trace_builders import bailian_row, mooncake_row, write_jsonl

from traces.errors import InputError
from traces.readers import BailianReader, MooncakeReader, ReadOptions
from traces.source import FileTrace
from traces.trace import SCHEMA


def load(path: Path, fmt: str = "mooncake", **options: object):  # type: ignore[no-untyped-def]
    return FileTrace(fmt, str(path), **options).load()  # type: ignore[arg-type]


def column(trace, name: str) -> list[object]:  # type: ignore[no-untyped-def]
    return trace.table[name].to_pylist()


def refuse(path: Path, fmt: str, *parts: str, **options: object) -> None:
    with pytest.raises(InputError) as error:
        load(path, fmt, **options)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_T2_first_rows_of_the_conversation_trace(shared_traces: Path, tmp_path: Path) -> None:
    lines = (shared_traces / "conversation_trace.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "head.jsonl"
    path.write_text("".join(lines[:40]))
    trace = load(path)
    assert column(trace, "request_id") == list(range(40))
    assert column(trace, "prompt_tokens")[:3] == [6758, 7322, 7236]
    assert set(np.round(np.diff(column(trace, "arrival_s")), 3)) <= {0.0, 2.999, 3.0, 3.001}
    assert trace.block_tokens == 512


def test_T2_odd_rows_are_nothing_special(tmp_path: Path) -> None:
    rows = [
        mooncake_row(0),
        mooncake_row(0, 87_169, 1),
        mooncake_row(3000, 30, 3),
        mooncake_row(5999),
        mooncake_row(5999),
    ]
    trace = load(write_jsonl(tmp_path / "t.jsonl", rows))
    assert column(trace, "arrival_s") == [0.0, 0.0, 3.0, 5.999, 5.999]
    assert column(trace, "prompt_tokens") == [20, 87_169, 30, 20, 20]
    assert column(trace, "output_tokens") == [8, 1, 3, 8, 8]


def test_T3_ties_keep_file_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [mooncake_row(7, p) for p in (40, 10, 30, 20)])
    assert column(load(path), "prompt_tokens") == [40, 10, 30, 20]
    assert column(load(path), "arrival_s") == [0.0] * 4


def test_T4_epoch_timestamps_equal_relative_ones(tmp_path: Path) -> None:
    offsets = [0, 500, 1234, 99_999]
    epoch = load(write_jsonl(tmp_path / "a.jsonl", [mooncake_row(1787000000000 + t) for t in offsets]))
    plain = load(write_jsonl(tmp_path / "b.jsonl", [mooncake_row(t) for t in offsets]))
    assert epoch.table.equals(plain.table)
    assert column(plain, "arrival_s") == [0.0, 0.5, 1.234, 99.999]


def test_T4_epoch_seconds_in_bailian(tmp_path: Path) -> None:
    def rows(origin: float) -> list[dict[str, object]]:
        return [bailian_row(i, -1, origin + t, 20, 5) for i, t in enumerate((0.0, 61.114, 61.2))]

    epoch = load(write_jsonl(tmp_path / "a.jsonl", rows(1787000000.0)), "bailian")
    assert column(epoch, "arrival_s") == [0.0, 61.114, 61.2]
    assert epoch.table.equals(load(write_jsonl(tmp_path / "b.jsonl", rows(0.0)), "bailian").table)


def test_T6_wrong_format_is_refused_by_its_fields(tmp_path: Path) -> None:
    mooncake = write_jsonl(tmp_path / "m.jsonl", [mooncake_row(0)])
    bailian = write_jsonl(tmp_path / "b.jsonl", [bailian_row(1, -1, 0.0, 20, 5)])
    azure = tmp_path / "a.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    refuse(mooncake, "bailian", "a mooncake file, not bailian", "chat_id", "trace=mooncake")
    refuse(bailian, "mooncake", "a bailian file, not mooncake", "chat_id, parent_chat_id, turn", "trace=bailian")
    refuse(azure, "mooncake", "ContextTokens", "trace=azure")
    refuse(mooncake, "azure", "trace=mooncake")
    refuse(mooncake, "parquet", "trace=mooncake")


def test_T6_unit_and_block_follow_from_the_format(tmp_path: Path) -> None:
    moon = load(write_jsonl(tmp_path / "m.jsonl", [mooncake_row(0), mooncake_row(2000)]))
    chat = load(write_jsonl(tmp_path / "b.jsonl", [bailian_row(i, -1, 2.0 * i, 20, 5) for i in (0, 1)]), "bailian")
    assert column(moon, "arrival_s") == column(chat, "arrival_s") == [0.0, 2.0]
    assert (moon.block_tokens, chat.block_tokens) == (512, 16)


def test_T7_block_count(tmp_path: Path) -> None:
    rows = [mooncake_row(0), {"timestamp": 0, "input_length": 20, "output_length": 8, "hash_ids": [0, 1]}]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    refuse(path, "mooncake", f"{path}:2: expected ceil(20/512)=1 hash_ids, found 2", "trace.block_mismatch=drop")
    trace = load(path, block_mismatch="drop")
    assert column(trace, "block_ids") == [[0], None]
    assert trace.provenance["rows"]["dropped_block_ids"] == 1


def test_T10_turns_and_orphans(tmp_path: Path) -> None:
    rows = [
        bailian_row(159, -1, 0.0, 521, 132),
        bailian_row(160, 159, 5.0, 676, 20, 2),
        bailian_row(161, 160, 9.0, 400, 20, 3),
        bailian_row(162, 9999, 11.0, 50, 20, 4),
    ]
    trace = load(write_jsonl(tmp_path / "t.jsonl", rows), "bailian")
    assert column(trace, "prompt_tokens") == [521, 676, 400, 50]
    assert column(trace, "session") == [0, 0, 0, 3]
    assert column(trace, "parent_id") == [None, 0, 1, None]
    assert column(trace, "turn") == [1, 2, 3, 4]
    assert column(trace, "kind") == ["text"] * 4
    assert trace.provenance["rows"]["orphans"] == 1


def test_T10_parents_after_their_children(tmp_path: Path) -> None:
    rows = [bailian_row(3, 2, 9.0, 30, 5, 3), bailian_row(2, 1, 5.0, 30, 5, 2), bailian_row(1, -1, 0.0, 20, 5)]
    trace = load(write_jsonl(tmp_path / "t.jsonl", rows), "bailian")
    assert column(trace, "request_id") == [2, 1, 0]
    assert column(trace, "parent_id") == [None, 2, 1]
    assert column(trace, "session") == [2, 2, 2]
    assert trace.provenance["rows"] == {
        **dict.fromkeys(("dropped_zero_output", "dropped_block_ids", "orphans"), 0),
        "read": 3,
        "out_of_order": 2,
    }


def test_T10_impossible_parents(tmp_path: Path) -> None:
    circle = [bailian_row(1, 2, 0.0, 20, 5), bailian_row(2, 1, 0.0, 20, 5)]
    refuse(write_jsonl(tmp_path / "c.jsonl", circle), "bailian", "leads back")
    itself = write_jsonl(tmp_path / "i.jsonl", [bailian_row(1, 1, 0.0, 20, 5)])
    refuse(itself, "bailian", f"{itself}:1", "its own parent")
    twice = write_jsonl(tmp_path / "d.jsonl", [bailian_row(1, -1, 0.0, 20, 5)] * 2)
    refuse(twice, "bailian", f"{twice}:2", "used before")


def test_T12_shuffled_rows_are_sorted_with_their_lengths(tmp_path: Path) -> None:
    rows = [mooncake_row(1000, 10, 1), mooncake_row(1100, 20, 2), mooncake_row(1300, 30, 3)]
    straight = load(write_jsonl(tmp_path / "a.jsonl", rows))
    shuffled = load(write_jsonl(tmp_path / "b.jsonl", [rows[2], rows[0], rows[1]]))
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "block_ids"):
        assert column(straight, name) == column(shuffled, name)
    assert column(straight, "arrival_s") == [0.0, 0.1, 0.3]
    assert column(shuffled, "request_id") == [1, 2, 0]
    assert shuffled.provenance["rows"]["out_of_order"] == 1


def test_M4_outputs_of_zero_and_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [mooncake_row(0, 20, 1), mooncake_row(5, 20, 0), mooncake_row(9)])
    refuse(path, "mooncake", f"{path}:2: output_length is 0", "trace.zero_output=drop")
    trace = load(path, zero_output="drop")
    assert column(trace, "output_tokens") == [1, 8]
    assert column(trace, "request_id") == [0, 2]
    assert trace.provenance["rows"]["dropped_zero_output"] == 1


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('\n{"timestamp":0,"input_length":20,"output_length":8}\n\n{"timestamp":0,"input_length":20}\n')
    refuse(path, "mooncake", f"{path}:4: no field output_length")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"timestamp": 0, "input_len', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"timestamp": "soon", "input_length": 2, "output_length": 1}', "timestamp is 'soon'"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 1}', "timestamp is nan"),
        ('{"timestamp": 1e300, "input_length": 2, "output_length": 1}', "timestamp is 1e+300"),
        ('{"timestamp": 0, "input_length": 2.5, "output_length": 1}', "input_length is 2.5"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "input_length is True"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "input_length is 0"),
        ('{"timestamp": 0, "input_length": 2, "output_length": -1}', "output_length is -1"),
        ('{"timestamp": 0, "input_length": 99999999999999999999, "output_length": 1}', "input_length is 9999"),
        ('{"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": ["a"]}', "hash_ids is no list"),
        ('{"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": 5}', "hash_ids is no list"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path: Path, line: str, part: str) -> None:
    path = tmp_path / "t.jsonl"
    good = '{"timestamp": 0, "input_length": 20, "output_length": 8, "hash_ids": [0]}\n'
    path.write_text(good * 3 + line + "\n" + good)
    refuse(path, "mooncake", f"{path}:4:", part)


def test_X1_paths_that_hold_no_trace(tmp_path: Path) -> None:
    refuse(tmp_path / "nope.jsonl", "mooncake", "no such file", "trace.path")
    refuse(tmp_path, "mooncake", "is a directory")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n \n")
    binary = tmp_path / "binary.bin"
    binary.write_bytes(bytes(range(256)) * 10)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"caf\xe9": 1}\n')
    for fmt in ("mooncake", "bailian", "azure", "parquet"):
        refuse(empty, fmt, "empty")
        refuse(blank, fmt, "empty")
        refuse(binary, fmt, "binary")
        refuse(latin, fmt, "binary")
    pointer = tmp_path / "pointer.jsonl"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuse(pointer, "bailian", "Git LFS pointer")
    only_dropped = write_jsonl(tmp_path / "zero.jsonl", [mooncake_row(0, 20, 0)])
    refuse(only_dropped, "mooncake", "no requests", zero_output="drop")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "hi"}\n')
    refuse(other, "mooncake", f"{other}:1: no field timestamp", "input_length")


def test_X1_settings(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [mooncake_row(0)])
    for options, part in (
        ({"limit": 0}, "trace.limit=0"),
        ({"limit": "ten"}, "trace.limit=ten"),
        ({"window": [5, 1]}, "trace.window=[5, 1]"),
        ({"window": 5}, "trace.window=5"),
        ({"window": ["a", "b"]}, "trace.window"),
        ({"sample": 0}, "trace.sample=0"),
        ({"sample": 1.5}, "trace.sample=1.5"),
        ({"zero_output": "keep"}, "trace.zero_output=keep"),
        ({"block_mismatch": "x"}, "error, drop"),
        ({"window": [10, 20]}, "no request"),
    ):
        refuse(path, "mooncake", part, **options)
    with pytest.raises(InputError, match=re.escape("trace.path is not set")):
        FileTrace("mooncake").load()
    with pytest.raises(InputError, match="azure, bailian, mooncake, parquet"):
        FileTrace("csv", str(path)).load()


def test_gzip_reads_the_same_and_damage_is_named(tmp_path: Path) -> None:
    rows = [mooncake_row(i, 600 + i) for i in range(2000)]
    plain = write_jsonl(tmp_path / "t.jsonl", rows)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load(packed).table.equals(load(plain).table)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(packed.read_bytes()[:-200])
    refuse(cut, "mooncake", "damaged gzip")


def test_streams_in_batches_of_the_schema(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [mooncake_row(i, 512 * 20) for i in range(20_000)])
    seen: list[tuple[int, float, float]] = []
    reader = MooncakeReader(path, ReadOptions(progress=lambda *report: seen.append(report)))
    batches = list(reader.batches())
    assert len(batches) > 1
    assert all(batch.schema.equals(SCHEMA) for batch in batches)
    assert sum(batch.num_rows for batch in batches) == 20_000 == reader.counts.read
    rows, rate, share = seen[-1]
    assert (rows, share) == (20_000, 1.0)
    assert rate > 0


def test_block_ids_load_only_when_needed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [mooncake_row(i, 5000) for i in range(500)])
    full, light = FileTrace("mooncake", str(path)).load(), FileTrace("mooncake", str(path)).load(block_ids=False)
    assert light.table["block_ids"].null_count == 500
    assert light.table.drop_columns("block_ids").equals(full.table.drop_columns("block_ids"))
    assert full.table.nbytes < 1.5 * path.stat().st_size


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805901,10,1\n"
    )
    trace = load(path, "azure")
    assert column(trace, "arrival_s") == [0.0, 1e-7, 4.314579]
    assert column(trace, "prompt_tokens") == [374, 10, 396]
    assert trace.block_tokens == 0
    assert trace.table["block_ids"].null_count == 3


def test_azure_2024_zone_order_and_faults(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    header = "id,ContextTokens,TIMESTAMP,GeneratedTokens\n"
    path.write_text(header + "x,5,2024-05-10 00:00:00.009930+00:00,7\ny,6,2024-05-10 00:00:01.009930+00:00,8\n")
    assert column(load(path, "azure"), "output_tokens") == [7, 8]
    path.write_text(header + "x,5,2024-05-10 00:00:00,7\ny,six,2024-05-10 00:00:01,8\n")
    refuse(path, "azure", f"{path}:3:", "no azure row")
    path.write_text(header + "x,5,2024-05-10 00:00:00,0\n")
    refuse(path, "azure", f"{path}:2: GeneratedTokens is 0", "zero_output=drop")
    path.write_text("TIMESTAMP,ContextTokens\n2024-05-10,5\n")
    refuse(path, "azure", f"{path}:1: no column GeneratedTokens")


def test_real_traces(shared_traces: Path) -> None:
    trace = load(shared_traces / "conversation_trace.jsonl")
    assert len(trace) == 12_031
    assert float(np.mean(column(trace, "prompt_tokens"))) == pytest.approx(12_035.06, abs=0.01)
    assert column(trace, "arrival_s")[-1] == 3536.999
    assert trace.table.nbytes < 1.5 * (shared_traces / "conversation_trace.jsonl").stat().st_size
    assert trace.provenance["sha256"].startswith("b8cbb061a85206d7")


def test_bailian_batches_are_canonical_too(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", [bailian_row(i, -1, 0.5 * i, 20, 5) for i in range(10)])
    (batch,) = BailianReader(path).batches()
    assert pa.Table.from_batches([batch])["arrival_s"].to_pylist() == [0.5 * i for i in range(10)]
