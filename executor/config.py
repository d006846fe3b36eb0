"""What the executor runs, on what, and how its ranks are laid out: frozen data without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from confsim.parallel import HeadSplit, split_heads, split_heads_xp
from confsim.specs import KvConfig, ModelSpec
from executor.layouts import layout_kind
from executor.layouts.base import LayoutKind

FAMILIES = ("llama", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding; a `factor` turns the Llama 3 scaling on (Hugging Face `rope_scaling`, rope_type llama3)."""

    theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama 3.1 or Qwen3 family, by the names of its Hugging Face `config.json`.

    `weights` is a folder of safetensors; without one, weights are drawn from `seed`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = field(default_factory=Rope)
    max_context_tokens: int | None = None  # None: no limit
    weights: str | None = None
    seed: int = 0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InputError(f"executor.model.family={self.family}: unknown, use one of {', '.join(FAMILIES)}")
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, key) < 1:
                raise InputError(f"executor.model.{key}={getattr(self, key)}: use 1 or more")
        split_heads(self.num_attention_heads, self.num_key_value_heads, 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"executor.model: {self.num_attention_heads} query heads cannot share "
                f"{self.num_key_value_heads} KV heads evenly: use a number of KV heads that divides them"
            )

    def spec(self, dtype: str, name: str = "executor") -> ModelSpec:
        """The same model as the simulator sees it."""
        return ModelSpec(
            name=name,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            torch_dtype=dtype,
            tie_word_embeddings=self.tie_word_embeddings,
            qk_norm=self.family == "qwen3",
            max_context_tokens=self.max_context_tokens,
        )


@dataclass(frozen=True)
class Layout:
    """How ranks are arranged: `groups` of `tp` ranks each, rank = group * tp + position in its TP group.

    xp: prefill spread over the groups, decodes local. sp: both phases spread. tp: one group, both phases in one
    batch. mux: one group, the phases as separate batches side by side.
    """

    kind: str = "xp"
    groups: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for key in ("groups", "tp"):
            if getattr(self, key) < 1:
                raise InputError(f"executor.layout.{key}={getattr(self, key)}: use 1 or more")
        if self.rules.one_group and self.groups != 1:
            raise InputError(
                f"executor.layout.groups={self.groups}: a {self.kind} layout is one group, "
                "use executor.layout.groups=1 and set executor.layout.tp"
            )

    @property
    def rules(self) -> LayoutKind:
        """What its kind says of it."""
        return layout_kind(self.kind)

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.groups * self.tp

    @property
    def migrates(self) -> bool:
        """Whether a prompt's KV moves to the group of its decode."""
        return self.rules.moves_prompts and self.groups > 1

    def heads(self, model: ModelConfig) -> tuple[HeadSplit, HeadSplit]:
        """Heads of a rank in its TP group, and of its share in the exchange over groups.

        Raises:
            InputError: if the model cannot be split so (the rule of `confsim.parallel`).
        """
        if model.intermediate_size % self.tp:
            raise InputError(
                f"executor.model.intermediate_size={model.intermediate_size} does not divide over "
                f"executor.layout.tp={self.tp}"
            )
        return split_heads_xp(model.num_attention_heads, model.num_key_value_heads, self.tp, self.groups)

    def shards_per_block(self, model: ModelConfig) -> int:
        """Head shards, as the exchange over groups makes them, of one rank's KV heads."""
        local, shared = self.heads(model)
        return local.kv_heads // shared.kv_heads


