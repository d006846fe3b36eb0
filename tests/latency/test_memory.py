"""KV capacity: every term named, the given value wins (S9), and the head rule comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from confsim.errors import InputError
from confsim.kv.memory import GIB, activation_bytes, kv_capacity
from confsim.specs import GpuSpec, ModelSpec


def test_capacity_is_the_sum_of_its_terms(model: ModelSpec, gpu: GpuSpec) -> None:
    capacity = kv_capacity(model, gpu, 1, 4)
    terms = dict(capacity.terms)
    assert sum(value for name, value in terms.items() if name != "kv") == terms["kv"]
    assert terms["usable"] == int(0.9 * 85520809984)
    # 40 layers of 330,301,440 weights, norms, two embeddings of 151,936 x 5,120, in bf16.
    assert terms["weights"] == -2 * (40 * (330_301_440 + 2 * 5120) + 5120 + 2 * 151_936 * 5120)
    assert capacity.token_bytes == 2 * 8 * 128 * 40 * 2
    assert capacity.shard_token_bytes * 4 == capacity.token_bytes
    assert capacity.blocks == terms["kv"] // (capacity.token_bytes * 16)
    assert capacity.tokens == capacity.blocks * 16 == capacity.derived_tokens
    assert 250_000 < capacity.tokens < 300_000
    assert any("weights" in line for line in capacity.lines())


def test_s9_the_given_capacity_wins_with_a_warning(model: ModelSpec, gpu: GpuSpec) -> None:
    derived = kv_capacity(model, gpu, 1, 4).tokens
    given = kv_capacity(model, gpu, 1, 4, capacity_tokens=41_408)
    assert given.tokens == 41_408 and given.given and given.derived_tokens == derived
    assert "kv.capacity_tokens=41408" in given.warnings[0] and str(derived) in given.warnings[0]
    assert not kv_capacity(model, gpu, 1, 4, capacity_tokens=int(derived * 0.96)).warnings
    assert kv_capacity(model, gpu, 1, 4, capacity_tokens=int(derived * 1.06)).warnings


def test_replicated_heads_cost_memory(model: ModelSpec, gpu: GpuSpec) -> None:
    wide = replace(model, num_key_value_heads=2)
    capacity = kv_capacity(wide, gpu, 1, 8)
    assert capacity.kv_replicas == 4
    assert capacity.shard_token_bytes * 2 == capacity.token_bytes
    assert any("kept by 4 GPUs" in line for line in capacity.lines())
    assert kv_capacity(wide, gpu, 8, 1).token_bytes == wide.kv_bytes_per_token(2)


def test_each_scheme_pays_its_own_memory(model: ModelSpec, gpu: GpuSpec) -> None:
    plain = kv_capacity(model, gpu, 1, 1)
    assert kv_capacity(model, gpu, 1, 4).terms["communicators"] < 0 == plain.terms.get("communicators", 0)
    assert kv_capacity(model, gpu, 1, 1, max_batched_tokens=65_536).tokens < plain.tokens
    assert kv_capacity(model, gpu, 1, 1, extra_bytes=5 * GIB).terms["extra"] == -5 * GIB
    assert kv_capacity(model, gpu, 1, 1, graph_bytes=0).tokens > plain.tokens
    assert kv_capacity(model, gpu, 1, 1, utilisation=0.5).tokens < plain.tokens / 2


def test_nothing_left_for_kv_says_what_took_it(model: ModelSpec, gpu: GpuSpec) -> None:
    with pytest.raises(InputError, match=r"no memory for KV on h100_sxm.*weights -82.5.*cluster.tp"):
        kv_capacity(model, gpu, 1, 1, weight_copies=3)
    with pytest.raises(InputError, match=r"qwen3_14b on 1 groups of 16 GPUs.*40 query heads"):
        kv_capacity(model, gpu, 16, 1)


def test_activations_grow_with_the_batch_and_shrink_with_tp(model: ModelSpec) -> None:
    one = activation_bytes(model, 1, 1, 8192, 0)
    assert one == 8192 * 2 * (2 * 5120 + 3 * 17_408)
    assert activation_bytes(model, 1, 1, 16_384, 0) == 2 * one
    assert activation_bytes(model, 4, 1, 8192, 0) < one
    assert activation_bytes(model, 1, 1, 1, 1024) > 1024 * 151_936 * 6
