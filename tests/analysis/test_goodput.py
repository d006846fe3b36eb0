"""The goodput search by itself: what it concludes from a curve, and which rates it tries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.search.goodput import Curve, Probe, Search, SearchSettings, Task, curve_warnings, next_rates, search
from confsim.errors import InputError

TARGET = 0.95


def probe_of(rate: float, attainment: float, early: bool = False) -> Probe:
    return Probe(rate, attainment >= TARGET, attainment, attainment, early)


def stepped(limit: float, log: list[float] | None = None):
    """A scheme that keeps its SLO up to `limit` req/s."""

    def probe(task: Task) -> Probe:
        if log is not None:
            log.append(task.rate)
        return probe_of(task.rate, 0.99 if task.rate <= limit else 0.5)

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

    def probe(task: Task) -> Probe:
        return probe_of(task.rate, 0.94 if 1.9 < task.rate < 2.1 else (0.96 if task.rate <= 4 else 0.5))

    found = search(probe, SearchSettings(curve=(0.5,)))  # half of 4 lies in the dip
    assert 1.85 < found.curve.goodput <= 1.9
    assert found.curve.passes_above_failure
    assert "not monotone" in curve_warnings(found.curve, found.settings)[0]


@given(limit=st.floats(0.0011, 9000))
def test_search_finds_a_limit_to_the_tolerance(limit: float):
    settings = SearchSettings()
    found = search(stepped(limit), settings)
    assert found.curve.goodput <= limit
    assert found.curve.lowest_failure is not None
    assert found.curve.lowest_failure > limit
    assert found.curve.lowest_failure <= found.curve.goodput * (1 + settings.tolerance)
    assert len(found.curve) <= 24
    assert not curve_warnings(found.curve, settings)


@given(limit=st.floats(0.002, 5000), per_round=st.integers(1, 5))
def test_search_converges_for_any_number_of_probes_a_round(limit: float, per_round: int):
    found = search(stepped(limit), SearchSettings(probes_per_round=per_round))
    assert limit / 1.02 < found.curve.goodput <= limit


def test_rounds_are_fixed_whatever_the_order_of_arrival():
    settings = SearchSettings(curve=(0.5, 1.1))
    forward, backward = Search([], settings), Search([], settings)
    probe = stepped(3.3)
    while tasks := forward.round():
        assert backward.round() == tasks
        for task in tasks:
            forward.add(task, probe(task))
        for task in reversed(tasks):
            backward.add(task, probe(task))
    assert forward.curve.probes == backward.curve.probes


def test_never_passing_ends_at_the_lower_bound():
    log: list[float] = []
    found = search(stepped(0.0, log), SearchSettings())
    assert found.curve.goodput == 0.0
    assert min(log) == 0.001
    assert "missed at every rate down to goodput.min_rate=0.001" in curve_warnings(found.curve, found.settings)[0]


def test_always_passing_ends_at_the_upper_bound_and_says_so():
    found = search(stepped(math.inf), SearchSettings(max_rate=50.0))
    assert found.curve.goodput == 50.0
    assert "goodput.max_rate=50" in curve_warnings(found.curve, found.settings)[0]


def test_a_limit_between_the_lower_bound_and_the_first_step_is_found():
    found = search(stepped(0.0012), SearchSettings())
    assert 0.0012 / 1.02 < found.curve.goodput <= 0.0012


def test_curve_points_are_full_runs_around_the_goodput():
    full: list[float] = []

    def probe(task: Task) -> Probe:
        if task.full:
            full.append(task.rate)
        return probe_of(task.rate, 0.99 if task.rate <= 2 else 0.5, early=not task.full)

    found = search(probe, SearchSettings(curve=(0.5, 1.25)))
    goodput = found.curve.goodput
    assert full == [0.5 * goodput, 1.25 * goodput]
    assert not found.curve[full[0]].decided_early


def test_curve_point_below_the_goodput_that_fails_is_followed_up():
    """After such a point the search closes the new bracket too."""

    def probe(task: Task) -> Probe:
        return probe_of(task.rate, 0.5 if task.rate > 2 or 0.9 < task.rate < 1.1 else 0.99)

    found = search(probe, SearchSettings(start_rate=1.5, curve=(0.5,)))
    assert found.curve.goodput <= 0.9
    assert found.curve.lowest_failure is not None
    assert found.curve.lowest_failure <= found.curve.goodput * 1.02


def test_tuned_values_keep_the_best_and_spend_one_probe_on_losers():
    limits = {256: 1.0, 512: 3.0, 1024: 5.0, 2048: 2.0}

    def probe(task: Task) -> Probe:
        limit = list(limits.values())[task.candidate]
        return probe_of(task.rate, 0.99 if task.rate <= limit else 0.5)

    found = search(probe, SearchSettings(), [{"scheme.chunk_tokens": value} for value in limits])
    assert found.candidates[found.best].values == {"scheme.chunk_tokens": 1024}
    assert 5 / 1.02 < found.curve.goodput <= 5
    assert len(found.candidates[3].curve) == 2  # beats the first candidate, not the best


def test_candidates_that_cannot_run_are_passed_over():
    state = Search([{"tp": 1}, {"tp": 2}, {"tp": 4}], SearchSettings())
    while tasks := state.round():
        for task in tasks:
            if task.candidate == 0:
                state.refuse(task, "weights do not fit")
            else:
                state.add(task, stepped(3.0 + task.candidate)(task))
    assert state.best == 2
    assert state.candidates[0].refused == "weights do not fit"
    assert 5 / 1.02 < state.curve.goodput <= 5


def test_nothing_to_search_where_no_candidate_can_run():
    state = Search([{"tp": 1}, {"tp": 2}], SearchSettings())
    for number in range(2):
        state.refuse(Task(number, 1.0), "no")
    assert state.round() == [] and state.runnable == [] and state.curve.goodput == 0.0


def test_a_tie_keeps_the_first_candidate():
    found = search(stepped(2.0), SearchSettings(), [{"a": 1}, {"a": 2}])
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
