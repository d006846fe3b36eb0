"""Looking ahead over decode-only iterations and being cut by an event gives what stepping up to each event gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from confsim import api
from confsim.outcome.result import Result
from confsim.schemes.cobatch import CoBatchInstance
from confsim.setup.cache import leaves
from confsim.setup.configuration import compose

LOAD = ["trace=conversation", "trace.requests=150", "arrivals=poisson", "cluster.instances=3", "rate=9"]
CASES: dict[str, list[str]] = {
    "conflux": [],
    "chunked": ["scheme=chunked_prefill"],
    "uniform": ["scheme=uniform_sp"],
    "replicas": ["scheme=data_parallel", "cluster.instances=1", "rate=4"],
    "replicas of instances": ["scheme=data_parallel", "rate=6"],
    "short of KV": ["kv.capacity_tokens=60000", "rate=20"],
    "short of KV by the step": ["kv.capacity_tokens=45000", "kv.admission=step", "scheme=chunked_prefill", "rate=20"],
    "prefix cache": ["kv.prefix_cache=true", "cluster.router=prefix_aware", "kv.capacity_tokens=90000"],
    "noise": ["latency.noise=0.1"],
    "horizon": ["horizon_s=9.5"],
    "closed loop": ["arrivals=closed_loop", "arrivals.concurrency=24", "rate=null"],
    "deadlines": ["policy=deadline_waterfill", "cluster.router=slo_aware", "rate=25"],
}


BY_LOOKS = ("latency.extrapolated_queries", "lockstep_wait_s")  # counted or summed up by looks, not by iterations


def run(monkeypatch: pytest.MonkeyPatch, crowded: bool, words: list[str]) -> Result:
    with monkeypatch.context() as patch:
        patch.setattr(
            CoBatchInstance, "crowded", property(lambda self: crowded, lambda self, value: None), raising=False
        )
        return api.build(compose([*LOAD, *words])).run(check=True)


@pytest.mark.parametrize("case", CASES)
def test_cut_runs_equal_stepped_ones(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, cut = (run(monkeypatch, crowded, CASES[case]) for crowded in (False, True))
    assert numbers(cut.summary) == pytest.approx(numbers(stepped.summary), rel=1e-9)
    for name in ("requests", "iterations"):
        one, other = (getattr(result, name) for result in (stepped, cut))
        assert one.num_rows == other.num_rows
        for column in one.schema:
            if str(column.type) == "double":
                a, b = (table[column.name].to_numpy() for table in (one, other))
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=column.name)
            elif name == "requests":
                assert one[column.name].equals(other[column.name]), column.name


def numbers(summary: dict[str, Any]) -> dict[str, float]:
    """Numbers of a summary."""
    kinds = (int, float)
    found = {key: value for key, value in leaves(summary) if isinstance(value, kinds) and not isinstance(value, bool)}
    return {
        key: value for key, value in found.items() if key not in ("latency.extrapolated_queries", "lockstep_wait_s")
    }
