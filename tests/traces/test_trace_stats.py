"""Trace statistics, prefix identity and the terminal table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from trace_builders import make_trace

from traces.prefix import chained_ids, reusable_blocks
from traces.source import FileTrace
from traces.stats import TraceStats, describe, stats_table
from traces.synthesis import SyntheticTrace
from traces.trace import Trace


def stats_text(stats: TraceStats, width: int = 100) -> str:
    """The table as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(stats_table(stats))
    return out.getvalue()


LISTS = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=12)


@given(LISTS)
def test_chained_ids_are_equal_where_prefixes_are(lists: list[list[int]]) -> None:
    chained = chained_ids(pa.array(lists, pa.list_(pa.int64()))).to_pylist()
    meaning: dict[int, tuple[int, ...]] = {}
    for ids, hashes in zip(lists, chained, strict=True):
        assert len(ids) == len(hashes)
        for length, value in enumerate(hashes, 1):
            assert meaning.setdefault(value, tuple(ids[:length])) == tuple(ids[:length])
    assert len(set(meaning.values())) == len(meaning)


@given(LISTS)
def test_reusable_blocks_are_those_of_an_unbounded_cache(lists: list[list[int]]) -> None:
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for ids in lists:
        prefixes = [tuple(ids[: k + 1]) for k in range(len(ids))]
        hits += sum(p in seen for p in prefixes)
        seen.update(prefixes)
    assert reusable_blocks(pa.array(lists, pa.list_(pa.int64()))) == (hits, sum(map(len, lists)))


def test_same_content_after_another_beginning_is_not_shared() -> None:
    assert reusable_blocks(pa.array([[1, 9], [2, 9], [9], [1, 9]])) == (2, 7)


def test_null_ids_stay_null() -> None:
    chained = chained_ids(pa.chunked_array([[[1, 2], None], [[1]]], pa.list_(pa.int64())))
    assert chained[1].as_py() is None
    assert chained[0].as_py()[0] == chained[2].as_py()[0]


def test_describe_the_conversation_trace(shared_traces: Path) -> None:
    stats = describe(FileTrace("mooncake", str(shared_traces / "conversation_trace.jsonl")).load())
    assert stats.requests == 12_031
    assert stats.rate == pytest.approx(12_030 / 3536.999)
    assert (stats.prompt_tokens.p50, stats.prompt_tokens.max) == (6909, 126_195)
    assert stats.output_tokens.mean == pytest.approx(342.619, abs=1e-3)
    assert stats.one_token_outputs == 72
    assert stats.prefixes is not None
    assert stats.prefixes.reusable_share == pytest.approx(0.36641, abs=1e-5)
    assert stats.burstiness.tick_s == pytest.approx(3.0, abs=1e-6)
    assert stats.burstiness.coarse
    assert stats.burstiness.requests_per_tick == pytest.approx(10.196, abs=1e-3)
    assert stats.sessions is None
    assert not stats.synthetic


def test_describe_a_small_trace() -> None:
    sessions = pa.array([0, 0, 2, 3])
    base = make_trace([0.0, 1.0, 2.0, 3.0], prompt=[16, 32, 48, 64], output=[1, 2, 3, 4], session=sessions)
    ids = pa.array([[1], [1, 2], [1, 2, 3], [7, 2, 3, 4]], pa.list_(pa.int64()))
    table = base.table.set_column(4, base.table.schema.field(4), ids)
    stats = describe(Trace(table, 16, base.provenance))
    assert (stats.span_s, stats.rate) == (3.0, 1.0)
    assert stats.burstiness.gap_cv == 0.0
    assert not stats.burstiness.coarse
    assert stats.prompt_tokens.mean == 40
    assert stats.prompt_tokens.p50 == 40
    assert stats.output_tokens.total == 10
    assert stats.prefixes is not None
    assert (stats.prefixes.reusable, stats.prefixes.blocks) == (3, 10)
    assert stats.sessions is not None
    assert (stats.sessions.sessions, stats.sessions.multi_turn, stats.sessions.max_turns) == (3, 1, 2)


def test_describe_one_request_and_one_instant() -> None:
    for arrivals in ([0.0], [0.0, 0.0, 0.0]):
        stats = describe(make_trace(arrivals))
        assert (stats.rate, stats.burstiness.gap_cv, stats.burstiness.tick_s) == (None, None, None)
        assert "all at one instant" in stats_text(stats)


def test_plain_data_and_table() -> None:
    trace = SyntheticTrace("toolagent", 500, limit=400, sample=0.5).load(1)
    stats = describe(trace)
    data = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    assert data["synthetic"] is True
    assert data["kinds"].keys() == {"tool_a", "tool_b", "conversation"}
    text = stats_text(stats)
    for part in ("toolagent (synthetic)", "reusable prefix", "of 500", "400 of 500", "ticks of 3.053 s", "seed 1"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100
    assert np.isfinite(data["rate"])
