"""Uniform sequence parallelism: both phases spread over all groups, in one batch.

The other uniform choice beside tensor parallelism (Ulysses for everything). Prefill chunks and decode tokens are
stacked and split by sequence, go through the same all-to-alls in every layer, and attend on each GPU's share of the
heads, one phase after the other. KV stays where attention wrote it, spread by head over all GPUs: one pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from confsim.kv.pools import InPlaceKv
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.cobatch import CoBatchInstance
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.schemes.fill import Limits


@dataclass(frozen=True)
class UniformSp:
    """Options of `scheme=uniform_sp`."""

    name: str = "uniform_sp"
    max_batched_tokens: int = 8192
    max_partial_prefills: int = 4
    async_schedule: bool = True
    max_running: int | None = None

    def build(self, setup: Setup) -> Instance:
        """One loop."""
        tp, sp = setup.cluster.tp, setup.cluster.groups
        cost = CoBatchCost(
            setup.latency_of(tp, sp),
            in_turn,
            async_schedule=self.async_schedule,
            spread=setup.latency_of(tp * sp, 1),
            joint_exchange=True,
        )
        kv = InPlaceKv(self.kv_report(setup).capacity_tokens, setup.kv, setup.entry_tokens)
        limits = Limits(
            setup.slo.target_s,
            None,
            self.max_batched_tokens,
            self.max_partial_prefills,
            max_running=self.max_running,
        )
        dispatch = setup.policy.dispatch_class("waterfill")
        return CoBatchInstance(
            setup, self.name, cost, kv, limits, dispatch, setup.policy.new_placement("least_context")
        )

    def kv_report(self, setup: Setup) -> KvReport:
        """One pool over all GPUs."""
        return group_kv(setup, setup.cluster.tp, setup.cluster.groups, self.max_batched_tokens, spread=True)
