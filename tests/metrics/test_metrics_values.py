"""What the reported numbers mean."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import random_case
from reference import Reference
from simulator_harness import ORDERS, SCHEMES, Case, closed_load, column, latency

from confsim.errors import InputError
from confsim.outcome.metrics import quantile, statistics
from confsim.outcome.slo import Slo
from confsim.run.engine import Window

LAW = latency(linear_base_s=0.01)


def steps(*seconds: float) -> dict[str, object]:
    """A law by which a prompt of 100 takes the first of two times and a decode the second."""
    prefill, decode = seconds
    return {"latency": latency(linear_base_s=decode, prefill_base_s=prefill - decode), "scheme": "chunked_prefill"}


def test_m1_by_hand() -> None:
    """M1: prefill 100 ms, decode 10 ms, 3 outputs: TTFT 100, gaps 10 and 10, end to end 120."""
    result = Case([(0.0, 100, 3)], slo=Slo(2.0, 0.2), **steps(0.1, 0.01)).run()  # type: ignore[arg-type]
    assert column(result, "ttft_s") == [pytest.approx(0.1)]
    assert column(result, "max_gap_s") == [pytest.approx(0.01)]
    assert column(result, "tpot_s") == [pytest.approx(0.01)]
    assert column(result, "e2e_s") == [pytest.approx(0.12)]
    assert column(result, "first_token_s") == [pytest.approx(0.1)]
    assert column(result, "finish_s") == [pytest.approx(0.12)]
    assert result.summary["gap_s"]["count"] == 2


def test_m3_preemption() -> None:
    """M3: preempted after its 6th token: TTFT of the real first token, one long gap, no token twice."""
    rows = [(0.0, 20, 30), (0.001, 19, 20)]
    case = Case(rows, "chunked_prefill", latency=LAW, gpus=1, block_tokens=1, capacity_tokens=52)
    result = case.run(check=True)
    assert column(result, "preemptions") == [0, 1]
    assert column(result, "emitted_tokens") == [30, 20]
    assert result.summary["tokens"]["emitted"] == 50
    ttft = column(result, "ttft_s")
    assert ttft[1] == pytest.approx(0.03 - 0.001), "the iteration that runs, the one that is planned, and its own"
    # The second is preempted when 20 + n + 19 + n - 1 tokens are too many, and waits until the first has ended.
    gap = column(result, "max_gap_s")[1]
    assert gap > 0.15
    finish = column(result, "finish_s")
    others = [end - start for start, end in pairwise(result.iterations["end_s"].to_pylist())]
    assert finish[1] == pytest.approx(0.03 + gap + 18 * 0.01), "one long gap, the others are single steps"
    assert max(others) == pytest.approx(0.01)
    assert result.summary["requests"]["preempted"] == 1
    assert result.summary["gap_s"]["count"] == 29 + 19


def test_m3_reason() -> None:
    """A request that missed and was preempted says so."""
    rows = [(0.0, 20, 30), (0.001, 19, 20)]
    case = Case(rows, "chunked_prefill", latency=LAW, gpus=1, block_tokens=1, capacity_tokens=52, slo=Slo(2.0, 0.05))
    result = case.run()
    assert column(result, "missed_by") == [None, "preempted"]
    assert result.summary["missed_by"]["preempted"] == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_m4_one_token(scheme: str) -> None:
    """M4: an output of 1 has no gap and is judged on TTFT, beside a normal request."""
    result = Case([(0.0, 50, 1), (0.1, 50, 5), (0.3, 50, 1)], scheme, latency=LAW, slo=Slo(0.005, 0.1)).run()
    assert column(result, "max_gap_s") == [None, pytest.approx(0.01), None]
    assert column(result, "tpot_s") == [None, pytest.approx(0.01), None]
    assert column(result, "attained") == [False] * 3
    assert column(result, "missed_by") == ["prefill"] * 3
    result = Case([(0.0, 50, 1)], scheme, latency=LAW, slo=Slo(0.01, 0.01)).run()
    assert column(result, "attained") == [True], "met to the last digit, and no gap to miss"
    for name in ("gap_s", "max_gap_s", "tpot_s"):
        assert result.summary[name] is None
    assert result.summary["distributions"]["max_gap_s"] is None


def test_m5_three_gap_statistics() -> None:
    """M5: A has ten gaps of 10 ms; B nine of 10 ms and one of 200 ms, while a long prompt is prefilled."""
    law = latency(linear_base_s=0.01, linear_token_s=1e-6)
    rows = [(0.0, 10, 11), (1.0, 10, 11), (1.015, 190_000, 1)]
    case = Case(
        rows, "chunked_prefill", gpus=1, latency=law, slo=Slo(2.0, 0.1), chunk_tokens=200_000,
        max_batched_tokens=200_000,
    )  # fmt: skip
    result = case.run()
    largest = column(result, "max_gap_s")
    assert largest[0] == pytest.approx(0.010, rel=1e-3)
    assert largest[1] == pytest.approx(0.200, rel=1e-3)
    mean = column(result, "tpot_s")
    assert mean[1] == pytest.approx((9 * 0.01 + 0.2) / 10, rel=1e-3)
    assert column(result, "attained")[:2] == [True, False]
    assert column(result, "missed_by")[1] == "gap"
    summary = result.summary
    assert summary["gap_s"]["count"] == 20 and summary["max_gap_s"]["count"] == 2 and summary["tpot_s"]["count"] == 2
    assert summary["gap_s"]["p90"] == pytest.approx(0.01, rel=1e-3)
    assert summary["gap_s"]["p99"] == pytest.approx(0.2, rel=1e-3)
    assert summary["max_gap_s"]["p50"] == pytest.approx(0.01, rel=1e-3)


def test_m6_attainment_divides_by_all_that_arrived() -> None:
    """M6: 10 arrive, 4 finish in time, 6 are rejected or unfinished."""
    rows = [(0.0, 100, 2)] * 4 + [(0.1, 5000, 2)] * 3 + [(0.2, 100, 50)] * 3
    result = Case(rows, latency=LAW, gpus=1, capacity_tokens=1000, horizon_s=0.4).run()
    counts = result.summary["requests"]
    assert (counts["completed"], counts["rejected"], counts["unfinished"]) == (4, 3, 3)
    assert result.summary["attainment"] == 0.4
    assert result.summary["attained"] is False
    assert result.summary["missed_by"]["rejected"] == 3 and result.summary["missed_by"]["unfinished"] == 3
    assert sum(result.summary["missed_by"].values()) == 6


def test_m7_windows_filter_by_arrival() -> None:
    """M7: 300 requests at 0, a warm-up of 70 s, one ends at 75 s: it is not counted, nor is what it did."""
    law = latency(linear_base_s=0.1, linear_token_s=1e-4)
    rows = [(0.0, 100, 2)] * 299 + [(0.0, 100, 700)] + [(70.0 + i, 100, 3) for i in range(10)] + [(90.0, 10, 5)]
    window = Window(warmup_s=70.0, cooldown_s=5.0)
    result = Case(rows, "chunked_prefill", latency=law, slo=Slo(0.2, 0.2), window=window).run()
    finish = column(result, "finish_s")
    assert finish[299] > 70.0 and max(finish[:299]) < 70.0
    counts = result.summary["requests"]
    assert counts["injected"] == 311 and counts["in_window"] == 10
    assert result.summary["ttft_s"]["count"] == 10
    assert result.summary["max_gap_s"]["count"] == 10
    missed = column(result, "missed_by")
    inside = [reason for reason in missed[300:310] if reason]
    assert sum(result.summary["missed_by"].values()) == len(inside) < len([reason for reason in missed if reason])
    assert result.summary["attainment"] == pytest.approx(1 - len(inside) / 10)


def test_m7_gaps_are_those_of_the_window() -> None:
    law = latency(linear_base_s=0.01, linear_token_s=1e-4)
    rows = [(0.0, 100, 50), (0.05, 2000, 1), (5.0, 100, 11)]
    whole = Case(rows, "chunked_prefill", gpus=1, latency=law, slo=Slo(2.0, 0.5))
    result = dataclasses.replace(whole, window=Window(warmup_s=4.0)).run()
    assert whole.run().summary["gap_s"]["max"] > 0.2
    assert result.summary["gap_s"]["count"] == 10
    assert result.summary["gap_s"]["max"] == pytest.approx(0.0101)
    assert result.summary["distributions"]["gap_s"][100] == pytest.approx(0.0101)


def test_m10_overload() -> None:
    """M10: percentiles over arrivals, unfinished as infinite; TTFT split into queueing and prefill."""
    rows = [(0.05 * i, 100, 1) for i in range(100)]
    server = {
        "scheme": "chunked_prefill",
        "chunk_tokens": 100,
        "latency": latency(linear_base_s=0.1),
        "slo": Slo(0.5, 0.1),
    }
    calm = Case([(4 * at, p, o) for at, p, o in rows], **server).run()  # type: ignore[arg-type]
    assert calm.summary["ttft_s"]["infinite"] == 0
    assert calm.summary["overloaded"] is False
    heavy = Case(rows, horizon_s=5.0, **server).run()  # type: ignore[arg-type]
    counts = heavy.summary["requests"]
    assert (counts["injected"], counts["completed"]) == (100, 50)
    ttft = heavy.summary["ttft_s"]
    assert ttft["count"] == 100 and ttft["infinite"] == counts["unfinished"] == 50
    assert ttft["mean"] is None and ttft["p99"] is None and ttft["max"] is None
    assert ttft["p50"] == pytest.approx(50 * 0.1 - 49 * 0.05)
    assert heavy.summary["overloaded"] is True
    assert any(warning.startswith("overloaded") for warning in heavy.summary["warnings"])
    queueing = column(heavy, "queueing_s")
    for index in range(50):
        assert queueing[index] == pytest.approx(0.05 * index)
        assert column(heavy, "prefill_s")[index] == pytest.approx(0.1)
    assert heavy.summary["distributions"]["ttft_s"][50] == pytest.approx(ttft["p50"])
    assert heavy.summary["distributions"]["ttft_s"][51] is None


def test_missed_by_queueing_or_prefill() -> None:
    rows = [(0.0, 100, 1), (0.01, 100, 1), (0.02, 100, 1), (5.0, 3000, 1)]
    law = latency(linear_base_s=0.1, prefill_pair_s=4e-7)
    case = Case(
        rows, "chunked_prefill", gpus=1, latency=law, chunk_tokens=100, slo=Slo(0.25, 0.1), max_batched_tokens=100
    )
    assert column(case.run(), "missed_by") == [None, None, "queueing", "prefill"]


def test_tolerance() -> None:
    """A value meets a limit up to a relative 1e-9, on TTFT and on gaps."""
    for scale, attains in ((1.0, True), (1 + 0.9e-9, True), (1 + 2e-9, False)):
        ttft = Case([(0.0, 100, 1)], "chunked_prefill", latency=latency(linear_base_s=0.5 * scale), slo=Slo(0.5, 9.0))
        assert column(ttft.run(), "attained") == [attains]
        gap = Case([(0.0, 100, 3)], "chunked_prefill", latency=latency(linear_base_s=0.5 * scale), slo=Slo(9.0, 0.5))
        assert column(gap.run(), "attained") == [attains]


def test_ttft_limit_by_prompt_length() -> None:
    slo = Slo(0.5, 1.0, ttft_per_token_s=1e-3)
    rows = [(0.0, 400, 1), (10.0, 800, 1)]
    result = Case(rows, "chunked_prefill", latency=latency(linear_base_s=0.7), slo=slo).run()
    assert column(result, "attained") == [False, True]
    assert slo.ttft_limit_s(400) == 0.5 and slo.ttft_limit_s(800) == pytest.approx(0.8)


def test_deadline_rule_lends_early_slack() -> None:
    """One pause of 0.3 s after an early first token: the largest gap misses, the deadlines hold; and the other way."""
    law = latency(linear_base_s=0.01, linear_token_s=1e-6)
    rows = [(0.0, 10, 30), (0.055, 290_000, 1)]
    case = Case(
        rows, "chunked_prefill", gpus=1, latency=law, chunk_tokens=300_000, max_batched_tokens=300_000,
        slo=Slo(0.5, 0.1),
    )  # fmt: skip
    assert column(case.run(), "attained")[0] is False
    lenient = dataclasses.replace(case, slo=Slo(0.5, 0.1, rule="deadline"))
    assert column(lenient.run(), "attained")[0] is True
    strict = dataclasses.replace(case, slo=Slo(0.02, 0.02, rule="deadline"))
    result = strict.run()
    assert column(result, "attained")[0] is False
    assert column(result, "missed_by")[0] == "gap"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(SCHEMES), st.sampled_from(ORDERS))
def test_attainment_from_token_times(seed: int, scheme: str, order: str) -> None:
    """Both rules, recomputed one token at a time from the naive reference's token times."""
    case = random_case(seed, scheme, order, False)
    reference = Reference(case)
    reference.run()
    for rule in ("max_gap", "deadline"):
        judged = dataclasses.replace(case, slo=dataclasses.replace(case.slo, rule=rule))
        result = judged.run()
        attained = []
        for request in reference.requests:
            good = bool(request.token_s)
            limit = case.slo.ttft_s * (1 + 1e-9)
            if good and rule == "max_gap":
                good = request.token_s[0] - request.arrival_s <= limit
                for before, after in pairwise(request.token_s):
                    good = good and after - before <= case.slo.tbt_s * (1 + 1e-9)
            for index, token_s in enumerate(request.token_s if rule == "deadline" else []):
                good = good and token_s - request.arrival_s - index * case.slo.tbt_s <= limit
            attained.append(good)
        assert column(result, "attained") == attained
        assert result.summary["attainment"] == sum(attained) / len(attained)
        gaps = [b - a for request in reference.requests for a, b in pairwise(request.token_s)]
        pooled = result.summary["gap_s"]
        assert (pooled is None) == (not gaps)
        if gaps:
            assert pooled["count"] == len(gaps)
            assert pooled["mean"] == pytest.approx(float(np.mean(gaps)), rel=1e-6)
            ranked = sorted(gaps)
            for share in (50, 90, 95, 99):
                nearest = ranked[-(-share * len(gaps) // 100) - 1]
                assert pooled[f"p{share}"] == pytest.approx(nearest, rel=1e-6)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=60), st.integers(1, 100))
