"""The goodput search by itself: what it concludes from a curve, and which rates it tries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.search.goodput import (
    Candidates,
    Curve,
    Probe,
    Refusal,
    SearchSettings,
    Trial,
    curve_warnings,
    next_rates,
    search,
)
from confsim.errors import InputError

TARGET = 0.95


def probe_of(rate: float, attainment: float, early: bool = False) -> Probe:
    return Probe(rate, attainment >= TARGET, attainment, attainment, early)


def find(
    probe: Callable[[Trial], Probe | Refusal], settings: SearchSettings, values: Sequence[dict[str, Any]] = ()
) -> Candidates:
    """A search with the outcome of each trial."""
    return search(lambda trials: [probe(trial) for trial in trials], settings, values)


def stepped(limit: float, log: list[float] | None = None):
    """A scheme that keeps its SLO up to `limit` req/s."""

    def probe(trial: Trial) -> Probe:
        if log is not None:
            log.append(trial.rate)
        return probe_of(trial.rate, 0.99 if trial.rate <= limit else 0.5)

    return probe


def test_m14_non_monotone_curve_counts_up_to_the_first_failure():
    attainment = {1.0: 0.99, 2.0: 0.94, 3.0: 0.96, 4.0: 0.96, 5.0: 0.90}
    curve = Curve([probe_of(rate, value) for rate, value in attainment.items()])
    assert curve.goodput == 1.0
    assert curve.lowest_failure == 2.0
    assert curve.passes_above_failure == [3.0, 4.0]
    assert [probe.rate for probe in curve.probes] == [1.0, 2.0, 3.0, 4.0, 5.0]
    (warning,) = curve_warnings(curve, SearchSettings())
    assert "not monotone" in warning and "2 req/s fails" in warning and "3, 4 req/s pass" in warning


def test_m14_search_over_a_curve_that_dips():
    """A dip that the search meets lowers the goodput to below it, and is flagged."""

    def probe(trial: Trial) -> Probe:
        return probe_of(trial.rate, 0.94 if 1.9 < trial.rate < 2.1 else (0.96 if trial.rate <= 4 else 0.5))

    found = find(probe, SearchSettings(curve=(0.5,)))  # half of 4 lies in the dip
    assert 1.85 < found.curve.goodput <= 1.9
    assert found.curve.passes_above_failure
    assert "not monotone" in curve_warnings(found.curve, SearchSettings())[0]


@given(limit=st.floats(0.0011, 9000))
def test_search_finds_a_limit_to_the_tolerance(limit: float):
    settings = SearchSettings()
    found = find(stepped(limit), settings)
    assert found.curve.goodput <= limit
    assert found.curve.lowest_failure is not None
    assert found.curve.lowest_failure > limit
    assert found.curve.lowest_failure <= found.curve.goodput * (1 + settings.tolerance)
    assert len(found.curve) <= 24
    assert not curve_warnings(found.curve, settings)


@given(limit=st.floats(0.002, 5000), per_round=st.integers(1, 5))
def test_search_converges_for_any_number_of_probes_a_round(limit: float, per_round: int):
    found = find(stepped(limit), SearchSettings(probes_per_round=per_round))
    assert limit / 1.02 < found.curve.goodput <= limit


def test_rounds_ascend_and_have_as_many_rates_as_are_asked_for():
    rounds: list[list[Trial]] = []

    def probe(trials: Sequence[Trial]) -> list[Probe]:
        rounds.append(list(trials))
        return [stepped(3.3)(trial) for trial in trials]

    search(probe, SearchSettings(curve=(0.5, 1.1), probes_per_round=3))
    assert [trial.rate for trial in rounds[0]] == [1.0, 4.0, 16.0]
    assert [trial.rate for trial in rounds[1]] == pytest.approx([4**0.25, 2, 4**0.75])
    assert [len(trials) for trials in rounds[:-1]] == [3] * (len(rounds) - 1)
    assert all(trial.full for trial in rounds[-1]) and len(rounds[-1]) == 2


def test_never_passing_ends_at_the_lower_bound():
    log: list[float] = []
    found = find(stepped(0.0, log), SearchSettings())
    assert found.curve.goodput == 0.0
    assert min(log) == 0.001
    assert "missed at every rate down to goodput.min_rate=0.001" in curve_warnings(found.curve, SearchSettings())[0]


def test_always_passing_ends_at_the_upper_bound_and_says_so():
    settings = SearchSettings(max_rate=50.0)
    found = find(stepped(math.inf), settings)
    assert found.curve.goodput == 50.0
    assert "goodput.max_rate=50" in curve_warnings(found.curve, settings)[0]


def test_a_limit_between_the_lower_bound_and_the_first_step_is_found():
    found = find(stepped(0.0012), SearchSettings())
    assert 0.0012 / 1.02 < found.curve.goodput <= 0.0012


def test_curve_points_are_full_runs_around_the_goodput():
    full: list[float] = []

    def probe(trial: Trial) -> Probe:
        if trial.full:
            full.append(trial.rate)
        return probe_of(trial.rate, 0.99 if trial.rate <= 2 else 0.5, early=not trial.full)

    found = find(probe, SearchSettings(curve=(0.5, 1.25)))
    goodput = found.curve.goodput
    assert full == [0.5 * goodput, 1.25 * goodput]
    assert not found.curve[full[0]].decided_early


def test_curve_point_below_the_goodput_that_fails_is_followed_up():
    """After such a point the search closes the new bracket too."""

    def probe(trial: Trial) -> Probe:
        return probe_of(trial.rate, 0.5 if trial.rate > 2 or 0.9 < trial.rate < 1.1 else 0.99)

    found = find(probe, SearchSettings(start_rate=1.5, curve=(0.5,)))
    assert found.curve.goodput <= 0.9
    assert found.curve.lowest_failure is not None
    assert found.curve.lowest_failure <= found.curve.goodput * 1.02


def test_tuned_values_keep_the_best_and_spend_one_probe_on_losers():
    limits = {256: 1.0, 512: 3.0, 1024: 5.0, 2048: 2.0}

    def probe(trial: Trial) -> Probe:
        limit = list(limits.values())[trial.candidate]
        return probe_of(trial.rate, 0.99 if trial.rate <= limit else 0.5)

    found = find(probe, SearchSettings(), [{"scheme.chunk_tokens": value} for value in limits])
    assert found.each[found.best].values == {"scheme.chunk_tokens": 1024}
    assert 5 / 1.02 < found.curve.goodput <= 5
    assert len(found.each[3].curve) == 2  # beats the first candidate, not the best


def test_candidates_that_cannot_run_are_passed_over():
    def probe(trial: Trial) -> Probe | Refusal:
        return stepped(3.0 + trial.candidate)(trial) if trial.candidate else Refusal("weights do not fit")

    found = find(probe, SearchSettings(), [{"tp": 1}, {"tp": 2}, {"tp": 4}])
    assert found.best == 2
    assert found.each[0].refused == "weights do not fit"
    assert 5 / 1.02 < found.curve.goodput <= 5


def test_nothing_to_search_where_no_candidate_can_run():
    found = find(lambda trial: Refusal("no"), SearchSettings(curve=(0.5,)), [{"tp": 1}, {"tp": 2}])
    assert found.runnable == [] and found.curve.goodput == 0.0
    assert [candidate.refused for candidate in found.each] == ["no", "no"]


def test_a_curve_point_that_fails_lets_another_candidate_win():
    """The first one's goodput falls below what the second can do, so that is searched after all."""

    def probe(trial: Trial) -> Probe:
        if trial.candidate:
            return probe_of(trial.rate, 0.99 if trial.rate <= 1.8 else 0.5)
        return probe_of(trial.rate, 0.5 if trial.rate > 2 or 0.9 < trial.rate < 1.1 else 0.99)

    found = find(probe, SearchSettings(start_rate=1.5, curve=(0.5,)), [{"a": 1}, {"a": 2}])
    assert found.best == 1
    assert 1.8 / 1.02 < found.curve.goodput <= 1.8


def test_a_tie_keeps_the_first_candidate():
    found = find(stepped(2.0), SearchSettings(), [{"a": 1}, {"a": 2}])
    assert found.best == 0


def test_a_full_run_replaces_an_early_probe_and_not_the_other_way_round():
    curve = Curve([Probe(1.0, True, 0.95, 1.0, True)])
    curve.add(Probe(1.0, True, 0.97, 0.97, False))
    curve.add(Probe(1.0, True, 0.95, 1.0, True))
    assert curve[1.0].attainment_low == 0.97
    assert len(curve) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"tolerance": 0.0}, {"min_rate": 0.0}, {"max_rate": 0.5}, {"probes_per_round": 0}, {"curve": (-1.0,)}],
)
def test_numbers_that_make_no_search_are_refused(wrong: dict):
    with pytest.raises(InputError, match="goodput"):
        SearchSettings(**wrong)


def test_a_closed_bracket_asks_for_nothing():
    curve = Curve([probe_of(1.0, 0.99), probe_of(1.02, 0.5)])
    assert next_rates(curve, SearchSettings()) == []
