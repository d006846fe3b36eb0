"""Data parallelism: independent replicas, whoever the router sends them."""

from __future__ import annotations

import pytest
from scheme_cases import column, loop_rows, replay, simulation

from confsim.errors import InputError
from confsim.schemes.data_parallel import DataParallel
from confsim.specs import ClusterSpec


def prefill_s(tokens: int) -> float:
    """The law of `scheme_cases` on one GPU, written out."""
    return 0.008 + 40e-6 * tokens + 4e-9 * tokens * tokens / 2 + 0.0005 + 2e-6


def test_replicas_do_not_slow_each_other() -> None:
    sim = simulation("scheme=data_parallel", "cluster.gpus=2")
    result = replay(sim, [(0.0, 1000, 1), (0.0, 1000, 1)])
    assert column(result, "ttft_s") == [pytest.approx(prefill_s(1000))] * 2
    assert column(result, "group") == [0, 1]
    assert len(loop_rows(result, "data_parallel/0")) == len(loop_rows(result, "data_parallel/1")) == 1


@pytest.mark.parametrize(
    ("router", "groups"),
    [("least_tokens", [0, 1, 1, 1]), ("round_robin", [0, 1, 0, 1]), ("least_requests", [0, 1, 0, 1])],
)
def test_routers(router: str, groups: list[int]) -> None:
    """A long prompt and three short ones at once."""
    sim = simulation("scheme=data_parallel", "cluster.gpus=2", f"scheme.router={router}")
    result = replay(sim, [(0.0, 2000, 2), (0.0, 100, 2), (0.0, 100, 2), (0.0, 100, 2)])
    assert column(result, "group") == groups


def test_one_replica_is_chunked_prefill() -> None:
    rows = [(0.05 * index, 300 + 700 * (index % 5), 1 + 6 * (index % 4)) for index in range(30)]
    options = ("cluster.gpus=2", "kv.capacity_tokens=6000", "scheme.tp=2")
    alone = replay(simulation("scheme=data_parallel", *options), rows)
    chunked = replay(simulation("scheme=chunked_prefill", *options), rows)
    for name in ("ttft_s", "max_gap_s", "finish_s", "preemptions"):
        assert column(alone, name) == column(chunked, name)


def test_pools_are_counted_per_replica() -> None:
    sim = simulation("scheme=data_parallel", "cluster.gpus=4", "scheme.tp=2", "kv.capacity_tokens=1600")
    result = replay(sim, [(0.0, 3000, 2), (0.0, 3300, 2)])
    assert result.summary["kv"]["groups"] == 2
    assert result.summary["kv"]["capacity_tokens"] == 3200
    assert column(result, "status") == ["completed", "rejected"]


def test_degrees_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"scheme\.tp=auto: only `confsim goodput`"):
        simulation("scheme=data_parallel", "scheme.tp=auto").run()
    with pytest.raises(InputError, match=r"scheme\.tp=3 does not divide the 4 GPUs"):
        simulation("scheme=data_parallel", "scheme.tp=3").run()
    with pytest.raises(InputError, match=r"scheme\.tp=0"):
        simulation("scheme=data_parallel", "scheme.tp=0").run()
    with pytest.raises(InputError, match=r"scheme\.router=nearest: unknown, use one of"):
        DataParallel(router="nearest")


def test_what_a_search_tries() -> None:
    assert DataParallel().tunable() == {}
    assert DataParallel(tp="auto").tunable() == {"tp": [1, 2, 4]}
    assert DataParallel(tp="auto").tunable(ClusterSpec(8, 2)) == {"tp": [2, 4, 8]}
    assert DataParallel(tp="auto", chunk_tokens="tuned").tunable()["chunk_tokens"] == [512, 1024, 2048, 4096, 8192]
