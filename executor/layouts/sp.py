"""Uniform sequence parallelism: prefill and decode tokens alike are spread over the groups (Ulysses)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from confsim.run.plan import DecodeBatch, IterationPlan
from executor.layouts.base import LayoutKind, LocalAttention, Parts, Runner, run_layers

if TYPE_CHECKING:
    import torch

    from confsim.schemes.base import Scheme
    from executor.exchange import Shards
    from executor.work import Work


class Kind(LayoutKind):
    """Groups that share every request."""

    live_schemes = ("uniform_sp",)
    one_group = False
    spreads_decodes = True

    def planner(self, max_batched_tokens: int) -> Scheme:
        """Uniform sequence parallelism."""
        from confsim.schemes.uniform_sp import UniformSp

        return UniformSp(max_batched_tokens=max_batched_tokens)

    def arranged(self, plan: IterationPlan, groups: int) -> IterationPlan:
        """The scheme counts all groups as one batch of decodes: group `id % groups` computes a request's tokens."""
        if groups == 1 or len(plan.decode) > 1:
            return plan
        batches = tuple(DecodeBatch(group) for group in range(groups))
        for batch in plan.decode:
            for request in batch.members.values():
                batches[request.id % groups].members[request.id] = request
        chunks = tuple(
            chunk._replace(group=chunk.request.id % groups) if chunk.group >= 0 else chunk for chunk in plan.prefill
        )
        return IterationPlan(chunks, batches, plan.released)

    def runner(self, parts: Parts) -> Runner:
        """One exchange for both phases."""
        return SpRunner(parts)


class SpRunner:
    """One exchange carries the rows of both phases; KV stays where the exchange puts its heads."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.shared = LocalAttention(parts, parts.place.shared.q_heads)

    def forward(self, work: Work) -> torch.Tensor:
        """Hidden states of the rows that need logits."""
        rows = work.decode or work.prefill
        assert rows is not None and rows.shards is not None
        attend = partial(self._attend, work, rows.shards)
        return work.pick(run_layers(self.parts, self.parts.linear, work.stack(), attend))

    def _attend(self, work: Work, shards: Shards, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        clock, attention = self.parts.clock, self.shared
        with clock.stage("communication"):
            spread = self.parts.exchange.to_heads(qkv, shards)
        split = 0 if work.prefill is None else len(work.prefill.slots)
        out = spread.new_empty(len(spread), attention.q_heads, qkv.shape[-1])
        if work.prefill is not None:
            out[:split] = attention.prefill(layer, spread[:split], work.prefill)
        if work.decode is not None:
            out[split:] = attention.decode(layer, spread[split:], work.decode).view_as(out[split:])
        with clock.stage("communication"):
            return self.parts.exchange.to_rows(out, shards)
