"""Logits and greedy tokens against transformers: float32, CPU, 1e-4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from executor_harness import THREADS, Run, generate, hugging_face, prompts, random_split, reference_logits, tiny

from confsim.errors import InputError
from confsim.specs import KvConfig
from executor.config import Device, Layout, ModelConfig, read_model
from executor.runtime import Runtime

TOLERANCE = 1e-4
OUTPUTS = 6
LENGTHS = [37, 1, 16, 50, 3]
HEADS = {"llama": (8, 4), "qwen3": (8, 2)}  # qwen3: fewer KV heads than SP ranks, replicated in the exchange


class Reference:
    """A tiny model in transformers and as the executor reads it, with expected tokens and logits."""

    def __init__(self, family: str, folder: Path) -> None:
        q_heads, kv_heads = HEADS[family]
        shape = tiny(family, q_heads, kv_heads)
        model = hugging_face(shape, folder)
        self.config: ModelConfig = read_model(str(folder))
        assert self.config.rope == shape.rope
        self.prompts = prompts(LENGTHS)
        self.expected = {key: reference_logits(model, tokens, OUTPUTS) for key, tokens in self.prompts.items()}

    def check(self, runtime: Runtime, **how: object) -> Run:
        """Generate on a runtime and compare everything."""
        run = generate(runtime, self.prompts, OUTPUTS, **how)  # type: ignore[arg-type]
        for request, (tokens, logits) in self.expected.items():
            assert run.tokens[request] == tokens
            np.testing.assert_allclose(np.stack(run.logits[request]), logits, atol=TOLERANCE, rtol=0)
        return run


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


PROCESSES = {"sp2": Layout("xp", 2, 1), "tp2-sp2": Layout("xp", 2, 2), "mux2": Layout("mux", 1, 2)}


@pytest.fixture(scope="module", params=PROCESSES)
def process_runtime(request: pytest.FixtureRequest, reference: Reference) -> Iterator[Runtime]:
    layout = PROCESSES[request.param]
    device = Device(launcher="processes", overlap="threads")
    with Runtime(reference.config, layout, device, KvConfig(capacity_tokens=1024), keep_logits=True) as runtime:
        yield runtime


LAYOUTS = {
    "one-rank": Layout("xp", 1, 1),
    "sp2": Layout("xp", 2, 1),
    "sp4": Layout("xp", 4, 1),
    "tp2-sp2": Layout("xp", 2, 2),
    "uniform-tp1": Layout("tp", 1, 1),
    "uniform-tp4": Layout("tp", 1, 4),
    "uniform-sp2": Layout("sp", 2, 1),
    "uniform-sp4": Layout("sp", 4, 1),
    "uniform-sp2-tp2": Layout("sp", 2, 2),
    "mux1": Layout("mux", 1, 1),
    "mux2": Layout("mux", 1, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_transformers(reference: Reference, name: str) -> None:
    """Chunks of 7 tokens cut every prompt at awkward places; shards are uneven and often empty."""
    kv = KvConfig(capacity_tokens=512)
    with Runtime(reference.config, LAYOUTS[name], THREADS, kv, keep_logits=True) as runtime:
        reference.check(runtime)
        reference.check(runtime, chunk_tokens=7, split=random_split(3))


@pytest.mark.parametrize("tp", [1, 4])
def test_one_attention_call_for_both_phases_equals_transformers(reference: Reference, tp: int) -> None:
    stages = {}
    for one_kernel in (False, True):
        device = replace(THREADS, one_kernel=one_kernel)
        with Runtime(reference.config, Layout("tp", 1, tp), device, KvConfig(capacity_tokens=512), True) as runtime:
            run = reference.check(runtime, chunk_tokens=7, split=random_split(3))
        stages[one_kernel] = [bool(done.prefill_attention_s and done.decode_attention_s) for done in run.iterations]
    assert any(stages[False]) and not any(stages[True])
    with pytest.raises(InputError, match="one_kernel"):
        Runtime(reference.config, Layout("xp", 2, 1), Device(one_kernel=True), KvConfig(capacity_tokens=512))


def test_processes_equal_transformers(reference: Reference, process_runtime: Runtime) -> None:
    """The same over gloo, attention paths on two threads."""
    reference.check(process_runtime, chunk_tokens=13, split=random_split(1))
    reference.check(process_runtime, chunk_tokens=500)


@pytest.mark.parametrize("admission", ["prompt", "step"])
def test_pages_reused_after_a_free(reference: Reference, admission: str) -> None:
    """A pool that holds few requests at a time: pages change hands, and stale KV never shows."""
    kv = KvConfig(capacity_tokens=128, admission=admission)
    with Runtime(reference.config, Layout("xp", 2, 1), THREADS, kv, keep_logits=True) as runtime:
        for seed in range(3):
            reference.check(runtime, chunk_tokens=16, split=random_split(seed))


def test_pages_longer_than_blocks(reference: Reference) -> None:
    """E9: the kernel's page is not the accounting's block."""
    device = Device(launcher="threads", page_tokens=64)
    kv = KvConfig(capacity_tokens=512)
    with Runtime(reference.config, Layout("xp", 2, 1), device, kv, keep_logits=True) as runtime:
        reference.check(runtime, chunk_tokens=11, split=random_split(5))
