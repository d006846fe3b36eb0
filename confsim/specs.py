"""What is served on what: model, GPU and cluster, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from confsim.errors import InputError
from confsim.parallel import HeadSplit, kv_token_bytes, split_heads, split_heads_xp

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder-only transformer, by the names of its Hugging Face `config.json`."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    torch_dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    max_context_tokens: int | None = None  # None: no limit
    gemm_dtype: str | None = None  # None: as torch_dtype
    kv_cache_dtype: str | None = None  # None: as torch_dtype

    def __post_init__(self) -> None:
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if getattr(self, key) < 1:
                raise InputError(f"model.{key}={getattr(self, key)}: use 1 or more")
        if self.max_context_tokens is not None and self.max_context_tokens < 1:
            raise InputError(f"model.max_context_tokens={self.max_context_tokens}: use 1 or more, or null for no limit")
        for key in ("torch_dtype", "gemm_dtype", "kv_cache_dtype"):
            value = getattr(self, key)
            if value is not None and value not in DTYPE_BYTES:
                raise InputError(f"model.{key}={value}: unknown, use one of {', '.join(DTYPE_BYTES)}")

    @property
    def itemsize(self) -> int:
        """Bytes of an activation element."""
        return DTYPE_BYTES[self.torch_dtype]

    @property
    def gemm_itemsize(self) -> int:
        """Bytes of a weight element of the linear layers."""
        return DTYPE_BYTES[self.gemm_dtype or self.torch_dtype]

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of the KV cache."""
        return DTYPE_BYTES[self.kv_cache_dtype or self.torch_dtype]

    @property
    def layer_parameters(self) -> int:
        """Weights of the linear layers of one transformer layer."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    def split_heads(self, tp: int, sp: int = 1) -> tuple[HeadSplit, HeadSplit]:
        """Heads of one GPU in a `tp` group, and of its share when `sp` groups exchange heads.

        Raises:
            InputError: where the heads do not divide, naming the model and the degrees.
        """
        try:
            return split_heads_xp(self.num_attention_heads, self.num_key_value_heads, tp, sp)
        except InputError as error:
            raise InputError(
                f"model {self.name} on {sp} groups of {tp} GPUs (cluster.gpus, cluster.tp): {error}"
            ) from None

    def weight_bytes(self, tp: int = 1) -> int:
        """Bytes of the weights that one GPU of a TP group holds; KV projections are replicated where heads are."""
        split = split_heads(self.num_attention_heads, self.num_key_value_heads, tp)
        attention = self.hidden_size * self.head_dim * 2 * (split.q_heads + split.kv_heads)
        linear = self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size // tp)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) // tp
        norms = self.num_hidden_layers * 2 * self.hidden_size + self.hidden_size
        return linear * self.gemm_itemsize + (embeddings + norms) * self.itemsize

    def kv_bytes_per_token(self, degree: int = 1) -> int:
        """Bytes of one token's KV on one of `degree` ranks that split the heads (replicas included)."""
        split = split_heads(self.num_attention_heads, self.num_key_value_heads, degree)
        return kv_token_bytes(split.kv_heads, self.head_dim, self.num_hidden_layers, self.kv_itemsize)


@dataclass(frozen=True)
class GpuSpec:
    """A GPU by its published figures; measured kernel times live in the latency profile."""

    name: str
    memory_bytes: int  # as the driver reports it
    memory_bandwidth: float  # bytes/s, peak
    flops: float  # dense bf16 FLOP/s, peak
    nvlink_bandwidth: float  # bytes/s in one direction
    sms: int


@dataclass(frozen=True)
class ClusterSpec:
    """GPUs of one serving instance and how they form groups; `instances` of them behind `router`."""

    gpus: int
    tp: int = 1
    instances: int = 1
    router: str = "round_robin"

    def __post_init__(self) -> None:
        for key in ("gpus", "tp", "instances"):
            if getattr(self, key) < 1:
                raise InputError(f"cluster.{key}={getattr(self, key)}: use 1 or more")
        if self.gpus % self.tp:
            raise InputError(f"cluster.gpus={self.gpus} does not divide into groups of cluster.tp={self.tp} GPUs")

    @property
    def groups(self) -> int:
        """Groups of one instance."""
        return self.gpus // self.tp


@dataclass(frozen=True)
class KvConfig:
    """`capacity_tokens` is a group's (None: from memory); `admission` is `prompt`, `step` or `prompt_output`."""

    block_tokens: int = 16
    capacity_tokens: int | None = None
    utilisation: float = 0.9
    prefix_cache: bool = False
    admission: str = "prompt"

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise InputError(f"kv.block_tokens={self.block_tokens}: use 1 or more")
        if self.capacity_tokens is not None and self.capacity_tokens < self.block_tokens:
            raise InputError(f"kv.capacity_tokens={self.capacity_tokens}: use at least one block, {self.block_tokens}")
        if not 0 < self.utilisation <= 1:
            raise InputError(f"kv.utilisation={self.utilisation}: use a share above 0 and up to 1")
        if self.admission not in ("prompt", "step", "prompt_output"):
            raise InputError(f"kv.admission={self.admission}: use prompt, step or prompt_output")
