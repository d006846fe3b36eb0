"""Cases with an answer on paper: a lone request, steady decode, queues with known waiting times."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_harness import SCHEMES, Case, RecordingBackendConfig, column, latency, make_trace, open_load

from confsim.latency.affine import AffineLatencyConfig
from confsim.outcome.slo import Slo
from traces.arrivals import Poisson

LAW = AffineLatencyConfig()  # every term of the law is there
GPUS = 4


def decode_iteration_s(law: AffineLatencyConfig, contexts: list[int], async_schedule: bool = True) -> float:
    """Decodes of one group alone."""
    gpu_s = law.linear_base_s + law.linear_token_s * len(contexts)
    gpu_s += law.decode_base_s + law.decode_sequence_s * len(contexts) + law.decode_token_s * sum(contexts)
    gpu_s += law.head_base_s + law.head_token_s * len(contexts)
    return gpu_s + exposed_s(law, len(contexts), gpu_s, async_schedule)


def exposed_s(law: AffineLatencyConfig, sequences: int, gpu_s: float, async_schedule: bool) -> float:
    """Host time that shows."""
    host_s = law.iteration_overhead_s + law.sequence_overhead_s * sequences
    return max(0.0, host_s - gpu_s) if async_schedule else host_s


def prefill_iteration_s(
    law: AffineLatencyConfig, scheme: str, tokens: int, start: int = 0, last: bool = True, async_schedule: bool = True
) -> float:
    """One chunk alone on 4 GPUs; TP stacks all tokens, Conflux a quarter on each and exchanges heads."""
    shard = -(-tokens // GPUS) if scheme == "conflux" else tokens
    gpu_s = law.linear_base_s + law.linear_token_s * shard
    gpu_s += law.prefill_base_s + law.prefill_pair_s * tokens * (start + tokens / 2) / GPUS
    if scheme == "conflux":
        gpu_s += law.all_to_all_base_s + law.all_to_all_token_s * shard
    if last:
        gpu_s += law.head_base_s + law.head_token_s
    return gpu_s + exposed_s(law, 1, gpu_s, async_schedule)


@pytest.mark.parametrize("overhead_s", [0.0, 0.002, 0.5])
@pytest.mark.parametrize("async_schedule", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_lone_request(scheme: str, async_schedule: bool, overhead_s: float) -> None:
    law = AffineLatencyConfig(iteration_overhead_s=overhead_s)
    prompt, output, arrival = 1000, 6, 0.25
    case = Case([(arrival, prompt, output)], scheme, latency=law, async_schedule=async_schedule, slo=Slo(2.0, 5.0))
    result = case.run()
    ttft = prefill_iteration_s(law, scheme, prompt, async_schedule=async_schedule)
    gaps = [decode_iteration_s(law, [prompt + i], async_schedule) for i in range(1, output)]
    assert column(result, "ttft_s") == [pytest.approx(ttft, rel=1e-12)]
    assert column(result, "queueing_s") == [0.0]
    assert column(result, "prefill_s") == [pytest.approx(ttft, rel=1e-12)]
    ends = np.cumsum([arrival + ttft, *gaps])
    assert result.iterations["end_s"].to_pylist() == pytest.approx(ends.tolist(), rel=1e-12)
    assert column(result, "max_gap_s") == [pytest.approx(max(gaps), rel=1e-9)]
    assert column(result, "tpot_s") == [pytest.approx(sum(gaps) / len(gaps), rel=1e-9)]
    assert column(result, "e2e_s") == [pytest.approx(ttft + sum(gaps), rel=1e-12)]
    if overhead_s == 0.5:
        host = law.iteration_overhead_s + law.sequence_overhead_s
        assert gaps[0] == pytest.approx(host) if async_schedule else gaps[0] > host


def test_overhead_hides_behind_the_gpu() -> None:
    """Asynchronous: only what outlasts the GPU shows; synchronous: all of it."""
    law = latency(linear_base_s=0.010, iteration_overhead_s=0.012, sequence_overhead_s=0.001)
    for async_schedule, seconds in ((True, 0.013), (False, 0.023)):
        result = Case([(0.0, 10, 3)], latency=law, async_schedule=async_schedule).run()
        assert result.iterations["end_s"].to_pylist() == pytest.approx([seconds, 2 * seconds, 3 * seconds])
        shown = result.iterations["overhead_s"].to_pylist()
        assert shown[0] == pytest.approx(0.003 if async_schedule else 0.013)


@pytest.mark.parametrize("transfer_s,wait_s", [(0.0, 0.0), (0.005, 0.0), (0.08, 0.05)])
def test_transfer_shows_in_the_first_gap_only(transfer_s: float, wait_s: float) -> None:
    """30 ms of last chunk hide that much of the transfer; the rest delays the first decode, and TTFT not at all."""
    law = latency(linear_base_s=0.010, linear_token_s=2e-4, transfer_base_s=transfer_s)
    result = Case([(0.0, 400, 4)], latency=law).run()
    gap = 0.010 + 2e-4
    assert column(result, "ttft_s") == [pytest.approx(0.030)]
    ends = [0.030, 0.030 + wait_s + gap, 0.030 + wait_s + 2 * gap, 0.030 + wait_s + 3 * gap]
    assert result.iterations["end_s"].to_pylist() == pytest.approx(ends)
    assert column(result, "max_gap_s") == [pytest.approx(wait_s + gap)]


def test_transfer_grows_with_the_prompt() -> None:
    law = latency(linear_base_s=0.010, transfer_base_s=0.001, transfer_token_s=1e-4)
    result = Case([(0.0, 1000, 2)], latency=law).run()
    assert column(result, "max_gap_s") == [pytest.approx(0.101 - 0.010 + 0.010)]


@pytest.mark.parametrize("scheme,gpus", [("chunked_prefill", 4), ("conflux", 1), ("conflux", 4)])
def test_one_token_or_one_group_moves_nothing(scheme: str, gpus: int) -> None:
    law = latency(linear_base_s=0.010, transfer_base_s=1.0)
    output = 1 if (scheme, gpus) == ("conflux", 4) else 3
    result = Case([(0.0, 100, output)], scheme, gpus=gpus, latency=law).run()
    assert column(result, "e2e_s") == [pytest.approx(0.010 * output)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_long_prompt_in_chunks(scheme: str) -> None:
    """Every chunk but the last fills the target to within a token, at its own depth."""
    law = AffineLatencyConfig(prefill_pair_s=4e-8)
    prompt, target = 20_000, 0.1
    plans = RecordingBackendConfig()
    result = Case([(0.0, prompt, 1)], scheme, latency=law, slo=Slo(5.0, target)).run(backend=plans)
    done, total = 0, 0.0
    for plan in plans.plans:
        (chunk,) = plan.chunks
        assert chunk.start == done
        last = chunk.start + chunk.tokens == prompt
        seconds = prefill_iteration_s(law, scheme, chunk.tokens, chunk.start, last)
        assert seconds <= target * (1 + 1e-9)
        if not last:
            assert prefill_iteration_s(law, scheme, chunk.tokens + 1, chunk.start, False) > target
        done += chunk.tokens
        total += seconds
    assert done == prompt and len(plans.plans) > 3
    assert column(result, "ttft_s") == [pytest.approx(total, rel=1e-9)]


def test_margin_shrinks_what_planners_aim_at() -> None:
    law = latency(linear_base_s=0.010, linear_token_s=1e-4)
    for margin, tokens in ((0.0, 900), (0.2, 700), (0.5, 400)):
        plans = RecordingBackendConfig()
        case = Case([(0.0, 5000, 1)], "chunked_prefill", gpus=1, latency=law, slo=Slo(5.0, 0.1, margin=margin))
        case.run(backend=plans)
        assert plans.plans[0].chunks[0].tokens == tokens


def test_budget_fills_to_the_limit_exactly() -> None:
    """0.01 + 900 * 1e-4 is 0.1 but for rounding: the 900th token fits, the 901st does not."""
    law = latency(linear_base_s=0.01, linear_token_s=1e-4)
    plans = RecordingBackendConfig()
    Case([(0.0, 1800, 1)], "chunked_prefill", gpus=1, latency=law, slo=Slo(5.0, 0.1)).run(backend=plans)
    assert [plan.chunks[0].tokens for plan in plans.plans] == [900, 900]


def test_decodes_above_the_target_leave_one_block() -> None:
    """The oldest prefill gets one KV block per iteration; a static chunk does not look at the target."""
    law = latency(linear_base_s=0.01, decode_sequence_s=0.1)
    rows = [(0.0, 10, 40), (0.05, 100, 1)]
    for scheme, chunk in (("conflux", "auto"), ("chunked_prefill", "auto"), ("chunked_prefill", 512)):
        plans = RecordingBackendConfig()
        case = Case(rows, scheme, gpus=1, latency=law, slo=Slo(5.0, 0.1), chunk_tokens=chunk)
        case.run(backend=plans)
        chunks = [c.tokens for plan in plans.plans for c in plan.chunks if c.request == 1]
        assert chunks == ([100] if chunk == 512 else [16] * 6 + [4])


def test_cap_on_batched_tokens() -> None:
    """Without decodes the target holds still, and max_batched_tokens a group caps."""
    law = latency(linear_base_s=0.01)
    for scheme, gpus in (("conflux", 4), ("chunked_prefill", 4), ("chunked_prefill", 1)):
        plans = RecordingBackendConfig()
        Case([(0.0, 50_000, 1)], scheme, gpus=gpus, latency=law).run(backend=plans)
        assert plans.plans[0].chunks[0].tokens == 8192 * gpus


def test_static_chunk_counts_decodes() -> None:
    law = latency(linear_base_s=0.01)
    rows = [(0.0, 8, 30)] * 5 + [(0.05, 1000, 1)]
    plans = RecordingBackendConfig()
    Case(rows, "chunked_prefill", latency=law, chunk_tokens=100).run(backend=plans)
    mixed = [plan for plan in plans.plans if plan.chunks and plan.decode[0]]
    assert len(mixed) > 5
    for plan in mixed[:-1]:
        assert sum(c.tokens for c in plan.chunks) + len(plan.decode[0]) == 100


@pytest.mark.parametrize("scheme", SCHEMES)
def test_constant_rate_decode(scheme: str) -> None:
    """32 sequences step together: every gap is the same, throughput is their number over it."""
    law = latency(linear_base_s=0.008, linear_token_s=1e-5, decode_sequence_s=2e-5)
    count, output = 32, 200
    result = Case([(0.0, 64, output)] * count, scheme, latency=law).run()
    stacked = count if scheme == "chunked_prefill" else count // GPUS
    gap = 0.008 + 3e-5 * stacked
    table = result.iterations.to_pandas()
    steady = table[table["prefill_tokens"] == 0]
    assert len(steady) == output - 1
    assert np.allclose(steady["end_s"] - steady["start_s"], gap, rtol=1e-9)
    assert result.summary["tpot_s"]["mean"] == pytest.approx(gap)
    assert result.summary["gap_s"]["p99"] == pytest.approx(gap)
    assert result.summary["gap_s"]["count"] == count * (output - 1)
    seconds = steady["end_s"].iloc[-1] - steady["start_s"].iloc[0]
    assert steady["decode_tokens"].sum() / seconds == pytest.approx(count / gap)
    assert result.summary["utilisation"] == pytest.approx(1.0)


def one_at_a_time(scheme: str, prompt: int = 400) -> dict[str, object]:
    """Options under which an iteration serves one prompt, whole: a server with deterministic service."""
    if scheme == "chunked_prefill":
        return {"scheme": scheme, "chunk_tokens": prompt}
    return {"scheme": scheme, "max_batched_tokens": prompt // GPUS}


@pytest.mark.parametrize("load", [0.3, 0.7])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_md1_waiting(scheme: str, load: float) -> None:
    """Poisson arrivals, deterministic service: mean waiting is load / (2 (1 - load)) of a service.

    Each wait also follows Lindley's recursion exactly. The tolerance of the mean is four standard errors by batch
    means (waits are correlated; 50 batches of 240 outlast the correlation time, about 1 / (1 - load)^2 services).
    """
    count, prompt, service = 12_000, 400, 0.040
    law = latency(linear_base_s=service)
    case = Case([(0.0, prompt, 1)] * count, latency=law, **one_at_a_time(scheme))  # type: ignore[arg-type]
    arrivals = Poisson().apply(make_trace(case.rows), load / service, seed=5)
    result = case.simulation().replay(arrivals)
    waits = np.array(column(result, "queueing_s"))
    assert np.allclose(waits, lindley(arrivals.arrival_s, service), atol=1e-8)
    batches = waits.reshape(50, -1).mean(axis=1)
    error = batches.std(ddof=1) / np.sqrt(len(batches))
    theory = load / (2 * (1 - load)) * service
    assert error < 0.06 * theory, "the tolerance means something"
    assert abs(waits.mean() - theory) < 4 * error
    assert result.summary["utilisation"] == pytest.approx(load, rel=0.03)
    assert np.allclose(column(result, "prefill_s"), service)


def lindley(arrival_s: np.ndarray, service_s: float) -> np.ndarray:
    """Waiting times of a queue with one server, in order of arrival."""
    waits = [0.0]
    for gap in np.diff(arrival_s):
        waits.append(max(0.0, waits[-1] + service_s - gap))
    return np.array(waits)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("load", [0.8, 0.95, 1.05, 1.25])
def test_s14_utilisation(scheme: str, load: float) -> None:
    """S14: evenly spaced arrivals at a share of the capacity: the busy share of the time is known."""
    count, service = 500, 0.040
    rows = [(i * service / load, 400, 1) for i in range(count)]
    result = Case(rows, latency=latency(linear_base_s=service), **one_at_a_time(scheme)).run()  # type: ignore[arg-type]
    end = max(rows[-1][0], (count - 1) * service) + service
    assert result.summary["simulated_s"] == pytest.approx(end)
    assert result.summary["utilisation"] == pytest.approx(count * service / end)
    assert result.summary["overloaded"] is (load == 1.25)
    waits = column(result, "queueing_s")
    grows = max(0.0, service - service / load)
    assert waits == pytest.approx([grows * i for i in range(count)], abs=1e-9)


def test_requests_that_arrive_during_an_iteration_wait_for_its_end() -> None:
    law = latency(linear_base_s=0.05)
    result = Case([(0.0, 10, 1), (0.02, 10, 1), (0.05 + 1e-9, 10, 1)], "chunked_prefill", latency=law).run()
    assert column(result, "queueing_s") == pytest.approx([0.0, 0.03, 0.05], abs=1e-8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefix_reuse_by_hand(scheme: str) -> None:
    """Two prompts share 4 blocks of 64: the second prefills 44 tokens behind 256 cached ones."""
    law = latency(linear_base_s=0.01, prefill_pair_s=1e-6)
    rows = [(0.0, 300, 1, [1, 2, 3, 4, 5]), (1.0, 300, 1, [1, 2, 3, 4, 6])]
    case = Case(rows, scheme, latency=law, prefix_cache=True, trace_block_tokens=64)
    result = case.run(check=True)
    assert column(result, "prefix_hit_tokens") == [0, 256]
    first = 0.01 + 1e-6 * 300 * 150 / GPUS
    second = 0.01 + 1e-6 * 44 * (256 + 22) / GPUS
    assert column(result, "ttft_s") == pytest.approx([first, second])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefix_reuse_leaves_a_token_and_full_blocks_only(scheme: str) -> None:
    """An identical prompt of whole blocks: at most prompt - 1 tokens are reused, in full blocks."""
    rows = [(0.0, 256, 1, [1, 2, 3, 4]), (1.0, 256, 1, [1, 2, 3, 4]), (2.0, 257, 1, [1, 2, 3, 4, 5])]
    case = Case(rows, scheme, latency=latency(linear_base_s=0.01), prefix_cache=True, trace_block_tokens=64)
    assert column(case.run(check=True), "prefix_hit_tokens") == [0, 192, 256]


def test_prefix_is_visible_from_the_end_of_its_chunk() -> None:
    """A prompt that is planned while the first one's chunk runs finds nothing; after it, everything."""
    law = latency(linear_base_s=0.1)
    rows = [(0.0, 300, 1, [1, 2, 3, 4, 5]), (0.0, 300, 1, [1, 2, 3, 4, 6]), (0.05, 300, 1, [1, 2, 3, 4, 7])]
    case = Case(rows, "chunked_prefill", latency=law, prefix_cache=True, trace_block_tokens=64)
    assert column(case.run(check=True), "prefix_hit_tokens") == [0, 0, 256]


def test_two_loads_of_one_trace_do_not_share_state() -> None:
    case = Case([(0.0, 300, 5, [1, 2])] * 3, latency=LAW, prefix_cache=True, trace_block_tokens=256)
    simulation = case.simulation()
    first, second = (simulation.replay(open_load(case.trace())) for _ in range(2))
    assert first.summary == second.summary
    assert first.requests.equals(second.requests)
