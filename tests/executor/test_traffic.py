"""Bytes counted at the collectives equal the formulas of the latency model."""

from __future__ import annotations

import numpy as np
import pytest
from executor_harness import THREADS, all_on, generate, prompts, random_split, tiny

from analysis.calibrate.stages import missing_kv_bytes
from confsim.parallel import all_reduce_bytes, output_exchange_bytes, qkv_exchange_bytes
from confsim.run.plan import IterationPlan
from confsim.specs import KvConfig
from executor.config import Layout, ModelConfig
from executor.runtime import Runtime

FLOAT = 4

CASES = {
    "xp-2": (Layout("xp", 2, 1), 8, 4),
    "xp-4": (Layout("xp", 4, 1), 8, 4),
    "xp-4-replicated": (Layout("xp", 4, 1), 8, 2),
    "xp-4-one-kv-head": (Layout("xp", 4, 1), 8, 1),
    "xp-2x2": (Layout("xp", 2, 2), 8, 4),
    "xp-2x2-replicated": (Layout("xp", 2, 2), 8, 2),
    "sp-2": (Layout("sp", 2, 1), 8, 4),
    "sp-4-replicated": (Layout("sp", 4, 1), 8, 2),
    "sp-2x2": (Layout("sp", 2, 2), 8, 4),
    "tp-4": (Layout("tp", 1, 4), 8, 4),
    "tp-4-replicated": (Layout("tp", 1, 4), 8, 2),
    "mux-2": (Layout("mux", 1, 2), 8, 4),
}


def expected(model: ModelConfig, layout: Layout, group: int, plan: IterationPlan) -> dict[str, int]:
    """Bytes of one rank of `group` in a plan's iteration."""
    heads = (model.num_attention_heads, model.num_key_value_heads, model.head_dim)
    prompt_rows = sum(chunk.shards[group] for chunk in plan.prefill)
    rows = prompt_rows + len(plan.decode[group].members)
    spread = rows if layout.kind == "sp" else prompt_rows
    layers = model.num_hidden_layers
    found: dict[str, int] = {}
    if layout.groups > 1:
        found["qkv_exchange"] = layers * qkv_exchange_bytes(spread, *heads, FLOAT, layout.tp, layout.groups)
        found["output_exchange"] = layers * output_exchange_bytes(spread, heads[0], heads[2], FLOAT, layout.tp)
    if layout.tp > 1:
        found["all_reduce"] = layers * 2 * all_reduce_bytes(rows, model.hidden_size, FLOAT)
    return {use: count for use, count in found.items() if count}


@pytest.mark.parametrize("name", CASES)
def test_bytes_equal_the_formulas(name: str) -> None:
    layout, q_heads, kv_heads = CASES[name]
    model = tiny("llama", q_heads, kv_heads)
    requests = prompts([33, 20, 5])
    outputs = [1, 4, 6]  # the first has no decode: its KV goes nowhere
    with Runtime(model, layout, THREADS, KvConfig(capacity_tokens=1024)) as runtime:
        run = generate(runtime, requests, outputs, 12, random_split(2))
    moved_kv = 0
    for plan, done in zip(run.plans, run.iterations, strict=True):
        for report in done.ranks:
            counted = {use: n for use, n in report.moved.items() if n and use in EXCHANGED}
            assert counted == expected(model, layout, report.rank // layout.tp, plan)
            moved_kv += report.moved.get("kv_transfer", 0)
    a_token = missing_kv_bytes(model.spec("float32"), layout.tp, layout.groups) if layout.migrates else 0.0
    moving_tokens = len(requests[1]) + len(requests[2])
    assert moved_kv == moving_tokens * a_token * model.num_hidden_layers * layout.tp


EXCHANGED = ("qkv_exchange", "output_exchange", "all_reduce")


def test_last_token_follows_its_request() -> None:
    """A first token sampled on one group reaches the group that decodes on, whichever that is."""
    model = tiny()
    requests = prompts([9, 9, 9, 9])
    reference = None
    for layout in (Layout("tp"), Layout("xp", 4, 1)):
        with Runtime(model, layout, THREADS, KvConfig(capacity_tokens=512)) as runtime:
            run = generate(runtime, requests, 5, split=all_on(0))
        reference = reference or run.tokens
        assert run.tokens == reference
        if layout.groups > 1:
            assert sum(done.moved.get("first_tokens", 0) for done in run.iterations) > 0


def test_head_gather_is_the_padded_vocabulary() -> None:
    model = tiny(vocab_size=131)
    with Runtime(model, Layout("tp", 1, 2), THREADS, KvConfig(capacity_tokens=256)) as runtime:
        run = generate(runtime, prompts([5]), 2)
    assert run.iterations[0].ranks[0].moved["head_gather"] == 132 * FLOAT
    assert np.array(run.tokens[0]).max() < 131
