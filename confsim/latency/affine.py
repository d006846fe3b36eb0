"""A latency law in closed form: one coefficient a term, for tests against hand calculation and for what-if studies."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from confsim.errors import InputError
from confsim.latency.base import DecodeLine
from confsim.latency.mixed import MixedAttention, chosen_grid, describe_grid
from confsim.latency.share import SmShares
from confsim.specs import GpuSpec, ModelSpec


@dataclass(slots=True)
class AffineLatency:
    """Times of a whole forward pass (all layers) as affine functions of the work; zero work takes no time.

    Units: `*_base_s` seconds whenever the term has any work, `*_token_s` seconds a token. Prefill attention costs
    `prefill_pair_s * n * (c + n / 2)` for `n` tokens behind `c` cached ones, divided by `tp * sp`.
    Implements `confsim.latency.base.LatencyModel`; nothing is ever extrapolated.
    """

    tp: int = 1
    sp: int = 1
    linear_base_s: float = 0.0
    linear_token_s: float = 0.0
    decode_base_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_token_s: float = 0.0
    prefill_base_s: float = 0.0
    prefill_pair_s: float = 0.0
    all_to_all_base_s: float = 0.0
    all_to_all_token_s: float = 0.0
    head_base_s: float = 0.0
    head_token_s: float = 0.0
    iteration_overhead_s: float = 0.0
    sequence_overhead_s: float = 0.0
    mixed_overhead_s: float = 0.0
    transfer_base_s: float = 0.0
    transfer_token_s: float = 0.0
    prefill_slowdown: float = 1.0
    decode_slowdown: float = 1.0
    mixed: MixedAttention | None = None
    extrapolations: int = field(default=0, init=False)

    def linear_s(self, tokens: int) -> float:
        """Affine in the stacked tokens of a group."""
        return self.linear_base_s + self.linear_token_s * tokens if tokens else 0.0

    def collective_s(self, tokens: int) -> float:
        """The law tells no all-reduces apart."""
        return 0.0

    def decode_attention_s(self, sequences: int, context_tokens: int) -> float:
        """Affine in the sequences and in the context that they read together."""
        if not sequences:
            return 0.0
        return self.decode_base_s + self.decode_sequence_s * sequences + self.decode_token_s * context_tokens

    def decode_attention_line(self, sequences: int, context_tokens: int) -> DecodeLine:
        """The line in the context for `sequences` decodes; valid without end."""
        if not sequences:
            return DecodeLine(0.0, 0.0, math.inf)
        return DecodeLine(self.decode_attention_s(sequences, context_tokens), self.decode_token_s, math.inf)

    def prefill_attention_s(self, tokens: int, cached_tokens: int) -> float:
        """`n * (c + n / 2)` pairs, spread over all GPUs."""
        if not tokens:
            return 0.0
        pairs = tokens * (cached_tokens + 0.5 * tokens)
        return self.prefill_base_s + self.prefill_pair_s * pairs / (self.tp * self.sp)

    def all_to_all_s(self, shard_tokens: int) -> float:
        """Affine in the largest shard; nothing is exchanged by one group."""
        if not shard_tokens or self.sp == 1:
            return 0.0
        return self.all_to_all_base_s + self.all_to_all_token_s * shard_tokens

    def head_s(self, tokens: int) -> float:
        """Affine in the tokens that need logits."""
        return self.head_base_s + self.head_token_s * tokens if tokens else 0.0

    def overhead_s(self, sequences: int) -> float:
        """Host time, before any of it is hidden."""
        return self.iteration_overhead_s + self.sequence_overhead_s * sequences if sequences else 0.0

    def kv_transfer_s(self, tokens: int) -> float:
        """Affine in the tokens moved; nothing moves in one group."""
        return self.transfer_base_s + self.transfer_token_s * tokens if tokens and self.sp > 1 else 0.0


@dataclass(frozen=True)
class AffineLatencyConfig:
    """`latency=affine`: the coefficients of `AffineLatency`, the same for every model, GPU and layout.

    Raises:
        InputError: for a coefficient that is negative, infinite or not a number, or a slowdown below 1.
    """

    linear_base_s: float = 0.010
    linear_token_s: float = 40e-6
    decode_base_s: float = 0.0005
    decode_sequence_s: float = 0.0
    decode_token_s: float = 60e-9
    prefill_base_s: float = 0.0005
    prefill_pair_s: float = 1.5e-9
    all_to_all_base_s: float = 0.002
    all_to_all_token_s: float = 4e-6
    head_base_s: float = 0.0005
    head_token_s: float = 2e-6
    iteration_overhead_s: float = 0.002
    sequence_overhead_s: float = 3.7e-5
    mixed_overhead_s: float = 0.0
    transfer_base_s: float = 0.0
    transfer_token_s: float = 4e-7
    prefill_slowdown: float = 1.5
    decode_slowdown: float = 1.0 / 0.9
    frontend_s: float = 0.0
    mixed_attention: str = "separate"
    noise: float = 0.0
    shares: SmShares = field(default_factory=SmShares)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name in ("shares", "mixed_attention"):
                continue
            value = getattr(self, item.name)
            least = 1.0 if item.name.endswith("slowdown") else 0.0
            if not (math.isfinite(value) and value >= least):
                raise InputError(f"latency.{item.name}={value}: give a finite number of at least {least:g}")

    def describe(self, model: ModelSpec, gpu: GpuSpec) -> dict[str, Any]:
        """What a result records about its latency model; it is the same for every model and GPU."""
        digest = hashlib.sha256(repr(asdict(self)).encode()).hexdigest()[:16]
        mixed = describe_grid(chosen_grid(self.mixed_attention, None), gpu.name)
        return {
            "source": "affine",
            "profile_hash": digest,
            "provenance": asdict(self),
            "errors": {},
            "mixed_attention": mixed,
        }

    def compile(self, model: ModelSpec, gpu: GpuSpec, tp: int, sp: int) -> AffineLatency:
        """The law on `sp` groups of `tp` GPUs; the head rule is checked, nothing else of model and GPU is used."""
        model.split_heads(tp, sp)
        others = ("noise", "shares", "mixed_attention", "frontend_s")
        coefficients = {key: value for key, value in asdict(self).items() if key not in others}
        return AffineLatency(tp=tp, sp=sp, mixed=chosen_grid(self.mixed_attention, None), **coefficients)
