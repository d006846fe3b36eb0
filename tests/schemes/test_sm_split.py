"""Conflux's attention stage: how its two paths share the SMs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheme_cases import column, loop_rows, replay, simulation

from confsim.errors import InputError
from confsim.latency.affine import AffineLatency
from confsim.latency.share import SmShares
from confsim.schemes.cost import beside, in_turn, overlapped
from confsim.schemes.sm_split import Adaptive, attention_stage, fluid
from confsim.specs import GpuSpec

H100 = GpuSpec("h100_sxm", 85520809984, 3.35e12, 9.89e14, 4.5e11, 132)
LAW = AffineLatency(prefill_slowdown=2.0, decode_slowdown=1.25)
ADAPTIVE = Adaptive(SmShares(), H100)
seconds = st.floats(0.0, 0.2)


@pytest.mark.parametrize(
    ("communication", "prefill", "decode", "stage"),
    [
        (0.0, 0.0, 0.010, 0.010),  # alone: the whole GPU
        (0.004, 0.020, 0.0, 0.024),
        # decode ends at 10 ms: 8 ms of attention beside it did 4 ms of its work, 16 ms are left
        (0.004, 0.020, 0.008, 0.004 + 0.020 + 0.004),
        # prefill ends at 4 + 2 * 8 = 20 ms: decode has done 16 ms of 40, 24 ms are left
        (0.004, 0.008, 0.040, 0.044),
        # decode ends during the first all-to-all: prefill attention has the whole GPU
        (0.020, 0.010, 0.008, 0.030),
        # decode ends at 30 ms, during the second all-to-all
        (0.020, 0.010, 0.024, 0.040),
    ],
)
def test_fluid_by_hand(communication: float, prefill: float, decode: float, stage: float) -> None:
    assert fluid(communication, prefill, decode, LAW) == pytest.approx(stage)


def brute_force(communication: float, prefill: float, decode: float) -> float:
    best = communication + prefill + decode
    for sms in range(8, 125, 8):
        decode_s = decode / SmShares().speeds(H100, sms).decode_attention
        prefill_s = prefill / SmShares().speeds(H100, 132 - sms).prefill_attention
        best = min(best, max(communication + prefill_s, decode_s))
    return best


@given(seconds, seconds, seconds)
def test_adaptive_finds_the_shortest_of_all_splits(communication: float, prefill: float, decode: float) -> None:
    found = ADAPTIVE(communication, prefill, decode, LAW)
    assert found == pytest.approx(brute_force(communication, prefill, decode), rel=1e-12)
    assert found <= in_turn(communication, prefill, decode, LAW)


def test_adaptive_runs_in_turn_where_every_split_is_slower() -> None:
    assert ADAPTIVE(0.0, 1.0, 0.01, LAW) == pytest.approx(1.01)


@given(seconds, seconds, seconds, seconds, st.sampled_from([overlapped, fluid, ADAPTIVE]))
def test_stages_are_monotone_and_continuous(a: float, b: float, c: float, more: float, stage: object) -> None:
    assert callable(stage)
    here = stage(a, b, c, LAW)
    slack = 1e-12
    for there in (stage(a + more, b, c, LAW), stage(a, b + more, c, LAW), stage(a, b, c + more, LAW)):
        assert here <= there + slack
    tiny = 1e-9
    for near in (stage(a + tiny, b, c, LAW), stage(a, b + tiny, c, LAW), stage(a, b, c + tiny, LAW)):
        assert near - here <= 30 * tiny


@pytest.mark.parametrize(
    ("communication", "prefill", "decode", "stage"),
    [
        (0.004, 0.010, 0.016, 0.024),  # the prefill path, 4 + 2 * 10
        (0.001, 0.004, 0.016, 0.020),  # the decode path, 1.25 * 16
        (0.004, 0.020, 0.016, 0.040),  # 44 ms beside each other: in turn
        (0.000, 0.001, 0.040, 0.041),  # 50 ms beside each other: in turn
        (0.004, 0.020, 0.000, 0.024),
        (0.000, 0.000, 0.016, 0.016),
    ],
)
def test_overlapped_by_hand(communication: float, prefill: float, decode: float, stage: float) -> None:
    assert overlapped(communication, prefill, decode, LAW) == pytest.approx(stage)


@given(seconds, seconds, seconds)
def test_overlapped_is_the_shorter_of_beside_and_in_turn(a: float, b: float, c: float) -> None:
    found = overlapped(a, b, c, LAW)
    assert found == min(beside(a, b, c, LAW), in_turn(a, b, c, LAW))
    assert found >= max(a + b, c)


@given(seconds, seconds, seconds)
def test_fluid_is_never_slower_than_holding_the_partitions(a: float, b: float, c: float) -> None:
    assert fluid(a, b, c, LAW) <= overlapped(a, b, c, LAW) + 1e-12


def test_paper_is_the_default_and_unknown_values_are_refused() -> None:
    assert attention_stage("paper", SmShares(), H100) is overlapped
    with pytest.raises(InputError, match="paper, fluid, adaptive"):
        attention_stage("best", SmShares(), H100)


def test_one_mixed_iteration_of_conflux_by_hand() -> None:
    """A decode of context 2001 beside a chunk of 4000 over 4 groups: what the stages make of the same two paths."""
    rows = [(0.0, 2000, 50), (0.2, 4000, 1)]
    linear, head = 0.008 + 40e-6 * 1001, 0.0005 + 2e-6 * 2
    communication, prefill = 0.002 + 4e-6 * 1000, 4e-9 * 4000 * 2000 / 4
    for sm_split in ("paper", "fluid", "adaptive"):
        sim = simulation(
            f"scheme.sm_split={sm_split}", "slo.tbt_s=1.0", "cluster.gpus=4", prefill_slowdown=2.0, decode_slowdown=1.25
        )
        result = replay(sim, rows)
        mixed = [row for row in loop_rows(result, "conflux") if row["prefill_tokens"] and row["decode_tokens"]]
        assert len(mixed) == 1
        decode = 0.001 + 1e-6 * mixed[0]["context_tokens"]
        stage = {"paper": overlapped, "fluid": fluid, "adaptive": ADAPTIVE}[sm_split]
        took = mixed[0]["end_s"] - mixed[0]["start_s"]
        assert took == pytest.approx(linear + head + stage(communication, prefill, decode, LAW))
        assert column(result, "status") == ["completed"] * 2


@pytest.mark.parametrize(("split", "slowdown", "count"), [("paper", 2.0, 1), ("fluid", 9.0, 0), ("paper", 1.2, 0)])
def test_iterations_run_in_turn_are_counted(split: str, slowdown: float, count: int) -> None:
    """The chunk of 4000: 6 ms of communication and 8 ms of attention beside about 3 ms of decode attention."""
    rows = [(0.0, 2000, 50), (0.2, 4000, 1)]
    sim = simulation(
        f"scheme.sm_split={split}", "slo.tbt_s=1.0", "cluster.gpus=4", prefill_slowdown=slowdown, decode_slowdown=1.0
    )
    assert replay(sim, rows).summary["in_turn_iterations"] == count
