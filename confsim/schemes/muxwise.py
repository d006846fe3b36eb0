"""MuxWise: prefill and decode multiplexed inside every GPU (arXiv 2504.14489; its estimator, not SGLang's table).

Tensor parallelism over all GPUs, one copy of the weights, one KV pool. Decode iterations and layers of a prefill run
at the same time on disjoint SMs; both read the weights. After every decode iteration decode gets the fewest SMs with
which its predicted time, at the worst slowdown by the neighbour, meets the TBT; prefill gets the rest, and enough
layers to cover about that iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from confsim.errors import InputError
from confsim.kv.memory import COMMUNICATOR_BYTES, GRAPH_BYTES, MIB
from confsim.kv.pools import InPlaceKv
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.link import require_model_backend
from confsim.schemes.mux_cost import OTHER_SLOWDOWN, WORST_SLOWDOWN, Contention, MuxCost, MuxOptions, decode_sms
from confsim.schemes.mux_loops import MuxInstance
from confsim.schemes.mux_prefill import MuxLimits

CONTEXT_BYTES = 4 * MIB  # of a green context, by the paper
CONTENTION_STREAM = 0x4D  # separates its draws from those of other purposes


@dataclass(frozen=True)
class MuxWise:
    """Options of `scheme=muxwise`.

    `worst_slowdown` None: the paper's for the GPU (1.2 on A100, 1.3 on H100; 1.3 elsewhere). `contention`: what decode
    really suffers beside prefill, `sampled` evenly between nothing and the worst (the paper gives bounds only) or its
    `mean`.

    Raises:
        InputError: for options that cannot be.
    """

    name: str = "muxwise"
    partition_sms: int = 16
    worst_slowdown: float | None = None
    contention: str = "sampled"
    preempt_prefill: bool = False
    launch_overhead: float = 0.015
    graph_memory: float = 0.062
    max_batched_tokens: int = 8192
    longest_prompt_tokens: int = 131072
    async_schedule: bool = True

    def __post_init__(self) -> None:
        for key in ("partition_sms", "max_batched_tokens", "longest_prompt_tokens"):
            if getattr(self, key) < 1:
                raise InputError(f"scheme.{key}={getattr(self, key)}: use 1 or more")
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

    def build(self, setup: Setup) -> Instance:
        """Both loops.

        Raises:
            InputError: where another backend than the latency model is to time them, or the SMs do not split.
        """
        require_model_backend(setup, self.name)
        worst = self._worst(setup)
        options = MuxOptions(setup.slo.target_s, worst, self.launch_overhead, self.async_schedule)
        rng = np.random.default_rng([setup.seed, CONTENTION_STREAM, setup.instance])
        contention = Contention(worst, rng if self.contention == "sampled" else None)
        latency, layers = setup.latency_of(setup.cluster.gpus, 1), setup.model.num_hidden_layers
        cost = MuxCost(latency, setup.latency.shares, setup.gpu, self._splits(setup), layers, options, contention)
        kv = InPlaceKv(self.kv_report(setup).capacity_tokens, setup.kv, setup.entry_tokens)
        limits = MuxLimits(self.max_batched_tokens, self._longest(setup), self.preempt_prefill)
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

    def _splits(self, setup: Setup) -> list[int]:
        splits = decode_sms(setup.gpu, self.partition_sms)
        if not splits:
            raise InputError(f"scheme.partition_sms={self.partition_sms}: {setup.gpu.name} has {setup.gpu.sms} SMs")
        return splits
