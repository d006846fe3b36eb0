"""Arrival modes: times, rates, labels, contradictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_builders import bailian_row, make_trace, mooncake_row, write_jsonl

from traces.arrivals import ClosedLoop, Gamma, OpenArrivals, Poisson, Recorded, Spread, native_rate
from traces.errors import InputError
from traces.source import FileTrace

OPEN: list[OpenArrivals] = [Recorded(), Spread(), Spread(within="random"), Poisson(), Gamma(cv=3.0)]


def test_recorded_keeps_the_times_and_scales_by_the_rate() -> None:
    trace = make_trace([0.0, 0.1, 0.3])
    assert Recorded().apply(trace, None, 0).arrival_s.tolist() == [0.0, 0.1, 0.3]
    native = 2 / 0.3
    doubled = Recorded().apply(trace, 2 * native, 0)
    assert doubled.arrival_s == pytest.approx([0.0, 0.05, 0.15])
    assert doubled.rate == 2 * native
    assert doubled.label == f"recorded, {2 * native:.4g} req/s"


def test_T12_offset_removed_then_intervals_halved(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [mooncake_row(t) for t in (1300, 1000, 1100)])
    trace = FileTrace("mooncake", str(path)).load()
    load = Recorded().apply(trace, 2 * (2 / 0.3), 0)
    assert load.arrival_s == pytest.approx([0.0, 0.05, 0.15], abs=1e-12)


def test_T4_epoch_offset_changes_no_arrival(tmp_path: Path) -> None:
    loads = []
    for origin in (0, 1787000000000):
        path = write_jsonl(tmp_path / f"{origin}.jsonl", [mooncake_row(origin + t) for t in (0, 500, 777)])
        loads.append(Spread().apply(FileTrace("mooncake", str(path)).load(), 3.0, 0).arrival_s)
    assert np.array_equal(loads[0], loads[1])


def test_T3_spread_is_even_in_file_order_and_recorded() -> None:
    trace = make_trace([0.0, 0.0, 0.0, 3.0, 3.0, 9.0], prompt=[1, 2, 3, 4, 5, 6])
    load = Spread().apply(trace, None, 0)
    assert load.arrival_s == pytest.approx([0.0, 1.0, 2.0, 3.0, 6.0, 9.0])
    assert load.mode == "spread"
    assert load.provenance["within"] == "even"
    assert load.provenance["spread_requests"] == 3
    assert np.array_equal(Spread().apply(trace, None, 7).arrival_s, load.arrival_s)


def test_spread_gives_the_last_tick_the_median_width() -> None:
    load = Spread().apply(make_trace([0.0, 2.0, 4.0, 9.0, 9.0]), None, 0)
    assert load.arrival_s == pytest.approx([0.0, 2.0, 4.0, 9.0, 10.0])
    scaled = Spread().apply(make_trace([0.0, 2.0, 4.0, 9.0, 9.0]), 0.8, 0)
    assert scaled.arrival_s == pytest.approx([0.0, 1.0, 2.0, 4.5, 5.0])
    assert native_rate(scaled.arrival_s) == pytest.approx(0.8)


def test_T3_random_spread_is_seeded_and_sorted() -> None:
    trace = make_trace([0.0] * 5 + [3.0] * 5)
    mode = Spread(within="random")
    first = mode.apply(trace, None, 1)
    assert np.array_equal(first.arrival_s, mode.apply(trace, None, 1).arrival_s)
    assert not np.array_equal(first.arrival_s, mode.apply(trace, None, 2).arrival_s)
    assert (np.diff(first.arrival_s) > 0).all()
    assert first.provenance["seed"] == 1


def test_T3_one_timestamp_alone_stays_together() -> None:
    trace = make_trace([5.0, 5.0, 5.0, 5.0], prompt=[4, 1, 3, 2])
    for mode in (Recorded(), Spread()):
        load = mode.apply(trace, None, 0)
        assert load.arrival_s.tolist() == [0.0] * 4
        assert load.rate is None
        with pytest.raises(InputError, match="share one timestamp"):
            mode.apply(trace, 2.0, 0)
    with pytest.raises(InputError, match="needs a rate"):
        Poisson().apply(trace, None, 0)


@pytest.mark.parametrize("mode", OPEN, ids=lambda m: type(m).__name__)
@given(seed=st.integers(0, 1000), rate=st.floats(0.001, 1000))
def test_open_modes_ascend_from_zero_and_scale_exactly(mode: OpenArrivals, seed: int, rate: float) -> None:
    trace = make_trace([0.0, 0.0, 1.0, 3.0, 3.0, 3.5])
    load = mode.apply(trace, rate, seed)
    assert load.arrival_s[0] == 0.0
    assert (np.diff(load.arrival_s) >= 0).all()
    assert load.rate == rate
    assert load.arrival_s == pytest.approx(mode.apply(trace, 1.0, seed).arrival_s / rate, rel=1e-9)


def test_poisson_and_gamma_have_their_rate_and_variation() -> None:
    trace = make_trace([float(i) for i in range(40_000)])
    for mode, cv in ((Poisson(), 1.0), (Gamma(cv=2.0), 2.0), (Gamma(cv=0.5), 0.5)):
        gaps = np.diff(mode.apply(trace, 5.0, 3).arrival_s)
        assert gaps.mean() == pytest.approx(0.2, rel=0.04)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)
    own = Poisson().apply(trace, None, 0)
    assert own.rate == 1.0
    assert not own.provenance["rate_given"]


def test_closed_loop() -> None:
    load = ClosedLoop(concurrency=3).apply(make_trace([0.0, 1.0, 2.0]), None, 0)
    assert (load.concurrency, load.rate, load.label) == (3, None, "closed_loop, 3 in flight")
    assert load.arrival_s.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("mode", "rate", "part"),
    [
        (ClosedLoop(), 3.0, "rate=3.0 contradicts arrivals=closed_loop"),
        (ClosedLoop(concurrency=0), None, "arrivals.concurrency=0"),
        (Recorded(think_s=2.0), None, "arrivals.think_s=2.0 contradicts arrivals.sessions=open"),
        (Recorded(sessions="closed", think_s=-1.0), None, "arrivals.think_s=-1.0"),
        (Recorded(sessions="shut"), None, "open, closed"),
        (Gamma(cv=0), 1.0, "arrivals.cv=0"),
        (Gamma(cv="high"), 1.0, "arrivals.cv=high"),  # type: ignore[arg-type]
        (Spread(within="odd"), None, "even, random"),
        (Poisson(), -1.0, "rate=-1.0"),
        (Poisson(), 0, "rate=0"),
        (Recorded(), float("nan"), "rate=nan"),
        (Recorded(), "abc", "rate=abc"),
    ],
)
def test_T17_contradictions_are_errors_before_anything_runs(mode: OpenArrivals, rate: float, part: str) -> None:
    with pytest.raises(InputError) as error:
        mode.check(rate)
    assert part in str(error.value)
    with pytest.raises(InputError):
        mode.apply(make_trace([0.0, 1.0]), rate, 0)


def test_T17_labels_name_what_ran() -> None:
    trace = make_trace([0.0, 1.0, 2.0])
    assert Gamma(cv=2.5).apply(trace, 4.0, 0).label == "gamma, cv 2.5, 4 req/s"
    assert Poisson().apply(trace, None, 0).label == "poisson, 1 req/s"
    closed = Recorded(sessions="closed").apply(trace, None, 0)
    assert closed.label == closed.provenance["label"] == "recorded, 1 req/s, closed sessions"


def turns(tmp_path: Path, gap_s: float = 2.0) -> FileTrace:
    rows = [bailian_row(1, -1, 0.0, 30, 5), bailian_row(9, -1, 1.0, 30, 5), bailian_row(2, 1, gap_s, 30, 5, 2)]
    return FileTrace("bailian", str(write_jsonl(tmp_path / "t.jsonl", rows)))


def test_T11_open_sends_a_turn_as_recorded(tmp_path: Path) -> None:
    load = Recorded().apply(turns(tmp_path).load(), None, 0)
    assert load.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert load.think_s is None
    assert load.parent_row is None
    assert load.provenance["sessions"] == "open"


def test_T11_closed_sends_it_after_its_parent(tmp_path: Path) -> None:
    trace = turns(tmp_path).load()
    load = Recorded(sessions="closed").apply(trace, 4.0, 0)
    assert load.parent_row is not None
    assert load.think_s is not None
    assert load.parent_row.tolist() == [-1, -1, 0]
    assert load.think_s.tolist() == [0.0, 0.0, 2.0]  # the recorded gap, whatever the rate
    assert load.provenance["turns_after_parent"] == 1
    given_think = Recorded(sessions="closed", think_s=7.5).apply(trace, None, 0)
    assert given_think.think_s is not None
    assert given_think.think_s.tolist() == [0.0, 0.0, 7.5]


def test_T10_parents_outside_the_trace_make_roots() -> None:
    parents = pa.array([None, 77, 0], pa.int64())
    load = Recorded(sessions="closed").apply(make_trace([0.0, 1.0, 2.0], parent_id=parents), None, 0)
    assert load.parent_row is not None
    assert load.parent_row.tolist() == [-1, -1, 0]


def test_spread_of_the_conversation_trace(shared_traces: Path) -> None:
    trace = FileTrace("mooncake", str(shared_traces / "conversation_trace.jsonl")).load(block_ids=False)
    load = Spread().apply(trace, 3.0, 0)
    assert (np.diff(load.arrival_s) > 0).all()
    assert native_rate(load.arrival_s) == pytest.approx(3.0)
