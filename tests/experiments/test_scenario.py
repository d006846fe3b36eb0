"""Scenarios by hand, with the affine latency law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from confsim.api import build, compose
from confsim.errors import InputError
from confsim.run.scenario import Scenario, ScenarioResult, ScenarioRun, run
from confsim.setup.configuration import options

ONE = ("latency=affine", "decode_context=1000", "decode_tokens=1", "prefill_tokens=400", "tbt_s=10", "concurrency=1")


def scenario(*overrides: str) -> ScenarioResult:
    return run(compose(list(overrides), command="scenario"))


def test_one_prefill_beside_decodes_by_hand() -> None:
    summary = scenario(*ONE, "decodes_per_gpu=2", "prefills=1").summary
    linear = 0.010 + 40e-6 * (100 + 2)
    exchange = 0.002 + 4e-6 * 100
    prefill = 0.0005 + 1.5e-9 * 400 * 200 / 4
    decode = 0.0005 + 60e-9 * 2 * 1000
    stage = exchange + 1.5 * prefill  # the longer path, slowed by the other one
    head = 0.0005 + 2e-6 * 3
    assert summary["prefill_s"] == pytest.approx([linear + stage + head])
    assert summary["max_gap_s"] == pytest.approx(linear + stage + head)
    assert summary["prefills_per_s"] == pytest.approx(1 / (linear + stage + head))
    assert summary["iterations"] == 1
    assert summary["linear_stage_s"] == pytest.approx(linear)
    assert summary["attention_stage_s"] == pytest.approx(stage)
    assert summary["breakdown_s"] == pytest.approx(
        {
            "linear": linear,
            "prefill_attention": prefill,
            "decode_attention": decode,
            "communication": exchange,
            "head": head,
            "overhead": 0.0,
        }
    )
    assert summary["tokens_per_group"] == [102.0] * 4
    assert summary["tbt_met"]


def test_chunked_prefill_by_hand() -> None:
    """The second and third prompt come when an iteration of the decodes has been planned already."""
    summary = scenario(*ONE, "decodes_per_gpu=2", "prefills=3", "scheme=chunked_prefill").summary
    prefill = 0.0005 + 1.5e-9 * 400 * 200 / 4
    decode = 0.0005 + 60e-9 * 8 * 1000
    with_prompt = 0.010 + 40e-6 * (400 + 8) + prefill + decode + 0.0005 + 2e-6 * 9
    between = 0.010 + 40e-6 * 8 + decode + 0.0005 + 2e-6 * 8
    assert summary["prefill_s"] == pytest.approx([with_prompt, between + with_prompt, between + with_prompt])
    assert summary["iterations"] == 5
    assert summary["tokens_per_group"] == [pytest.approx((3 * 408 + 2 * 8) / 5)]


def test_prompts_outstanding_by_hand() -> None:
    """One prompt fills an iteration: of three outstanding ones the third waits for two others, the last two for two."""
    words = ("scheme=chunked_prefill", "scheme.max_batched_tokens=400", "scheme.chunk_tokens=400", "decodes_per_gpu=0")
    alone = scenario(*ONE, *words, "prefills=5").summary
    each = alone["prefill_s"][0]
    assert alone["prefill_s"] == pytest.approx([each] * 5)
    assert alone["concurrency"] == 1
    words += ("prefills=5", "concurrency=3")
    summary = scenario(*ONE, *words).summary
    assert summary["prefill_s"] == pytest.approx([each, 2 * each, 3 * each, 3 * each, 3 * each])
    assert summary["prefills_per_s"] == pytest.approx(1 / each)
    assert summary["concurrency"] == 3


def test_a_prefill_in_chunks_by_hand() -> None:
    """The budget is the target: 0.1 s take 2,000 tokens and the rest comes in a second iteration."""
    keys = ("latency.linear_base_s=0", "latency.linear_token_s=5e-5", "latency.head_base_s=0", "latency.head_token_s=0")
    free = [
        f"latency.{name}_s=0" for name in ("prefill_base", "prefill_pair", "iteration_overhead", "sequence_overhead")
    ]
    words = [*ONE[:1], *keys, *free, "scheme=chunked_prefill", "decodes_per_gpu=0", "prefills=1", "prefill_tokens=3000"]
    summary = scenario(*words, "tbt_s=0.1").summary
    assert summary["prefill_s"] == pytest.approx([0.15])
    assert summary["iterations"] == 2
    assert summary["max_gap_s"] is None
    assert summary["tbt_met"]


def test_without_overlap_the_paths_add_up() -> None:
    summary = scenario(*ONE, "decodes_per_gpu=2", "prefills=1", "scheme.overlap=false").summary
    parts = summary["breakdown_s"]
    total = parts["prefill_attention"] + parts["decode_attention"] + parts["communication"]
    assert summary["attention_stage_s"] == pytest.approx(total)


def test_decodes_of_one_gpu_and_waterfill() -> None:
    words = (*ONE, "decodes_per_gpu=[40,10,10,0]", "prefill_tokens=1140", "prefills=1")
    even = scenario(*words, "policy.dispatch=even").summary
    water = scenario(*words).summary
    assert even["prefill_tokens_per_group"] == [285.0] * 4
    assert water["prefill_tokens_per_group"] == [260.0, 290.0, 290.0, 300.0]
    assert water["decode_tokens_per_group"] == [40.0, 10.0, 10.0, 0.0]
    assert water["linear_stage_s"] == pytest.approx(0.010 + 40e-6 * 300)
    assert even["linear_stage_s"] == pytest.approx(0.010 + 40e-6 * 325)


def test_the_decode_load_stays_the_same() -> None:
    words = ("latency=affine", "decodes_per_gpu=8", "decode_tokens=32", "decode_context=500", "prefill_tokens=90000")
    result = scenario(*words, "prefills=3")
    assert result.summary["iterations"] > 40
    assert set(result.iterations["decode_tokens"].to_pylist()) == {32}
    context = result.iterations["context_tokens"].to_numpy() / 32
    assert np.abs(context - 500).max() <= 2
    assert result.summary["preemptions"] == 0


@pytest.mark.parametrize("scheme", options("scheme"))
def test_every_scheme_runs_a_scenario_s6(scheme: str) -> None:
    words = ["latency=affine", f"scheme={scheme}", "decodes_per_gpu=2", "decode_context=600", "decode_tokens=8"]
    cfg = compose([*words, "prefill_tokens=3000", "prefills=2"], command="scenario")
    replay = ScenarioRun(build(cfg), Scenario(2, 600, 8))
    replay.execute(check=True)
    summary = replay.outcome().summary
    assert len(summary["prefill_s"]) == 2
    assert min(summary["prefill_s"]) > 0
    assert summary["max_gap_s"] > 0
    assert sum(summary["decode_tokens_per_group"]) > 0
    assert summary["attention_stage_s"] >= 0


def test_the_result_is_written_and_the_same_again(tmp_path: Any) -> None:
    words = (*ONE, "decodes_per_gpu=2", "prefills=2")
    for name in ("a", "b"):
        scenario(*words).write(tmp_path / name)
    for file in ("summary.json", "iterations.parquet"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("decodes_per_gpu=[1,2]", "give one number, or 4"),
        ("decodes_per_gpu=-1", "whole number"),
        ("decodes_per_gpu=abc", "expected a number"),
        ("decode_context=0", "decode_context=0"),
        ("decode_tokens=5000", "too short"),
        ("prefills=0", "prefills=0"),
        ("concurrency=0", "concurrency=0"),
        ("arrivals.concurrency=2", "prefills and concurrency instead"),
        ("prefill_tokens=1.5", "prefill_tokens=1.5"),
        ("rate=2", "mean nothing in a scenario"),
        ("trace=toolagent", "set prefill_tokens"),
        ("cluster.instances=2", "one instance"),
        (["kv.capacity_tokens=40000", "decodes_per_gpu=30", "prefill_tokens=100"], "no KV for so many decodes"),
        ("prefill_tokens=9000000", "kv_capacity"),
    ],
)
def test_mistakes_x1(word: str | list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        scenario(
            "latency=affine", "decodes_per_gpu=2", "decode_context=2000", *([word] if isinstance(word, str) else word)
        )
