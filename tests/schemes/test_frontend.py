"""`latency.frontend_s`: time between a request's arrival and the scheme."""

from __future__ import annotations

import pytest
from scheme_cases import column, replay, simulation

from confsim.errors import InputError
from confsim.latency.config import FittedLatency

ROWS = [(0.0, 2000, 5), (0.01, 900, 1), (0.2, 4000, 3)]


@pytest.mark.parametrize("scheme", ["conflux", "chunked_prefill", "muxwise"])
def test_the_front_end_moves_every_token_by_its_time_and_nothing_else(scheme: str) -> None:
    """TTFT grows by it, gaps stay; every event is audited, requests on their way included."""
    overrides = (f"scheme={scheme}", "cluster.gpus=4", "slo.tbt_s=1.0", "slo.ttft_s=10")
    plain, fronted = (replay(simulation(*overrides, frontend_s=seconds), ROWS) for seconds in (0.0, 0.125))
    for name in ("ttft_s", "e2e_s"):
        assert column(fronted, name) == pytest.approx([value + 0.125 for value in column(plain, name)])
    assert column(fronted, "max_gap_s") == pytest.approx(column(plain, "max_gap_s"), nan_ok=True)
    assert column(fronted, "arrival_s") == [0.0, 0.01, 0.2]


def test_it_counts_against_the_ttft_limit() -> None:
    overrides = ("cluster.gpus=4", "slo.tbt_s=1.0", "slo.ttft_s=0.5")
    for seconds, reached in ((0.1, 1.0), (0.49, 0.0)):
        result = replay(simulation(*overrides, frontend_s=seconds), [(0.0, 2000, 5)])
        assert result.summary["attainment"] == reached


def test_a_request_that_is_too_long_is_rejected_behind_the_front_end() -> None:
    sim = simulation("cluster.gpus=4", "model.max_context_tokens=1000", frontend_s=0.1)
    assert column(replay(sim, [(0.0, 2000, 5), (0.0, 500, 2)]), "status") == ["rejected", "completed"]


def test_negative_times_are_refused() -> None:
    with pytest.raises(InputError, match=r"latency\.frontend_s"):
        FittedLatency(frontend_s=-0.1)