@dataclass(frozen=True)
class Device:
    """Where ranks run and by which means.

    `overlap` of the two attention paths: cpu knows turn (one after the other) and threads; cuda knows partition (two
    streams on disjoint SMs), streams (two plain streams) and turn. `launcher`: processes, threads (all ranks in this
    process), or auto (the ranks of torchrun or Slurm where they exist, else processes). `one_kernel`: tp layouts run
    the attention of both phases in one variable-length call, as vLLM does, instead of one call each.
    """

    kind: str = "cpu"
    dtype: str = "float32"
    launcher: str = "auto"
    torch_threads: int = 1  # per rank, on CPU
    overlap: str = "turn"
    one_kernel: bool = False
    attention: str = "auto"  # auto, sdpa, flash, varlen
    page_tokens: int | None = None  # None: the smallest that the attention kernels take
    max_sequences: int = 256  # that hold KV of a group at once, where a page is longer than a block
    decode_sms: int = 32  # of a partition
    num_splits: int = 0  # of decode attention; 0: the kernel's choice
    graphs: bool = True  # linear segments as CUDA graphs
    graph_tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    start_timeout_s: float = 120.0
    collective_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        choices = {
            "kind": ("cpu", "cuda"),
            "dtype": DTYPES,
            "launcher": ("auto", "processes", "threads"),
            "overlap": ("turn", "threads") if self.kind == "cpu" else ("partition", "streams", "turn"),
            "attention": ("auto", "sdpa") if self.kind == "cpu" else ("auto", "sdpa", "flash", "varlen"),
        }
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise InputError(f"executor.device.{key}={getattr(self, key)}: unknown, use one of {', '.join(known)}")
        object.__setattr__(self, "graph_tokens", tuple(sorted(self.graph_tokens)))


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn: greedy at temperature 0, else reproducibly from `seed`."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InputError(f"sampling.temperature={self.temperature}: use 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"sampling.top_p={self.top_p}: use a share above 0 and up to 1")
        if self.top_k < 0:
            raise InputError(f"sampling.top_k={self.top_k}: use 0 (all) or more")


@dataclass(frozen=True)
class ExecutorConfig:
    """Everything that a `Runtime` needs."""

    model: ModelConfig
    layout: Layout = field(default_factory=Layout)
    device: Device = field(default_factory=Device)
    kv: KvConfig = field(default_factory=lambda: KvConfig(capacity_tokens=8192))


def read_model(path: str, weights: bool = True, seed: int = 0, max_context_tokens: int | None = None) -> ModelConfig:
    """Model of a Hugging Face folder: shapes from `config.json`, weights from its safetensors unless `weights` is off.

    Raises:
        InputError: if the folder or a key is missing, or the family is not one that the executor runs.
    """
    file = Path(path) / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}): give the folder of a Hugging Face model") from error
    return model_from_dict(raw, str(file), path if weights else None, seed, max_context_tokens)


def model_from_dict(
    raw: dict[str, Any], where: str, weights: str | None, seed: int = 0, max_context_tokens: int | None = None
) -> ModelConfig:
    """Model of a parsed `config.json`; both spellings of rotary settings (4.x and 5.x of transformers) are read."""
    _refuse_unsupported(raw, where)
    try:
        heads = raw["num_attention_heads"]
        return ModelConfig(
            family=raw["model_type"],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            rope=_read_rope(raw, where),
            max_context_tokens=max_context_tokens,
            weights=weights,
            seed=seed,
        )
    except KeyError as error:
        raise InputError(f"{where}: key {error} is missing") from error


def _refuse_unsupported(raw: dict[str, Any], where: str) -> None:
    if raw.get("model_type") not in FAMILIES:
        raise InputError(
            f"{where}: model_type={raw.get('model_type')} is not one that the executor runs ({', '.join(FAMILIES)})"
        )
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        raise InputError(f"{where}: biases in linear layers are not supported (attention_bias, mlp_bias)")
    if raw.get("hidden_act", "silu") != "silu":
        raise InputError(f"{where}: hidden_act={raw['hidden_act']} is not supported, only silu")
    if raw.get("use_sliding_window"):
        raise InputError(f"{where}: use_sliding_window is not supported")


def _read_rope(raw: dict[str, Any], where: str) -> Rope:
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise InputError(f"{where}: rope_type={kind} is not supported, only default and llama3")
    return Rope(
        theta,
        float(settings["factor"]),
        float(settings["low_freq_factor"]),
        float(settings["high_freq_factor"]),
        int(settings["original_max_position_embeddings"]),
    )
