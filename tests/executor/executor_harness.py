"""Tiny models, plans and runs that the executor's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from confsim.specs import KvConfig
from executor.config import Device, Layout, ModelConfig, Rope, Sampling
from executor.runtime import ExecutedIteration, Runtime
from executor.schedule import Schedule, level_split

THREADS = Device(launcher="threads")
PROCESSES = Device(launcher="processes")


def tiny(family: str = "llama", q_heads: int = 8, kv_heads: int = 4, **changes: object) -> ModelConfig:
    """Three layers, 64 wide; weights large enough that logits of different tokens differ clearly."""
    settings: dict[str, object] = {
        "family": family,
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": family == "qwen3",
        "rope": Rope(10000.0, 8.0, 1.0, 4.0, 32) if family == "llama" else Rope(1e6),
        "initializer_range": 0.15,
    }
    return ModelConfig(**{**settings, **changes})  # type: ignore[arg-type]


def prompts(lengths: list[int], vocab_size: int = 131, seed: int = 0) -> dict[int, np.ndarray]:
    """Random prompts by request id."""
    rng = np.random.default_rng(seed)
    return {index: rng.integers(0, vocab_size, length) for index, length in enumerate(lengths)}


def random_split(seed: int) -> Callable[[int, tuple[int, ...]], tuple[int, ...]]:
    """Shards drawn at random, often empty."""
    rng = np.random.default_rng(seed)

    def split(tokens: int, load: tuple[int, ...]) -> tuple[int, ...]:
        weights = rng.random(len(load)) * (rng.random(len(load)) > 0.4) + 1e-9
        return tuple(int(n) for n in rng.multinomial(tokens, weights / weights.sum()))

    return split


class Run:
    """Drives a schedule on a running runtime and keeps what came out."""

    def __init__(self, runtime: Runtime, schedule: Schedule) -> None:
        self.runtime = runtime
        self.schedule = schedule
        self.tokens: dict[int, list[int]] = {}
        self.logits: dict[int, list[np.ndarray]] = {}
        self.iterations: list[ExecutedIteration] = []

    def step(self) -> ExecutedIteration:
        """One iteration."""
        plan = self.schedule.plan()
        held = [pool.held for pool in self.schedule.kv.pools]
        done = self.runtime.run(plan)
        groups = range(self.runtime.layout.groups)
        tp = self.runtime.layout.tp
        for group in groups:
            expected = held[group] if len(held) > 1 else held[0]
            assert done.ranks[group * tp].kv_units == expected, "KV units of executor and simulator differ"
        self.schedule.finish()
        self.iterations.append(done)
        for request, token in done.tokens.items():
            self.tokens.setdefault(request, []).append(token)
        for request, row in done.logits.items():
            self.logits.setdefault(request, []).append(row)
        return done

    def drain(self) -> Run:
        """Until every job has its tokens, then release the last of them."""
        while not self.schedule.done:
            self.step()
        self.step()
        return self


def generate(
    runtime: Runtime,
    requests: dict[int, np.ndarray],
    outputs: int | list[int] = 6,
    chunk_tokens: int = 512,
    split: Callable[[int, tuple[int, ...]], tuple[int, ...]] = level_split,
    sampling: Sampling | None = None,
) -> Run:
    """Run requests to their end on a running runtime (which is free for others afterwards)."""
    schedule = Schedule(runtime.layout, runtime.model, runtime.kv, chunk_tokens, split)
    counts = [outputs] * len(requests) if isinstance(outputs, int) else outputs
    for (request, tokens), count in zip(requests.items(), counts, strict=True):
        assert schedule.add(request, len(tokens), count) == ""
        runtime.add(request, tokens, sampling)
    run = Run(runtime, schedule).drain()
    for request in requests:
        runtime.forget(request)
    return run


def alone(model: ModelConfig, kv: KvConfig | None = None) -> Runtime:
    """The one-rank reference."""
    return Runtime(model, Layout("tp"), THREADS, kv or KvConfig(capacity_tokens=4096), keep_logits=True)


def hugging_face(model: ModelConfig, folder: Path):  # type: ignore[no-untyped-def]
    """The same model in transformers, its weights saved to `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    rope: dict[str, object] = {"rope_type": "default", "rope_theta": model.rope.theta}
    if model.rope.factor is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": model.rope.theta,
            "factor": model.rope.factor,
            "low_freq_factor": model.rope.low_freq_factor,
            "high_freq_factor": model.rope.high_freq_factor,
            "original_max_position_embeddings": model.rope.original_max_position,
        }
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = kinds[model.family]
    config = config_class(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
        rope_parameters=rope,
        max_position_embeddings=4096,
        initializer_range=model.initializer_range,
    )
    torch.manual_seed(7)
    reference = model_class(config).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name:  # ones would hide a norm that is not applied
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    reference.save_pretrained(folder, max_shard_size="100KB")  # several files with an index
    return reference


def reference_logits(reference, prompt: np.ndarray, outputs: int) -> tuple[list[int], np.ndarray]:  # type: ignore[no-untyped-def]
    """Greedy tokens and their logits `[outputs, vocabulary]`, by one full forward pass a token."""
    import torch

    ids = torch.tensor(prompt)[None]
    tokens, rows = [], []
    with torch.no_grad():
        for _ in range(outputs):
            row = reference(ids).logits[0, -1]
            rows.append(row.numpy())
            tokens.append(int(row.argmax()))
            ids = torch.cat((ids, torch.tensor([[tokens[-1]]])), dim=1)
    return tokens, np.stack(rows)
