"""The latency model as schemes see it: seconds of one iteration's parts on a fixed layout."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from confsim.latency.mixed import MixedAttention


class DecodeLine(NamedTuple):
    """Decode attention as a line in the context: `value_s + slope_s * (c - context)` until `valid_until` tokens."""

    value_s: float
    slope_s: float  # seconds a further token of context
    valid_until: float  # total context up to which (inclusive) the line is exact; inf where it never ends


class LatencyModel(Protocol):
    """Times of a forward pass (all layers) on a layout of `sp` groups of `tp` GPUs; plain floats, microseconds a call.

    Every method is monotone in its token arguments and returns finite, non-negative seconds; zero work takes
    no time. Decode attention also rises with the sequences at the same context each; at the same total context more
    sequences may take less. Queries beyond the fitted range follow the last slope and are counted in `extrapolations`.
    """

    tp: int
    sp: int
    prefill_slowdown: float  # g_p: prefill attention while decode attention runs beside it
    decode_slowdown: float  # g_d
    mixed_overhead_s: float  # host time more of an iteration with both phases
    mixed: MixedAttention | None  # both phases in one attention call; None: the sum of two
    extrapolations: int

    def linear_s(self, tokens: int) -> float:
        """Linear layers and elementwise work of `tokens` stacked on one group, its TP all-reduces included."""

    def collective_s(self, tokens: int) -> float:
        """The TP all-reduces that `linear_s(tokens)` includes."""

    def decode_attention_s(self, sequences: int, context_tokens: int) -> float:
        """Decode attention of one group: `sequences` tokens that read `context_tokens` of KV together."""

    def decode_attention_line(self, sequences: int, context_tokens: int) -> DecodeLine:
        """The affine piece of `decode_attention_s` that starts at `context_tokens`, for fixed `sequences`."""

    def prefill_attention_s(self, tokens: int, cached_tokens: int) -> float:
        """Attention of a whole chunk of `tokens` behind `cached_tokens`, on the heads of one of tp * sp GPUs."""

    def all_to_all_s(self, shard_tokens: int) -> float:
        """Both all-to-alls with packing, for the largest shard; 0 where sp is 1."""

    def head_s(self, tokens: int) -> float:
        """LM head (and its gather over TP) for `tokens` that need logits."""

    def overhead_s(self, sequences: int) -> float:
        """Host time of an iteration with `sequences` sequences, before any of it is hidden."""

    def kv_transfer_s(self, tokens: int) -> float:
        """Sending the KV of `tokens` from their head shards to one group."""
