"""Random plans over random requests: every layout yields the tokens of one rank; KV as the simulator counts it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from executor_harness import THREADS, all_on, alone, generate, prompts, random_split, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from confsim.errors import InputError
from confsim.specs import KvConfig
from executor import generate as generation
from executor.config import Device, Layout, Sampling
from executor.runtime import Runtime

LAYOUTS = (
    Layout("xp", 2, 1),
    Layout("xp", 4, 1),
    Layout("xp", 2, 2),
    Layout("sp", 2, 1),
    Layout("sp", 4, 1),
    Layout("tp", 1, 2),
    Layout("mux", 1, 2),
)
KV = KvConfig(capacity_tokens=160)


@pytest.fixture(scope="module")
def runtimes() -> Iterator[dict[Layout, Runtime]]:
    """One runtime a layout, all on one model, reused by every example."""
    model = tiny("qwen3", 8, 2)
    found: dict[Layout, Runtime] = {Layout("tp"): alone(model).__enter__()}
    for layout in LAYOUTS:
        found[layout] = Runtime(model, layout, Device(launcher="threads", overlap="threads"), KV).__enter__()
    yield found
    for runtime in found.values():
        runtime.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(LAYOUTS),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=5),
    outputs=st.data(),
    chunk=st.integers(1, 60),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
)
def test_any_plan_yields_the_tokens_of_one_rank(
    runtimes: dict[Layout, Runtime],
    layout: Layout,
    lengths: list[int],
    outputs: st.DataObject,
    chunk: int,
    seed: int,
    temperature: float,
) -> None:
    """Many requests joining and leaving a pool too small for all: preemptions and pages used again included."""
    requests = prompts(lengths, seed=seed)
    counts = [outputs.draw(st.integers(1, 12)) for _ in lengths]
    sampling = Sampling(temperature=temperature, top_k=40, top_p=0.95, seed=seed)
    expected = generate(runtimes[Layout("tp")], requests, counts, sampling=sampling)
    found = generate(runtimes[layout], requests, counts, chunk, random_split(seed), sampling)
    assert found.tokens == expected.tokens


def test_preempted_requests_go_on_where_they_were(runtimes: dict[Layout, Runtime]) -> None:
    """A pool that cannot hold all decodes to their end: recomputed prompts emit the token that is due."""
    requests = prompts([30, 31, 29, 33, 30, 32])
    expected = generate(runtimes[Layout("tp")], requests, 40)
    for layout in (Layout("xp", 2, 1), Layout("tp", 1, 2), Layout("sp", 2, 1)):
        run = generate(runtimes[layout], requests, 40, 48)
        assert run.preemptions > 0
        assert run.tokens == expected.tokens


def test_empty_shards_and_ranks_without_decodes(runtimes: dict[Layout, Runtime]) -> None:
    """All of a prompt on one group, all decodes on another: the rest still join the collectives."""
    requests = prompts([21])
    expected = generate(runtimes[Layout("tp")], requests, 5)
    for target in range(4):
        run = generate(runtimes[Layout("xp", 4, 1)], requests, 5, 8, all_on(target))
        assert run.tokens == expected.tokens


@pytest.mark.parametrize(
    ("layout", "q_heads", "kv_heads"),
    [(Layout("xp", 3, 1), 8, 4), (Layout("sp", 2, 4), 4, 4), (Layout("xp", 2, 2), 12, 3), (Layout("tp", 1, 6), 12, 4)],
)
def test_impossible_head_counts_are_refused_before_spawning(layout: Layout, q_heads: int, kv_heads: int) -> None:
    with pytest.raises(InputError, match="heads"):
        Runtime(tiny("llama", q_heads, kv_heads), layout)


def test_tokens_do_not_depend_on_batch_or_layout_when_sampled(runtimes: dict[Layout, Runtime]) -> None:
    requests = prompts([12, 17, 8])
    hot = Sampling(temperature=1.5, seed=3)
    together = generate(runtimes[Layout("tp")], requests, 8, sampling=hot).tokens
    for count in (1, 2):
        fewer = {request: requests[request] for request in range(count)}
        assert generate(runtimes[Layout("xp", 2, 1)], fewer, 8, sampling=hot).tokens == {
            request: together[request] for request in fewer
        }
    other = generate(runtimes[Layout("tp")], requests, 8, sampling=Sampling(temperature=1.5, seed=4)).tokens
    assert other != together
    assert len({tuple(tokens) for tokens in together.values()}) == 3


def test_top_k_of_one_is_greedy(runtimes: dict[Layout, Runtime]) -> None:
    requests = prompts([12])
    greedy = generate(runtimes[Layout("tp")], requests, 8).tokens
    assert generate(runtimes[Layout("tp")], requests, 8, sampling=Sampling(1.0, top_k=1)).tokens == greedy
    assert generate(runtimes[Layout("tp")], requests, 8, sampling=Sampling(1.0, top_p=1e-6)).tokens == greedy


def test_what_can_never_run_is_refused_with_the_simulators_reason() -> None:
    """Prompt + output up to the context limit runs, one more does not; nor does what no pool can hold."""
    prompt = prompts([60])[0]
    with Runtime(tiny(max_context_tokens=64), Layout("xp", 2, 1), THREADS, KvConfig(capacity_tokens=512)) as runtime:
        made = generation.generate(runtime, [prompt, prompt], [4, 5])
        assert (made.refused, [len(tokens) for tokens in made.tokens]) == (["", "context_limit"], [4, 0])
    with Runtime(tiny(), Layout("xp", 2, 1), THREADS, KvConfig(capacity_tokens=64)) as runtime:
        assert generation.generate(runtime, [prompt, prompt[:20]], 2).refused == ["kv_capacity", ""]


def test_draws_follow_the_distribution() -> None:
    """Frequencies of 40,000 draws stay within five standard deviations of the softmax."""
    import torch

    from executor.sampling import sample

    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    rows = 40_000
    settings_ = [Sampling(temperature=1.0, seed=5)] * rows
    tokens = sample(logits.expand(rows, 4), settings_, list(range(rows)), torch.zeros(rows, dtype=torch.int64))
    share = torch.bincount(tokens, minlength=4).numpy() / rows
    expected = torch.softmax(logits, 0).numpy()
    assert np.all(np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / rows))
