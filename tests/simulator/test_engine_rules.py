"""What engines do beside batching: limits on requests in service, plans made ahead, KV kept or reserved."""

from __future__ import annotations

import dataclasses

import pytest
from simulator_harness import GPU, SCHEMES, Case, RecordingBackendConfig, column, latency

from confsim.errors import InputError
from confsim.outcome.slo import NoSlo, Slo
from confsim.schemes.chunked_prefill import running_limit

TENTH = latency(linear_base_s=0.1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_requests_in_service(scheme: str, most: int) -> None:
    """Six requests of 5 iterations at once: waves of `most`, each 5 iterations after the one before."""
    case = Case([(0.0, 10, 5)] * 6, scheme, latency=TENTH, slo=Slo(9.0, 1.0), max_running=most)
    result = case.run(check=True)
    waits = [0.5 * (index // most) for index in range(6)]
    assert column(result, "queueing_s") == pytest.approx(waits)
    assert max(map(sum, result.iterations["decode_per_group"].to_pylist())) == most


def test_requests_in_service_by_default() -> None:
    """vLLM: 1,024 from 70 GiB on, but for A100s; 256 elsewhere."""
    assert running_limit("vllm", GPU) == 1024
    assert running_limit("vllm", dataclasses.replace(GPU, name="a100_sxm")) == 256
    assert running_limit("vllm", dataclasses.replace(GPU, memory_bytes=48 * 2**30)) == 256
    assert running_limit(None, GPU) is None
    for wrong in (0, "sglang"):
        with pytest.raises(InputError, match=f"scheme.max_running={wrong}"):
            running_limit(wrong, GPU)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ahead", [True, False])
def test_an_arrival_waits_for_the_plan_that_is_settled(scheme: str, ahead: bool) -> None:
    """Iterations of 100 ms: an arrival in the second one is in the third plan, or with plans made ahead the fourth."""
    rows = [(0.0, 10, 10), (0.13, 10, 1), (5.0, 10, 1)]
    case = Case(rows, scheme, latency=TENTH, slo=Slo(9.0, 1.0), async_schedule=ahead)
    result = case.run(check=True)
    assert column(result, "queueing_s") == pytest.approx([0.0, 0.17 if ahead else 0.07, 0.0])
    assert result.summary["iterations"] == 11, "decodes go on meanwhile, and what comes to an idle loop starts at once"


def test_an_arrival_after_the_last_iteration_was_planned_starts_when_that_ends() -> None:
    """Nothing is to run next: the plan is made at once."""
    case = Case([(0.0, 10, 2), (0.15, 10, 1)], "chunked_prefill", latency=TENTH, slo=Slo(9.0, 1.0))
    assert column(case.run(check=True), "queueing_s") == pytest.approx([0.0, 0.05])


@pytest.mark.parametrize("cached", [True, False])
def test_a_preempted_request_reuses_its_own_blocks(cached: bool) -> None:
    """Blocks of 4 tokens, room for 16 of them: the second request is preempted and comes back when the first ends.

    Each starts with 20 tokens. When both need their ninth block (33 tokens), the second has stored 32 tokens, and loses
    no more of them than the first one needs: three blocks up to its end at 44 tokens. So 8 - 3 = 5 are still there.
    """
    rows = [(0.0, 20, 25), (0.0, 20, 25)]
    law = latency(linear_base_s=0.1)
    case = Case(
        rows, "chunked_prefill", gpus=1, latency=law, slo=Slo(99.0, 9.0), block_tokens=4, capacity_tokens=64,
        prefix_cache=cached, trace_block_tokens=4 if cached else 0,
    )  # fmt: skip
    plans = RecordingBackendConfig()
    result = case.run(check=True, backend=plans)
    assert column(result, "preemptions") == [0, 1]
    again = [chunk for plan in plans.plans for chunk in plan.chunks if chunk.request == 1][1:]
    found = 20 if cached else 0
    assert [(chunk.start, chunk.tokens) for chunk in again] == [(found, 33 - found)]
    assert column(result, "recomputed_tokens") == [0, 32 - found]
    assert column(result, "prefix_hit_tokens") == [0, 0], "its own tokens are no prefix hits"


def test_each_prompt_token_hits_once() -> None:
    """A request that found 8 tokens of a prefix finds them again after its preemption: 8 hits."""
    rows = [(0.0, 20, 25, [1, 2, 3, 4, 5]), (0.5, 20, 25, [1, 2, 6, 7, 8])]
    case = Case(
        rows, "chunked_prefill", gpus=1, latency=TENTH, slo=Slo(99.0, 9.0), block_tokens=4, capacity_tokens=64,
        prefix_cache=True, trace_block_tokens=4,
    )  # fmt: skip
    result = case.run(check=True)
    assert column(result, "preemptions") == [0, 1]
    assert column(result, "prefix_hit_tokens") == [0, 8]
    assert result.summary["prefix_hit_tokens"] == 8
    assert result.summary["recomputed_tokens"] == sum(column(result, "recomputed_tokens")) > 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_room_for_the_whole_request(scheme: str) -> None:
    """Where prompt and output are reserved, the second of two waits instead of being preempted."""
    rows = [(0.0, 20, 25), (0.0, 20, 25)]
    case = Case(
        rows, scheme, gpus=1, latency=TENTH, slo=Slo(99.0, 9.0), block_tokens=4, capacity_tokens=64,
        admission="prompt_output",
    )  # fmt: skip
    result = case.run(check=True)
    assert column(result, "preemptions") == [0, 0]
    assert column(result, "queueing_s") == pytest.approx([0.0, 2.5])
    assert set(result.iterations["kv_used_blocks"].to_pylist()) == {11}
    assert column(dataclasses.replace(case, admission="prompt").run(), "preemptions") == [0, 1]


def test_a_static_chunk_does_not_look_at_the_target() -> None:
    """512 tokens an iteration, whatever the TBT."""
    law = latency(linear_base_s=0.01, linear_token_s=1e-4)
    for tbt_s in (1.0, 0.001):
        case = Case([(0.0, 1500, 5)], "chunked_prefill", gpus=1, latency=law, slo=Slo(9.0, tbt_s), chunk_tokens=512)
        plans = RecordingBackendConfig()
        case.run(backend=plans)
        assert [plan.chunks[0].tokens for plan in plans.plans if plan.chunks] == [512, 512, 476]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_slo(scheme: str) -> None:
    """Latencies as with limits that nothing reaches, and no verdict."""
    rows = [(0.01 * i, 400, 5) for i in range(20)]
    law = latency(linear_base_s=0.01, linear_token_s=1e-5)
    bare = Case(rows, scheme, latency=law, slo=NoSlo()).run(check=True)  # type: ignore[call-arg]
    loose = Case(rows, scheme, latency=law, slo=Slo(1e6, 1e6)).run()
    for name in ("ttft_s", "max_gap_s", "tpot_s", "finish_s"):
        assert column(bare, name) == column(loose, name)
    summary = bare.summary
    assert (summary["attainment"], summary["attained"], summary["missed_by"], summary["slo"]) == (None, None, {}, None)
    assert set(column(bare, "attained")) == {None}
    assert not [line for line in summary["warnings"] if "slo." in line]
