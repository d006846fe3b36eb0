"""Verdicts: a probe that ends early says what the whole run says, and so does an overloaded run that is cut."""

from __future__ import annotations

import dataclasses
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_cases import random_case
from simulator_harness import ORDERS, SCHEMES, Case, latency, make_trace

from confsim.latency.affine import AffineLatencyConfig
from confsim.outcome.slo import Slo
from confsim.run.engine import Simulation, Window
from traces.arrivals import Poisson

SETTINGS = settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def assert_same_verdict(simulation: Simulation, rate: float | None = None) -> bool:
    """Probe and whole run; returns whether the probe was decided early."""
    whole = simulation.run(rate)
    probe = simulation.run(rate, probe=True)
    attainment = whole.summary["attainment"]
    assert whole.verdict is not None and probe.verdict is not None
    target = simulation.slo.attainment
    assert whole.verdict.passed == (attainment >= target) == whole.summary["attained"]
    assert probe.verdict.passed == whole.verdict.passed
    assert probe.verdict.attainment_low <= attainment <= probe.verdict.attainment_high
    if not probe.verdict.decided_early:
        assert probe.verdict.attainment_low == probe.verdict.attainment_high == attainment
    else:
        low, high = probe.verdict.attainment_low, probe.verdict.attainment_high
        assert low >= target or high < target, "early means certain"
        assert probe.summary["requests"]["injected"] <= whole.summary["requests"]["injected"]
    return probe.verdict.decided_early


@pytest.mark.parametrize("scheme", SCHEMES)
def test_probe_equals_the_whole_run_on_small_cases(scheme: str) -> None:
    early = []

    @SETTINGS
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = Random(seed)
        case = random_case(seed, scheme, rng.choice(ORDERS), rng.random() < 0.3)
        slo = dataclasses.replace(
            case.slo, attainment=rng.choice([0.5, 0.9, 0.95, 1.0]), rule=rng.choice(["max_gap", "deadline"])
        )
        case = dataclasses.replace(case, slo=slo, instances=rng.choice([1, 1, 2]))
        if rng.random() < 0.3:
            case = dataclasses.replace(case, window=Window(rng.uniform(0, 0.1), rng.uniform(0, 0.1)))
        early.append(assert_same_verdict(case.simulation()))

    check()
    assert any(early) and not all(early)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_probe_equals_the_whole_run_over_rates(scheme: str, order: str) -> None:
    """From idle to overload; at both ends probes are decided early, and soon in an overload."""
    rng = np.random.default_rng(3)
    rows = [(float(i), int(rng.integers(50, 6000)), int(rng.integers(1, 60))) for i in range(150)]
    slo = Slo(1.0, 0.05)
    simulation = dataclasses.replace(
        Case(rows, scheme, order, slo=slo, latency=AffineLatencyConfig(prefill_pair_s=2e-8)).simulation(),
        arrivals=Poisson(),
    )
    early = [assert_same_verdict(simulation, rate) for rate in (0.2, 1.0, 3.0, 6.0, 12.0, 40.0)]
    assert early[-1]
    probe = simulation.run(40.0, probe=True)
    assert not probe.verdict.passed  # type: ignore[union-attr]
    assert probe.summary["requests"]["completed"] < 100


def test_probe_ignores_the_horizon() -> None:
    case = Case([(0.5 * i, 200, 20) for i in range(40)], latency=latency(linear_base_s=0.01), horizon_s=3.0)
    probe, cut = case.run(probe=True), case.run()
    assert probe.verdict is not None and probe.verdict.passed
    assert cut.summary["requests"]["injected"] < 40


@pytest.mark.parametrize("attained,passed", [(19, True), (18, False)])
def test_probe_at_the_target_exactly(attained: int, passed: bool) -> None:
    """19 of 20 is 0.95."""
    rows = [(0.5 * i, 100 if i < attained else 900, 1) for i in range(20)]
    law = latency(linear_base_s=0.01, prefill_pair_s=4e-7)
    case = Case(rows, "chunked_prefill", gpus=1, latency=law, slo=Slo(0.1, 1.0))
    for probe in (True, False):
        verdict = case.run(probe=probe).verdict
        assert verdict is not None and verdict.passed is passed


def test_early_pass_needs_no_more_than_the_target() -> None:
    """Of 100 requests one after another the 95th settles a target of 95%, and the 6th miss a failure."""
    rows = [(1.0 * i, 100, 2) for i in range(100)]
    good = Case(rows, latency=latency(linear_base_s=0.01)).run(probe=True)
    assert good.verdict is not None and good.verdict.decided_early and good.verdict.passed
    assert good.summary["requests"]["completed"] == 95
    assert (good.verdict.attainment_low, good.verdict.attainment_high) == (0.95, 1.0)
    bad = Case(rows, latency=latency(linear_base_s=0.01), slo=Slo(0.001, 1.0)).run(probe=True)
    assert bad.verdict is not None and bad.verdict.decided_early and not bad.verdict.passed
    assert bad.verdict.attainment_high == 0.94
    assert bad.summary["requests"]["injected"] == 6


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("order", ORDERS)
def test_overload_has_one_verdict_cut_or_drained(scheme: str, order: str) -> None:
    """Twice the load that can be served: cut at the last arrival, in the middle or drained, it fails and says so."""
    rng = np.random.default_rng(1)
    rows = [(0.02 * i, int(rng.integers(300, 500)), 3) for i in range(300)]
    law = latency(linear_base_s=0.02, linear_token_s=1e-4)
    case = Case(rows, scheme, order, gpus=1, latency=law, slo=Slo(0.5, 0.1))
    results = [dataclasses.replace(case, horizon_s=horizon).run() for horizon in (3.0, 6.0, None)]
    for result in results:
        assert result.verdict is not None and not result.verdict.passed
        assert result.summary["overloaded"] is True
    assert results[0].summary["requests"]["unfinished"] > 0
    assert results[2].summary["requests"]["unfinished"] == 0
    assert not case.run(probe=True).verdict.passed  # type: ignore[union-attr]


def test_overload_is_named_for_short_runs_too() -> None:
    trace = make_trace([(0.0, 100, 1)])
    assert len(trace) == 1
    assert Case([(0.0, 100, 1)], latency=latency(linear_base_s=0.01)).run().summary["overloaded"] is False


def test_zero_load_attainment_is_that_of_each_alone() -> None:
    """A prompt that is too long even alone makes the zero-load attainment fall short."""
    law = latency(linear_base_s=0.01, linear_token_s=1e-4)
    rows = [(0.0, 9000, 5)] + [(0.0, 100, 5)] * 9
    simulation = Case(rows, "chunked_prefill", gpus=1, latency=law, slo=Slo(0.5, 0.1)).simulation()
    assert simulation.run().summary["attainment"] < 0.9
    zero = simulation.zero_load()
    assert zero.summary["attainment"] == 0.9
    assert max(zero.requests["queueing_s"].to_pylist()) == 0.0
