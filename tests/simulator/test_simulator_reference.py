"""The engine against the naive reference on small random traces: plans, token times and statuses agree."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_cases import random_case
from reference import Reference
from simulator_harness import ORDERS, SCHEMES, Case, Planned, RecordingBackendConfig, column

from confsim.outcome.result import Result

# Set CONFSIM_EXAMPLES for a longer search with fresh seeds.
EXAMPLES = int(os.environ.get("CONFSIM_EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or 30,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # a seed does not shrink
    suppress_health_check=list(HealthCheck),
)


def compare(case: Case) -> None:
    """Every plan, every time and every status."""
    reference = Reference(case)
    reference.run()
    recorder = RecordingBackendConfig()
    stepwise = case.run(backend=recorder, check=True)
    assert_plans(recorder.plans, reference)
    for result in (stepwise, case.run()):
        assert_result(result, reference)


def assert_plans(plans: list[Planned], reference: Reference) -> None:
    for index, (got, iteration) in enumerate(zip(plans, reference.iterations, strict=False)):
        want = iteration.plan
        assert got.decode == want.decode, f"iteration {index} at {iteration.start_s}"
        assert got.context == want.context, f"iteration {index}"
        bare = tuple((c.request, c.start, c.tokens, c.last, c.group) for c in got.chunks)
        expected = tuple((c.request, c.start, c.tokens, c.last, c.group) for c in want.chunks)
        assert bare == expected, f"iteration {index} at {iteration.start_s}"
        shards = [c.shards for c in got.chunks]
        if shards:
            assert tuple(map(sum, zip(*shards, strict=True))) == iteration.prefill, f"iteration {index}"
            assert_dealt(shards, iteration.prefill)
    assert len(plans) == len(reference.iterations)


def assert_dealt(shards: list[tuple[int, ...]], totals: tuple[int, ...]) -> None:
    """Each chunk is spread in the proportions of the whole, but for whole tokens."""
    whole = sum(totals)
    for chunk in shards:
        assert all(tokens >= 0 for tokens in chunk)
        for tokens, total in zip(chunk, totals, strict=True):
            assert abs(tokens - sum(chunk) * total / whole) <= len(shards) * len(totals)


def assert_result(result: Result, reference: Reference) -> None:
    table = result.iterations
    assert table.num_rows == len(reference.iterations)
    for name, values in (("start_s", [i.start_s for i in reference.iterations]),
                         ("end_s", [i.end_s for i in reference.iterations])):  # fmt: skip
        assert table[name].to_pylist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    assert table["prefill_per_group"].to_pylist() == [list(i.prefill) for i in reference.iterations]
    counts = [[len(group) for group in i.plan.decode] for i in reference.iterations]
    assert table["decode_per_group"].to_pylist() == counts
    assert table["context_tokens"].to_pylist() == [sum(i.plan.context) for i in reference.iterations]
    requests = reference.requests
    assert column(result, "status") == [r.status for r in requests]
    assert column(result, "preemptions") == [r.preemptions for r in requests]
    assert column(result, "prefix_hit_tokens") == [r.hits for r in requests]
    assert column(result, "recomputed_tokens") == [r.recomputed for r in requests]
    assert column(result, "emitted_tokens") == [len(r.token_s) for r in requests]
    for r, first, finish, gap, queueing in zip(
        requests,
        column(result, "first_token_s"),
        column(result, "finish_s"),
        column(result, "max_gap_s"),
        column(result, "queueing_s"),
        strict=True,
    ):
        if r.status == "rejected":
            assert first is None and finish is None
            continue
        assert first == pytest.approx(r.token_s[0], rel=1e-9)
        assert finish == pytest.approx(r.token_s[-1], rel=1e-9)
        assert queueing == pytest.approx(r.prefill_start_s - r.arrival_s, rel=1e-9, abs=1e-12)
        gaps = [b - a for a, b in zip(r.token_s, r.token_s[1:], strict=False)]
        assert gap == (pytest.approx(max(gaps), rel=1e-7) if gaps else None)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_engine_equals_reference(scheme: str, order: str, prefix_cache: bool) -> None:
    @SETTINGS
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        compare(random_case(seed, scheme, order, prefix_cache))

    check()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_do_not_depend_on_the_path(scheme: str) -> None:
    """Decode-only iterations that run ahead leave the rows that iterations planned one by one leave."""

    @settings(SETTINGS, max_examples=15)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        case = random_case(seed, scheme, "fcfs", seed % 2 == 0)
        planned = case.run(backend=RecordingBackendConfig()).iterations
        ahead = case.run().iterations
        for name in planned.column_names:
            want, got = planned[name].to_pylist(), ahead[name].to_pylist()
            assert got == (pytest.approx(want, rel=1e-6, abs=1e-9) if name.endswith("_s") else want), name

    check()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_noise_does_not_depend_on_the_path(scheme: str) -> None:
    """Every iteration takes the next draw of one stream, whether it was planned or ran ahead."""

    @SETTINGS
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        case = random_case(seed, scheme, "fcfs", False)
        case = dataclasses.replace(case, latency=dataclasses.replace(case.latency, noise=0.1))
        planned = case.run(backend=RecordingBackendConfig()).iterations
        ahead = case.run().iterations
        assert ahead["end_s"].to_pylist() == pytest.approx(planned["end_s"].to_pylist(), rel=1e-9)

    check()
