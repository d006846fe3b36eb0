"""Tiny models, plans and runs that the executor's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from confsim.policies import Policy
from confsim.policies.base import Dispatch
from confsim.run.engine import Simulation
from confsim.run.plan import IterationPlan
from confsim.schemes.base import Instance, KvReport, Setup
from confsim.specs import KvConfig
from executor import generate as generation
from executor.config import Device, Layout, ModelConfig, Rope, Sampling
from executor.generate import PromptBackend
from executor.live import frozen
from executor.runtime import ExecutedIteration, Runtime

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


class RandomDispatch:
    """Shards drawn at random, often empty."""

    def __init__(self, rng: np.random.Generator, decode_tokens: Sequence[int]) -> None:
        self._rng = rng
        self._decode = tuple(decode_tokens)

    def peak(self, tokens: int) -> tuple[int, int]:
        """As if all went to the fullest group."""
        return max(self._decode) + tokens, tokens

    def spread(self, tokens: int) -> tuple[int, ...]:
        """The sum is exact."""
        groups = len(self._decode)
        weights = self._rng.random(groups) * (self._rng.random(groups) > 0.4) + 1e-9
        return tuple(int(n) for n in self._rng.multinomial(tokens, weights / weights.sum()))

    def capacity(self, level: int) -> int:
        """As of levelled groups."""
        return sum(max(0, level - decode) for decode in self._decode)


class OneGroup(RandomDispatch):
    """Everything on the group that takes the place of the random numbers."""

    def spread(self, tokens: int) -> tuple[int, ...]:
        """All on one."""
        return tuple(tokens * (group == self._rng) for group in range(len(self._decode)))


@dataclass(frozen=True)
class Dispatching(Policy):
    """Prefill spread as a test says; everything else as usual."""

    make: Any = None

    def dispatch_class(self, default: str) -> Callable[[Sequence[int]], Dispatch]:
        """The test's."""
        made: Callable[[Sequence[int]], Dispatch] = self.make
        return made


def random_split(seed: int) -> Policy:
    """Shards drawn at random."""
    return Dispatching(make=partial(RandomDispatch, np.random.default_rng(seed)))


def all_on(group: int) -> Policy:
    """Every chunk on one group."""
    return Dispatching(make=partial(OneGroup, group))


class Watched(PromptBackend):
    """Compares KV with the simulator's accounting in every iteration, and keeps the plans."""

    def __init__(self, runtime: Runtime, sampling: Sampling | None = None) -> None:
        super().__init__(runtime, sampling)
        self.plans: list[IterationPlan] = []
        self.scheme: Any = None
        self.instance: Any = None
        self._held: list[int] = []

    def watch(self, policy: Policy | None, simulation: Simulation) -> Simulation:
        """The simulation whose instance this backend looks at."""
        self.scheme = simulation.scheme
        return replace(simulation, scheme=self, policy=policy or simulation.policy)

    name = "watched"

    def build(self, setup: Setup) -> Instance:
        """The scheme's instance."""
        self.instance = self.scheme.build(setup)
        return self.instance

    def kv_report(self, setup: Setup) -> KvReport:
        """The scheme's."""
        return self.scheme.kv_report(setup)

    def submit(self, plan: IterationPlan) -> None:
        """Note what the simulator holds."""
        layout = self.runtime.layout
        self.plans.append(frozen(layout.rules.arranged(plan, layout.groups)))
        self._held = [pool.held for pool in self.instance.pools()]
        super().submit(plan)

    def result(self) -> ExecutedIteration:
        """Compare."""
        done, layout = super().result(), self.runtime.layout
        for group in range(layout.groups):
            expected = self._held[group] if len(self._held) > 1 else self._held[0]
            found = done.ranks[group * layout.tp].kv_units
            # Admitted by steps, a chunk whose decode has no room yet holds blocks that no plan has named.
            is_same = found <= expected if self.runtime.kv.admission == "step" else found == expected
            assert is_same, "KV units of executor and simulator differ"
        return done


@dataclass(frozen=True)
class Run:
    """A generation, by request id, and the plans behind it."""

    tokens: dict[int, list[int]]
    logits: dict[int, list[np.ndarray]]
    preemptions: int
    iterations: list[ExecutedIteration]
    plans: list[IterationPlan]


def generate(
    runtime: Runtime,
    requests: dict[int, np.ndarray],
    outputs: int | list[int] = 6,
    chunk_tokens: int = 512,
    split: Policy | None = None,
    sampling: Sampling | None = None,
) -> Run:
    """Run requests to their end on a running runtime (which is free for others afterwards)."""
    backend = Watched(runtime, sampling)
    made = generation.generate(
        runtime, list(requests.values()), outputs, chunk_tokens, backend=backend, change=partial(backend.watch, split)
    )
    assert not any(made.refused)
    tokens, logits = dict(zip(requests, made.tokens, strict=True)), dict(zip(requests, made.logits, strict=True))
    return Run(tokens, logits, made.preemptions, made.iterations, backend.plans)


def pids(runtime: Runtime) -> list[int]:
    """Process ids of a runtime's ranks."""
    return [process.pid for process in runtime._team._processes]  # type: ignore[union-attr]


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
