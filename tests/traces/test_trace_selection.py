"""Limit, window and whole-session sampling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from trace_builders import bailian_row, make_trace, mooncake_row, write_jsonl

from traces.select import Selection, sample_sessions
from traces.source import FileTrace


def two_sessions(tmp_path: Path) -> Path:
    rows = [
        bailian_row(3 * s + t, 3 * s + t - 1 if t else -1, t + s / 2, 40, 5, t + 1) for t in range(3) for s in (0, 1)
    ]
    return write_jsonl(tmp_path / "sessions.jsonl", rows)


def test_T13_sessions_are_kept_or_dropped_whole(tmp_path: Path) -> None:
    trace = FileTrace("bailian", str(two_sessions(tmp_path)), sample=0.5).load(seed=1)
    assert len(trace) == 3
    assert len(set(trace.table["session"].to_pylist())) == 1
    assert trace.provenance["selection"]["sample"] == {
        "share": 0.5,
        "seed": 1,
        "sessions": "1 of 2",
        "requests": "3 of 6",
    }
    assert trace.provenance["selection"]["kept"] == "3 of 6"
    assert trace.table["arrival_s"][0].as_py() == 0.0


@given(seed=st.integers(0, 2**32), low=st.floats(0.01, 1), high=st.floats(0.01, 1))
def test_T13_samples_are_nested_across_shares(seed: int, low: float, high: float) -> None:
    sessions = pa.array(np.random.default_rng(0).integers(0, 40, 200))
    table = make_trace([float(i) for i in range(200)], session=sessions).table
    small, large = (sample_sessions(table, share, seed)[0] for share in sorted((low, high)))
    kept = set(small["request_id"].to_pylist())
    assert kept <= set(large["request_id"].to_pylist())
    own = set(small["session"].to_pylist())
    assert kept == {i for i, s in enumerate(sessions.to_pylist()) if s in own}


def test_sampling_differs_by_seed_and_repeats() -> None:
    table = make_trace([float(i) for i in range(100)]).table
    first, second = (sample_sessions(table, 0.2, seed)[0]["request_id"].to_pylist() for seed in (1, 2))
    assert first != second
    assert first == sample_sessions(table, 0.2, 1)[0]["request_id"].to_pylist()


def test_T21_all_rows_in_file_order_without_a_count(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [mooncake_row(i * 10, 100 + i) for i in range(30)])
    trace = FileTrace("mooncake", str(path)).load()
    assert trace.table["request_id"].to_pylist() == list(range(30))
    assert trace.provenance["selection"] == {}
    cut = FileTrace("mooncake", str(path), limit=12).load()
    assert cut.table["request_id"].to_pylist() == list(range(12))
    assert cut.provenance["selection"] == {"limit": "12 of 30", "kept": "12 of 30"}
    whole = FileTrace("mooncake", str(path), limit=99).load()
    assert whole.provenance["selection"] == {"limit": "30 of 30"}


def test_window_is_half_open_and_rebased() -> None:
    table = make_trace([0.0, 1.0, 1.5, 2.0, 3.0]).table
    kept, done = Selection(window=[1, 2]).apply(table, 0)
    assert kept["request_id"].to_pylist() == [1, 2]
    assert kept["arrival_s"].to_pylist() == [0.0, 0.5]
    assert done["window"] == {"start_s": 1.0, "end_s": 2.0, "kept": "2 of 5"}
    tail, done = Selection(window=[1.5, None]).apply(table, 0)
    assert tail["request_id"].to_pylist() == [2, 3, 4]
    assert done["window"]["end_s"] is None


def test_limit_comes_before_window() -> None:
    table = make_trace([0.0, 1.0, 2.0, 3.0]).table
    kept, done = Selection(limit=3, window=[2, None]).apply(table, 0)
    assert kept["request_id"].to_pylist() == [2]
    assert (done["limit"], done["window"]["kept"], done["kept"]) == ("3 of 4", "1 of 3", "1 of 4")
