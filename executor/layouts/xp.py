"""Conflux Parallelism: co-batched linear layers, prefill spread over the groups, decodes local, side by side."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from executor.layouts.base import LayoutKind, LocalAttention, Parts, Runner, run_layers

if TYPE_CHECKING:
    import torch

    from confsim.schemes.base import Scheme
    from confsim.schemes.cost import CoBatchCost
    from executor.fork import Sms
    from executor.work import Work


class Kind(LayoutKind):
    """Groups that share prompts and have decodes of their own."""

    live_schemes = ("conflux",)
    one_group = False
    moves_prompts = True
    side_by_side = True

    def planner(self, max_batched_tokens: int) -> Scheme:
        """Conflux."""
        from confsim.schemes.conflux import Conflux

        return Conflux(max_batched_tokens=max_batched_tokens)

    def refusal(self, cost: CoBatchCost) -> str:
        """Decodes cannot be spread."""
        if cost.spread is not None:
            return "scheme.spread_decode=true has no live layout: use scheme=uniform_sp"
        return super().refusal(cost)

    def runner(self, parts: Parts) -> Runner:
        """Attention in two paths."""
        return XpRunner(parts)


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
        return work.pick(run_layers(self.parts, self.parts.linear, work.stack(), partial(self._attend, work)))

    def _attend(self, work: Work, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        split = work.prefill_rows
        out = qkv.new_empty(len(qkv), self.local.q_heads * qkv.shape[-1])

        def prefill(sms: Sms) -> None:
            out[:split] = self._prefill(layer, qkv[:split], work, sms)

        def decode(sms: Sms) -> None:
            assert work.decode is not None
            out[split:] = self.local.decode(layer, qkv[split:], work.decode, sms)

        work.run_paths(self.parts.fork, prefill, decode)
        return out

    def _prefill(self, layer: int, qkv: torch.Tensor, work: Work, sms: Sms) -> torch.Tensor:
        rows, clock = work.prefill, self.parts.clock
        assert rows is not None
        if not self.spread:
            return self.local.prefill(layer, qkv, rows, sms).flatten(1)
        with clock.stage("communication"):
            qkv = self.parts.exchange.to_heads(qkv, rows.shards)
        with clock.stage("prefill_attention"):
            self.shared.append(layer, qkv, rows.slots)
        if work.handover is not None:
            with clock.stage("transfer"):
                work.handover.start(layer)
        with clock.stage("prefill_attention"):
            out = self.shared.attend_prefill(layer, qkv, rows, sms)
        with clock.stage("communication"):
            return self.parts.exchange.to_rows(out, rows.shards)
