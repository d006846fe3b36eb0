"""Uniform sequence parallelism: prefill and decode tokens alike are spread over the groups (Ulysses)."""

from __future__ import annotations

import torch

from executor.exchange import Shards
from executor.layouts.base import LocalAttention, Parts, run_layers
from executor.work import Work


class SpRunner:
    """One exchange carries the rows of both phases; KV stays where the exchange puts its heads."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.shared = LocalAttention(parts, parts.place.shared.q_heads)

    def forward(self, work: Work) -> torch.Tensor:
        """Hidden states of the rows that need logits."""
        parts = self.parts
        shards = work.decode.shards if work.decode is not None else _prefill_shards(work)
        assert shards is not None
        hidden = run_layers(
            parts.linear,
            parts.clock,
            parts.layers,
            work.stack(),
            lambda layer, qkv: self._attend(layer, qkv, work, shards),
        )
        return hidden[work.logit_rows]

    def _attend(self, layer: int, qkv: torch.Tensor, work: Work, shards: Shards) -> torch.Tensor:
        clock, attention = self.parts.clock, self.shared
        with clock.stage("communication"):
            spread = self.parts.exchange.to_heads(qkv, shards)
        split = 0 if work.prefill is None else len(work.prefill.slots)
        out = spread.new_empty(len(spread), attention.q_heads, qkv.shape[-1])
        if work.prefill is not None:
            with clock.stage("prefill_attention"):
                attention.append(layer, spread[:split], work.prefill.slots)
                out[:split] = attention.prefill(layer, spread[:split], work.prefill)
        if work.decode is not None:
            with clock.stage("decode_attention"):
                attention.append(layer, spread[split:], work.decode.slots)
                out[split:] = attention.decode(layer, spread[split:], work.decode).view_as(out[split:])
        with clock.stage("communication"):
            return self.parts.exchange.to_rows(out, shards)


def _prefill_shards(work: Work) -> Shards | None:
    return None if work.prefill is None else work.prefill.shards
