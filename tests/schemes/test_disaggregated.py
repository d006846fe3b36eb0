"""Disaggregation: phases apart, transfers in the first gap, both pools bounded, swaps to the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheme_cases import column, loop_rows, replay, simulation

from confsim.errors import InputError
from confsim.schemes.disaggregated import Disaggregated, Sides
from confsim.specs import ClusterSpec

SCHEME = ("scheme=disaggregated", "cluster.gpus=2")
TOKEN_S = 5e-6  # half of a token's KV, which is what a transfer over two groups moves


def prefill_s(*prompts: int) -> float:
    """The law of `scheme_cases` on one GPU, written out."""
    attention = sum(4e-9 * tokens * tokens / 2 for tokens in prompts)
    return 0.008 + 40e-6 * sum(prompts) + attention + 0.0005 + 2e-6 * len(prompts)


def decode_s(*contexts: int) -> float:
    return 0.008 + 40e-6 * len(contexts) + 0.001 + 1e-6 * sum(contexts) + 0.0005 + 2e-6 * len(contexts)


def transfer_s(tokens: int) -> float:
    return 2 * TOKEN_S * tokens


def test_transfer_lands_in_the_first_gap() -> None:
    result = replay(simulation(*SCHEME, transfer_token_s=TOKEN_S), [(0.0, 1000, 3)])
    assert column(result, "ttft_s") == [pytest.approx(prefill_s(1000))]
    assert column(result, "max_gap_s") == [pytest.approx(transfer_s(1000) + decode_s(1001))]
    total = prefill_s(1000) + transfer_s(1000) + decode_s(1001) + decode_s(1002)
    assert column(result, "e2e_s") == [pytest.approx(total)]


def test_output_of_one_is_never_transferred() -> None:
    result = replay(simulation(*SCHEME, transfer_token_s=TOKEN_S), [(0.0, 1000, 1)])
    assert column(result, "e2e_s") == [pytest.approx(prefill_s(1000))]
    assert not loop_rows(result, "decode/0")


@pytest.mark.parametrize(("transfer", "waits"), [("awaited", True), ("asynchronous", False)])
def test_decodes_wait_for_transfers_or_not(transfer: str, waits: bool) -> None:
    sim = simulation(*SCHEME, f"scheme.transfer={transfer}", transfer_token_s=TOKEN_S)
    result = replay(sim, [(0.0, 1000, 60), (0.1, 4000, 3)])
    idle = transfer_s(4000) if waits else 0.0
    starts = [row["start_s"] for row in loop_rows(result, "decode/0")]
    ends = [row["end_s"] for row in loop_rows(result, "decode/0")]
    assert max(start - end for start, end in zip(starts[1:], ends, strict=False)) == pytest.approx(idle, abs=1e-12)


def test_prompts_are_batched_up_to_the_token_cap() -> None:
    result = replay(simulation(*SCHEME), [(0.0, 3000, 1), (0.0, 3000, 1), (0.0, 3000, 1), (0.0, 9000, 1)])
    batches = loop_rows(result, "prefill/0")
    assert [row["prefill_tokens"] for row in batches] == [6000, 3000, 9000]
    assert column(result, "ttft_s")[0] == pytest.approx(prefill_s(3000, 3000))
    assert column(result, "ttft_s")[3] == pytest.approx(
        prefill_s(3000, 3000) + prefill_s(3000) + prefill_s(9000)
    )  # fmt: skip


def test_shortest_prompt_first() -> None:
    rows = [(0.0, 9000, 1), (0.01, 9000, 1), (0.01, 200, 1)]
    fcfs = column(replay(simulation(*SCHEME, "scheme.max_batched_tokens=1000"), rows), "ttft_s")
    srpf = column(replay(simulation(*SCHEME, "scheme.max_batched_tokens=1000", "policy=srpf"), rows), "ttft_s")
    assert fcfs[1] < fcfs[2]
    assert srpf[2] < srpf[1]


def test_both_pools_are_bounded() -> None:
    """10 blocks a side: the second prompt stays in the prefill pool until the first has ended, the third waits."""
    result = replay(simulation(*SCHEME, "kv.capacity_tokens=160"), [(0.0, 100, 50), (0.0, 100, 50), (0.0, 100, 5)])
    finish, start = column(result, "finish_s"), column(result, "queueing_s")
    assert column(result, "first_token_s")[1] < finish[0]  # it was prefilled meanwhile
    assert column(result, "max_gap_s")[1] > finish[0] - column(result, "first_token_s")[1]
    assert start[2] >= finish[0]
    assert column(result, "preemptions") == [0, 0, 0]


def test_waiting_share_stops_the_pull() -> None:
    """Two decodes fill the batch; one more is pulled and waits, the next is not while it does."""
    rows = [(0.0, 100, 40)] * 2 + [(0.01, 100, 4)] * 2
    few = ("scheme.max_decode_batch=2", "kv.capacity_tokens=800")
    result = replay(simulation(*SCHEME, *few), rows)
    decodes = loop_rows(result, "decode/0")
    assert max(row["decode_tokens"] for row in decodes) == 2
    held = [row["kv_used_blocks"] for row in decodes if row["start_s"] > 0.1][:5]
    assert max(held) <= 3 * 9  # three requests, not four


def test_short_of_blocks_the_last_decode_is_swapped() -> None:
    sim = simulation(*SCHEME, "kv.capacity_tokens=160")
    result = replay(sim, [(0.0, 60, 80), (0.0, 60, 80)])
    assert column(result, "status") == ["completed"] * 2
    assert result.summary["swaps"] >= 1
    preempted = column(result, "preemptions")
    assert preempted[0] == 0 and preempted[1] == result.summary["swaps"]
    assert column(result, "emitted_tokens") == [80, 80]
    assert sum(row["prefill_tokens"] for row in loop_rows(result, "prefill/0")) == 120  # nothing is recomputed


def test_swap_costs_host_bandwidth() -> None:
    """Out and back at 1 GB/s; qwen3_14b keeps 160 KiB a token on one GPU."""
    rows = [(0.0, 60, 80), (0.0, 60, 80)]
    slow = replay(simulation(*SCHEME, "kv.capacity_tokens=160", "scheme.host_bandwidth=1e9"), rows)
    fast = replay(simulation(*SCHEME, "kv.capacity_tokens=160", "scheme.host_bandwidth=1e15"), rows)
    swapped = (column(slow, "finish_s")[1] - column(fast, "finish_s")[1]) * 1e9 / (40 * 2 * 8 * 128 * 2)
    assert slow.summary["swaps"] == fast.summary["swaps"] == 1
    assert swapped == pytest.approx(2 * round(swapped / 2))  # as many tokens out as in
    assert 60 < swapped / 2 < 140


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ({}, Sides(2, 2, 2, 2)),
        ({"split": "1+3"}, Sides(1, 1, 3, 1)),
        ({"split": "6+2"}, Sides(3, 1, 1, 1)),
        ({"prefill_gpus": 3}, Sides(3, 1, 1, 1)),
        ({"prefill_gpus": 2, "decode_gpus": 2, "decode_tp": 1}, Sides(2, 2, 2, 1)),
    ],
)
def test_splits(options: dict[str, object], sides: Sides) -> None:
    assert Disaggregated(**options).sides(ClusterSpec(4)) == sides


def test_splits_in_groups_of_the_model() -> None:
    assert Disaggregated(split="1+3").sides(ClusterSpec(8, 2)) == Sides(2, 2, 6, 2)
    assert Disaggregated(split="auto").tunable(ClusterSpec(8, 2)) == {"split": ["1+3", "2+2", "3+1"]}
    assert Disaggregated(split="auto").tunable() == {"split": ["1+1", "1+3", "3+1"]}
    assert Disaggregated().tunable() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "auto"}, "only `confsim goodput`"),
        ({"split": "1:3"}, r"write prefill\+decode"),
        ({"split": "1+2"}, "does not divide 4 groups"),
        ({"prefill_gpus": 4}, r"must be positive and add up"),
        ({"prefill_gpus": 1, "decode_gpus": 1}, r"add up to cluster\.gpus=4"),
        ({"prefill_tp": 3}, r"scheme\.prefill_tp=3 does not divide"),
    ],
)
def test_layouts_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Disaggregated(**options).sides(ClusterSpec(4))


def test_options_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"scheme\.transfer=push"):
        Disaggregated(transfer="push")
    with pytest.raises(InputError, match=r"scheme\.waiting_block_share"):
        Disaggregated(waiting_block_share=2.0)


def test_a_prompt_above_the_limit_is_refused() -> None:
    result = replay(simulation(*SCHEME, "scheme.max_prompt_tokens=500"), [(0.0, 501, 2), (0.0, 500, 2)])
    assert result.summary["rejected_by"] == {"prompt_limit": 1}


ROWS = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, transfer=st.sampled_from(["awaited", "asynchronous"]), capacity=st.integers(224, 600))
def test_nothing_is_lost(rows: list[tuple[float, int, int]], transfer: str, capacity: int) -> None:
    sim = SIMULATIONS[transfer]
    sim = replace(sim, kv=replace(sim.kv, capacity_tokens=capacity))
    result = replay(sim, sorted(rows))
    assert set(column(result, "status")) == {"completed"}
    assert column(result, "emitted_tokens") == [row[2] for row in sorted(rows)]


SIMULATIONS = {
    transfer: simulation(
        "scheme=disaggregated", "cluster.gpus=4", "scheme.split=1+3", f"scheme.transfer={transfer}",
        "kv.capacity_tokens=300", transfer_token_s=TOKEN_S,
    )
    for transfer in ("awaited", "asynchronous")
}  # fmt: skip
