"""S14: near the knee a run carries a band from the error of its latency model."""

from __future__ import annotations

from analysis.search.knee import attainment_band
from confsim import api


def _run(rate: float) -> tuple[api.Result, object]:
    cfg = api.compose(["trace.requests=300", f"rate={rate}", "seed=3"])
    result = api.simulate(cfg)
    return result, attainment_band(cfg, result)


def test_S14_band_holds_the_attainment_and_widens_at_the_knee() -> None:
    widths = {}
    for rate in (0.02, 1.0, 4.0):
        result, band = _run(rate)
        if band is None:
            assert result.summary["utilisation"] < 0.85
            continue
        assert isinstance(band, dict)
        low, high = band["attainment"]
        assert low <= result.summary["attainment"] <= high
        assert 0.0 < band["latency_error"] < 0.2
        widths[rate] = high - low
    assert 0.02 not in widths  # idle: a few percent of latency move nothing
    assert widths[4.0] > widths[1.0]


def test_no_band_for_closed_loops_and_horizons() -> None:
    closed = api.compose(["trace.requests=50", "arrivals=closed_loop", "arrivals.concurrency=4"])
    assert attainment_band(closed, api.simulate(closed)) is None
    cut = api.compose(["trace.requests=50", "horizon_s=10"])
    assert attainment_band(cut, api.simulate(cut)) is None
