"""Chrome trace events of a result."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest
from factory import make_iterations, make_result

from analysis.pages.timeline import write_timeline
from confsim.errors import InputError


def read(path: Path) -> dict:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def test_groups_are_tracks_and_iterations_have_prefill_and_decode_parts(tmp_path: Path):
    result = make_result(iterations=3, groups=2)
    write_timeline(tmp_path / "t.json.gz", result)
    content = read(tmp_path / "t.json.gz")
    events = content["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"iterations", "group 0 prefill", "group 0 decode", "group 1 prefill", "group 1 decode"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"instance 0, main"}
    slices = [event for event in events if event["ph"] == "X"]
    row = result.iterations.to_pylist()[1]
    group = [
        event for event in slices if event["tid"] == 3 and event["name"] == f"prefill {row['prefill_per_group'][1]}"
    ]
    assert group[0]["ts"] == pytest.approx(row["start_s"] * 1e6, abs=0.001)
    assert group[0]["dur"] == pytest.approx((row["end_s"] - row["start_s"]) * 1e6, abs=0.002)
    whole = [event for event in slices if event["tid"] == 0]
    assert len(whole) == 3
    assert whole[1]["args"]["queued"] == row["queued"]
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "KV in use"]
    assert [event["args"]["blocks"] for event in counters] == result.iterations["kv_used_blocks"].to_pylist()


def test_no_slice_overlaps_the_next_one_of_its_track(tmp_path: Path):
    write_timeline(tmp_path / "t", make_result(iterations=5000, groups=2))
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in read(tmp_path / "t")["traceEvents"]:
        if event["ph"] == "X":
            start, length = (round(event[key] * 1000) for key in ("ts", "dur"))  # nanoseconds
            tracks.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    assert len(tracks) == 5 and len(tracks[1, 0]) == 5000
    for slices in tracks.values():
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(slices)))


def test_equal_results_give_equal_bytes(tmp_path: Path):
    for name in ("a", "b"):
        write_timeline(tmp_path / name, make_result())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_limit_is_named(tmp_path: Path):
    write_timeline(tmp_path / "t", make_result(iterations=50), limit=10)
    content = read(tmp_path / "t")
    assert content["otherData"]["iterations"] == "10 of 50"
    assert sum(event["ph"] == "X" and event["tid"] == 0 for event in content["traceEvents"]) == 10
    with pytest.raises(InputError, match="timeline_iterations=0"):
        write_timeline(tmp_path / "t", make_result(), limit=0)


def test_several_loops_are_several_processes(tmp_path: Path):
    import numpy as np

    result = make_result(iterations=4)
    prefill = make_iterations(4, 1, np.random.default_rng(1), loop="prefill")
    both = type(result)(result.summary, result.requests, pa.concat_tables([result.iterations, prefill]))
    write_timeline(tmp_path / "t", both)
    events = read(tmp_path / "t")["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "instance 0, main",
        "instance 0, prefill",
    }
    assert {event["pid"] for event in events} == {1, 2}


def test_no_iterations(tmp_path: Path):
    result = make_result(iterations=1)
    empty = type(result)(result.summary, result.requests, result.iterations.slice(0, 0))
    write_timeline(tmp_path / "t", empty)
    assert read(tmp_path / "t")["traceEvents"] == []