def test_percentile_definition(pairs: list[tuple[float, int]], percent: int) -> None:
    """Nearest rank: the smallest value that at least that share of the values do not exceed."""
    values = np.array([value for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs], float)
    pool = sorted(value for value, weight in pairs for _ in range(weight))
    want = next(v for v in pool if 100 * sum(u <= v for u in pool) >= percent * len(pool))
    assert quantile(values, [percent / 100], weights)[0] == want
    plain = sorted(values)
    assert quantile(values, [percent / 100])[0] == plain[-(-percent * len(plain) // 100) - 1]


def test_statistics_null_with_a_count() -> None:
    assert statistics(np.empty(0)) is None
    some = statistics(np.array([1.0, 2.0, 3.0, np.inf]))
    assert some is not None
    assert (some["mean"], some["p50"], some["p90"], some["max"]) == (None, 2.0, None, None)
    assert (some["count"], some["infinite"]) == (4, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cut_run_keeps_the_tokens_that_are_out(scheme: str) -> None:
    """25 tokens of a decode are out when the run is cut: they are counted, and so are their gaps."""
    result = Case([(0.0, 100, 50)], scheme, latency=LAW, horizon_s=0.255).run()
    assert column(result, "status") == ["unfinished"]
    assert column(result, "emitted_tokens") == [25]
    assert result.summary["tokens"]["emitted"] == 25
    assert result.summary["gap_s"]["count"] == 24
    assert result.summary["gap_s"]["p50"] == pytest.approx(0.01)
    assert column(result, "missed_by") == ["unfinished"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cut_run_is_busy_no_longer_than_it_lasts(scheme: str) -> None:
    for rows in ([(0.0, 100, 50)], [(0.0, 100, 50), (0.2, 5000, 5)]):
        result = Case(rows, scheme, latency=LAW, horizon_s=0.255).run()
        assert result.summary["simulated_s"] == 0.255
        assert 0.9 < result.summary["utilisation"] <= 1.0 + 1e-12


def test_horizon_beyond_the_end_changes_nothing() -> None:
    case = Case([(0.0, 100, 5)], latency=LAW)
    free, bounded = case.run(), dataclasses.replace(case, horizon_s=1000.0).run()
    assert free.requests.equals(bounded.requests)
    for name in ("simulated_s", "completed_rate", "utilisation", "requests", "attainment"):
        assert bounded.summary[name] == free.summary[name], name


def test_s15_limits_in_the_wrong_unit() -> None:
    """S15: 200 where seconds are meant, and limits below what serving alone takes, warn."""

    def said(slo: Slo, word: str) -> bool:
        warnings = Case([(0.0, 1000, 20)], latency=LAW, slo=slo).run().summary["warnings"]
        return any(word in warning for warning in warnings)

    assert said(Slo(200.0, 0.1), "slo.ttft_s=200.0")
    assert said(Slo(2.0, 50.0), "slo.tbt_s=50.0")
    assert said(Slo(0.001, 0.1), "slo.ttft_s=0.001")
    assert said(Slo(2.0, 0.001), "slo.tbt_s=0.001")
    assert not said(Slo(2.0, 0.1), "slo.")


def test_offered_and_completed_rates() -> None:
    rows = [(0.5 * i, 100, 1) for i in range(21)]
    summary = Case(rows, latency=LAW).run().summary
    assert summary["offered_rate"] == pytest.approx(2.0)
    assert summary["completed_rate"] == pytest.approx(21 / 10.01)
    assert summary["simulated_s"] == pytest.approx(10.01)


def test_m7_cool_down_of_a_closed_loop() -> None:
    """The last arrival is known when the run is over, to a summary; a search cannot know it, and says so."""
    rows = [(0.0, 10, 3)] * 7
    case = Case(rows, latency=LAW, window=Window(0.0, 0.03))
    load = closed_load(case.trace(), 2)
    result = case.simulation().replay(load)
    arrivals = column(result, "arrival_s")
    assert max(arrivals) == pytest.approx(0.09)
    assert result.summary["requests"]["in_window"] == sum(at <= max(arrivals) - 0.03 for at in arrivals) < 7
    with pytest.raises(InputError, match="cooldown_s"):
        case.simulation().replay(load, probe=True)
