"""Conflux Parallelism: co-batched linear layers, prefill spread over the groups, decodes local, side by side."""

from __future__ import annotations

import torch

from executor.layouts.base import LocalAttention, Parts, run_layers
from executor.work import Work


class XpRunner:
    """Prefill shards and decode tokens share the linear layers; attention forks into two paths."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        place = parts.place
        self.spread = place.groups > 1
        self.shared = LocalAttention(parts, place.shared.q_heads)
        self.local = LocalAttention(parts, place.local.q_heads)

    def forward(self, work: Work) -> torch.Tensor:
        """Hidden states of the rows that need logits."""
        parts = self.parts
        hidden = run_layers(
            parts.linear, parts.clock, parts.layers, work.stack(), lambda layer, qkv: self._attend(layer, qkv, work)
        )
        return hidden[work.logit_rows]

    def _attend(self, layer: int, qkv: torch.Tensor, work: Work) -> torch.Tensor:
        split = work.prefill_rows
        out = qkv.new_empty(len(qkv), self.local.q_heads * qkv.shape[-1])

        def prefill() -> None:
            out[:split] = self._prefill(layer, qkv[:split], work)

        def decode() -> None:
            out[split:] = self._decode(layer, qkv[split:], work)

        if work.prefill is None:
            decode()
        elif work.decode is None:
            prefill()
        else:
            self.parts.fork.run(prefill, decode)
        return out

    def _prefill(self, layer: int, qkv: torch.Tensor, work: Work) -> torch.Tensor:
        rows, clock = work.prefill, self.parts.clock
        assert rows is not None
        attention = self.shared if self.spread else self.local
        if self.spread:
            with clock.stage("communication"):
                qkv = self.parts.exchange.to_heads(qkv, rows.shards)
        with clock.stage("prefill_attention"):
            attention.append(layer, qkv, rows.slots)
        if work.handover is not None:
            with clock.stage("transfer"):
                work.handover.start(layer)
        with clock.stage("prefill_attention"):
            out = attention.prefill(layer, qkv, rows)
        if not self.spread:
            return out.flatten(1)
        with clock.stage("communication"):
            return self.parts.exchange.to_rows(out, rows.shards)

    def _decode(self, layer: int, qkv: torch.Tensor, work: Work) -> torch.Tensor:
        rows = work.decode
        assert rows is not None
        with self.parts.clock.stage("decode_attention"):
            self.local.append(layer, qkv, rows.slots)
            return self.local.decode(layer, qkv, rows)
