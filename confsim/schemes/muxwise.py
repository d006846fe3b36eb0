"""MuxWise: prefill and decode multiplexed inside every GPU (arXiv 2504.14489), as its artifact or as its paper does it.

Tensor parallelism over all GPUs, one copy of the weights, one KV pool. Decode iterations and layers of a prefill run
at the same time on disjoint SMs; both read the weights.

`split=artifact`: what its published implementation does (github.com/ykcombat/sglang, `multiplexing.py` at 15964b87; in
SGLang as pdmux, `srt/multiplex/multiplexing_mixin.py` and `pdmux_context.py`). Decode's SMs follow the number of
decodes and change only when a prefill batch starts or ends or decode drains; every decode iteration launches
`layer_tokens // tokens` more layers of the prefill, whose end is noticed at the end of one; host work is exposed.

`split=best_fit`: the paper's estimator. After every decode iteration decode gets the fewest SMs with which its
predicted time, at the worst slowdown by the neighbour, meets the TBT; prefill gets the rest, and enough layers to
cover about that iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from confsim.errors import InputError
from confsim.kv.memory import COMMUNICATOR_BYTES, GRAPH_BYTES, MIB
from confsim.kv.pools import InPlaceKv
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.link import require_model_backend
from confsim.schemes.mux_cost import (
    OTHER_SLOWDOWN,
    WORST_SLOWDOWN,
    Contention,
    Division,
    MuxCost,
    MuxOptions,
    automatic_divisions,
    decode_sms,
)
from confsim.schemes.mux_loops import MuxInstance
from confsim.schemes.mux_prefill import MuxLimits

CONTEXT_BYTES = 4 * MIB  # of a green context, by the paper
SM_MULTIPLE = {"a100_sxm": 2}  # of a green context's SMs, as pdmux has it by architecture; 8 on Hopper
OTHER_MULTIPLE = 8
CONTENTION_STREAM = 0x4D  # separates its draws from those of other purposes


@dataclass(frozen=True)
class MuxWise:
    """Options of `scheme=muxwise`.

    With `split=artifact`: `divisions` is its table, rows of `[prefill SMs, decode SMs, from so many decodes on]` (the
    last row that the decodes reach counts), or None for its automatic rule with `sm_groups` groups, the two undivided
    ones included, and `decodes_divisor` (`automatic_divisions`). `layer_tokens` is its `split_forward_token_budget`.

    `worst_slowdown` None: the paper's for the GPU (1.2 on A100, 1.3 on H100; 1.3 elsewhere). `contention`: what decode
    really suffers beside prefill, `sampled` evenly between nothing and the worst (the paper gives bounds only) or its
    `mean`.

    Raises:
        InputError: for options that cannot be.
    """

    name: str = "muxwise"
    split: str = "artifact"
    divisions: Sequence[Sequence[int]] | None = None
    sm_groups: int = 8
    decodes_divisor: int = 36
    layer_tokens: int = 65536
    partition_sms: int = 16
    worst_slowdown: float | None = None
    contention: str = "sampled"
    preempt_prefill: bool = False
    launch_overhead: float = 0.015
    graph_memory: float = 0.062
    max_batched_tokens: int = 8192
    longest_prompt_tokens: int = 131072
    async_schedule: bool = False

    def __post_init__(self) -> None:
        at_least = {"sm_groups": 3}
        counts = ("sm_groups", "decodes_divisor", "layer_tokens", "partition_sms")
        for key in (*counts, "max_batched_tokens", "longest_prompt_tokens"):
            if getattr(self, key) < at_least.get(key, 1):
                raise InputError(f"scheme.{key}={getattr(self, key)}: use {at_least.get(key, 1)} or more")
        self._check_split()
        if self.contention not in ("sampled", "mean"):
            raise InputError(f"scheme.contention={self.contention}: use sampled or mean")
        worst = self.worst_slowdown
        if worst is not None and not (math.isfinite(worst) and worst >= 1.0):
            raise InputError(f"scheme.worst_slowdown={worst}: use a factor of 1 or more, or null")
        if not 0.0 <= self.launch_overhead < 1.0 or not 0.0 <= self.graph_memory < 1.0:
            raise InputError(
                f"scheme.launch_overhead={self.launch_overhead}, scheme.graph_memory={self.graph_memory}: "
                "use shares from 0 to below 1"
            )

    def _check_split(self) -> None:
        if self.split not in ("artifact", "best_fit"):
            raise InputError(f"scheme.split={self.split}: use artifact or best_fit")
        if self.preempt_prefill and self.split == "artifact":
            raise InputError("scheme.preempt_prefill=true: the artifact never preempts a prefill, use split=best_fit")
        if self.divisions is None:
            return
        if self.split != "artifact":
            raise InputError(f"scheme.divisions: scheme.split={self.split} chooses by predictions, use split=artifact")
        rows = self.divisions
        good = bool(rows) and all(len(row) == 3 and min(row[:2]) >= 1 and row[2] >= 0 for row in rows)
        if not good or rows[0][2] > 1 or any(low[2] > high[2] for low, high in pairwise(rows)):
            raise InputError(
                f"scheme.divisions={[list(row) for row in rows]}: give rows of [prefill SMs, decode SMs, from so many "
                "decodes on], the first from 1 or 0, ascending"
            )

    def build(self, setup: Setup) -> Instance:
        """Both loops.

        Raises:
            InputError: where another backend than the latency model is to time them, or the SMs do not split.
        """
        require_model_backend(setup, self.name)
        worst = self._worst(setup)
        artifact = self.split == "artifact"
        splits = self._splits(setup)
        starts = tuple(split.from_decodes for split in splits) if artifact else None
        options = MuxOptions(setup.slo.target_s, worst, self.launch_overhead, self.async_schedule, starts)
        rng = np.random.default_rng([setup.seed, CONTENTION_STREAM, setup.instance])
        contention = Contention(worst, rng if self.contention == "sampled" else None)
        latency, layers = setup.latency_of(setup.cluster.gpus, 1), setup.model.num_hidden_layers
        sms = [split.decode_sms for split in splits]
        cost = MuxCost(latency, setup.latency.shares, setup.gpu, sms, layers, options, contention)
        kv = InPlaceKv(self.kv_report(setup).capacity_tokens, setup.kv, setup.entry_tokens)
        layer_tokens = self.layer_tokens if artifact else None
        limits = MuxLimits(self.max_batched_tokens, self._longest(setup), self.preempt_prefill, layer_tokens)
        return MuxInstance(setup, self.name, cost, kv, limits)

    def kv_report(self, setup: Setup) -> KvReport:
        """One pool, less the decode graphs of every split, their contexts, and prefill's own communicator."""
        gpus = setup.cluster.gpus
        graphs = max(0, int(self.graph_memory * setup.gpu.memory_bytes) - GRAPH_BYTES)
        contexts = 2 * CONTEXT_BYTES * len(self._splits(setup))
        communicator = COMMUNICATOR_BYTES.get(gpus, max(COMMUNICATOR_BYTES.values()))
        largest = max(self.max_batched_tokens, self._longest(setup))
        return group_kv(setup, gpus, 1, largest, extra_bytes=graphs + contexts + communicator)

    def _worst(self, setup: Setup) -> float:
        if self.worst_slowdown is not None:
            return self.worst_slowdown
        return WORST_SLOWDOWN.get(setup.gpu.name, OTHER_SLOWDOWN)

    def _longest(self, setup: Setup) -> int:
        """Tokens of the longest prefill, which is never chunked."""
        limit = setup.model.max_context_tokens
        return self.longest_prompt_tokens if limit is None else min(limit, self.longest_prompt_tokens)

    def _splits(self, setup: Setup) -> list[Division]:
        """Decode's SMs in every split, with the decodes from which on the artifact takes it."""
        gpu = setup.gpu
        if self.divisions is not None:
            if any(row[0] + row[1] != gpu.sms for row in self.divisions):
                raise InputError(f"scheme.divisions: the SMs of every row have to add up to {gpu.name}'s {gpu.sms}")
            return [Division(row[1], row[2]) for row in self.divisions]
        if self.split == "artifact":
            multiple = SM_MULTIPLE.get(gpu.name, OTHER_MULTIPLE)
            splits = automatic_divisions(gpu, self.sm_groups, self.decodes_divisor, multiple)
            if not splits:
                raise InputError(f"scheme.split=artifact: {gpu.name} has {gpu.sms} SMs, too few to divide")
            return splits
        splits = [Division(sms, 0) for sms in decode_sms(gpu, self.partition_sms)]
        if not splits:
            raise InputError(f"scheme.partition_sms={self.partition_sms}: {gpu.name} has {gpu.sms} SMs")
        return splits
