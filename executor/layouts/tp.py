"""Uniform tensor parallelism, both phases in one batch (chunked prefill)."""

from __future__ import annotations

import torch

from executor.layouts.base import LocalAttention, Parts, run_layers
from executor.work import Work


class TpRunner:
    """One group: prefill and decode tokens share the linear layers, their attention runs in turn."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.local = LocalAttention(parts, parts.place.local.q_heads)

    def forward(self, work: Work) -> torch.Tensor:
        """Hidden states of the rows that need logits."""
        parts = self.parts
        hidden = run_layers(
            parts.linear, parts.clock, parts.layers, work.stack(), lambda layer, qkv: self._attend(layer, qkv, work)
        )
        return hidden[work.logit_rows]

    def _attend(self, layer: int, qkv: torch.Tensor, work: Work) -> torch.Tensor:
        split, clock = work.prefill_rows, self.parts.clock
        out = qkv.new_empty(len(qkv), self.local.q_heads * qkv.shape[-1])
        if work.prefill is not None:
            with clock.stage("prefill_attention"):
                self.local.append(layer, qkv[:split], work.prefill.slots)
                out[:split] = self.local.prefill(layer, qkv[:split], work.prefill).flatten(1)
        if work.decode is not None:
            with clock.stage("decode_attention"):
                self.local.append(layer, qkv[split:], work.decode.slots)
                out[split:] = self.local.decode(layer, qkv[split:], work.decode)
        return out
