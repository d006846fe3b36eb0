"""Conflux Parallelism: co-batched linear layers, split attention, every decode on one group.

Prefill is spread over all groups by sequence (Ulysses) and dispatched by waterfill; decode attention runs beside
prefill attention on a share of the SMs. Prompt KV is spread by head and moves once, when the prompt ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from confsim.errors import InputError
from confsim.kv.pools import InPlaceKv, KvStore, MigratingKv
from confsim.parallel import split_heads
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.cobatch import CoBatchInstance
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.schemes.fill import Limits
from confsim.schemes.sm_split import attention_stage


@dataclass(frozen=True)
class Conflux:
    """Options of `scheme=conflux`; `overlap` to `overlap_transfer` switch parts of it off, for ablations.

    `sm_split` is how the attention stage shares the SMs (`confsim.schemes.sm_split`). `lockstep` states an assumption:
    all groups step together, decode-only iterations too; results report what it costs (`lockstep_wait_s`).
    """

    name: str = "conflux"
    max_batched_tokens: int = 8192
    max_partial_prefills: int = 4
    async_schedule: bool = True
    lockstep: bool = True
    sm_split: str = "paper"
    overlap: bool = True
    spread_decode: bool = False
    co_batch: bool = True
    overlap_transfer: bool = True
    max_running: int | None = None

    def __post_init__(self) -> None:
        if not self.lockstep:
            raise InputError(
                "scheme.lockstep=false: groups that step apart are not modelled; leave it true and read lockstep_wait_s"
            )

    def build(self, setup: Setup) -> Instance:
        """One lockstep loop over the cluster's groups."""
        tp, sp = setup.cluster.tp, setup.cluster.groups
        stage = attention_stage(self.sm_split, setup.latency.shares, setup.gpu)
        cost = CoBatchCost(
            setup.latency_of(tp, sp),
            stage if self.overlap else in_turn,
            self.co_batch,
            self.async_schedule,
            setup.latency_of(tp * sp, 1) if self.spread_decode else None,
            overlap_transfer=self.overlap_transfer,
        )
        limits = Limits(
            setup.slo.target_s,
            None,
            self.max_batched_tokens,
            self.max_partial_prefills,
            max_running=self.max_running,
        )
        dispatch = setup.policy.dispatch_class("waterfill")
        placement = setup.policy.new_placement("packing")
        return CoBatchInstance(setup, self.name, cost, self._kv(setup), limits, dispatch, placement)

    def kv_report(self, setup: Setup) -> KvReport:
        """Every group has a pool of its own, unless decodes are spread."""
        tp, sp = setup.cluster.tp, setup.cluster.groups
        return group_kv(setup, tp, sp, self.max_batched_tokens, self.spread_decode)

    def _kv(self, setup: Setup) -> KvStore:
        report = self.kv_report(setup)
        if report.groups == 1:
            return InPlaceKv(report.capacity_tokens, setup.kv, setup.entry_tokens)
        model, tp, sp = setup.model, setup.cluster.tp, setup.cluster.groups
        decode = split_heads(model.num_attention_heads, model.num_key_value_heads, tp).kv_heads
        shard = split_heads(model.num_attention_heads, model.num_key_value_heads, tp * sp).kv_heads
        return MigratingKv(sp, decode // shard, report.capacity_tokens, setup.kv, setup.entry_tokens)
