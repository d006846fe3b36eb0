"""Chunked prefill with uniform tensor parallelism (Sarathi-Serve, vLLM v1): one TP group, decodes first."""

from __future__ import annotations

from dataclasses import dataclass

from confsim.errors import InputError
from confsim.kv.pools import InPlaceKv
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.cobatch import CoBatchInstance
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.schemes.degrees import tp_candidates, tp_degree
from confsim.schemes.fill import Limits
from confsim.specs import ClusterSpec, GpuSpec

# vLLM's default of `max_num_seqs` (EngineArgs.get_batch_defaults, API server): 1,024 on GPUs with 70 GiB or more other
# than A100, 256 elsewhere.
LARGE_GPU_BYTES = 70 * 2**30
LARGE_GPU_RUNNING, RUNNING = 1024, 256
TUNED_CHUNKS = [512, 1024, 2048, 4096, 8192]


def static_chunk(chunk_tokens: int | str) -> int | None:
    """The static total of an iteration, None for the largest that meets the target.

    Raises:
        InputError: unless it is a positive number, `auto`, or `tuned` (which a search replaces by numbers).
    """
    if chunk_tokens == "auto":
        return None
    if isinstance(chunk_tokens, int) and chunk_tokens > 0:
        return chunk_tokens
    if chunk_tokens == "tuned":
        raise InputError("scheme.chunk_tokens=tuned: only `confsim goodput` can tune; give a number or auto")
    raise InputError(f"scheme.chunk_tokens={chunk_tokens}: use a positive number of tokens, auto or tuned")


def running_limit(max_running: int | str | None, gpu: GpuSpec) -> int | None:
    """Requests that may run at once, None for any number; `vllm` is what vLLM takes on this GPU.

    Raises:
        InputError: unless it is a positive number, `vllm` or null.
    """
    if max_running == "vllm":
        large = gpu.memory_bytes >= LARGE_GPU_BYTES and "a100" not in gpu.name.lower()
        return LARGE_GPU_RUNNING if large else RUNNING
    if max_running is None or (isinstance(max_running, int) and max_running > 0):
        return max_running
    raise InputError(f"scheme.max_running={max_running}: use 1 or more, vllm, or null for no limit")


@dataclass(frozen=True)
class ChunkedPrefill:
    """Options of `scheme=chunked_prefill`; `tp` None takes all GPUs."""

    name: str = "chunked_prefill"
    tp: int | str | None = None
    chunk_tokens: int | str = "auto"
    max_batched_tokens: int = 8192
    max_partial_prefills: int = 4
    async_schedule: bool = True
    prefill_first: bool = False
    max_running: int | str | None = "vllm"

    def tunable(self, cluster: ClusterSpec | None = None) -> dict[str, list[int | str]]:
        """Values that a goodput search tries for options set to be searched, on GPUs such as `cluster` has."""
        axes: dict[str, list[int | str]] = {}
        if self.tp in ("auto", "tuned"):
            axes["tp"] = tp_candidates(cluster or ClusterSpec(4))[::-1]
        if self.chunk_tokens == "tuned":
            axes["chunk_tokens"] = list(TUNED_CHUNKS)
        return axes

    def degree(self, setup: Setup) -> int:
        """GPUs of the TP group.

        Raises:
            InputError: for `auto`, which only a search can replace, or a degree that does not divide the cluster.
        """
        return setup.cluster.gpus if self.tp is None else tp_degree(self.tp, setup.cluster)

    def build(self, setup: Setup) -> Instance:
        """One loop."""
        latency = setup.latency_of(self.degree(setup), 1)
        cost = CoBatchCost(latency, in_turn, async_schedule=self.async_schedule, one_kernel=True)
        report = self.kv_report(setup)
        kv = InPlaceKv(report.capacity_tokens, setup.kv, setup.entry_tokens)
        limits = Limits(
            setup.slo.target_s,
            static_chunk(self.chunk_tokens),
            self._token_cap(setup),
            self.max_partial_prefills,
            self.prefill_first,
            running_limit(self.max_running, setup.gpu),
        )
        dispatch = setup.policy.dispatch_class("even")
        return CoBatchInstance(
            setup, self.name, cost, kv, limits, dispatch, setup.policy.new_placement("least_context")
        )

    def kv_report(self, setup: Setup) -> KvReport:
        """One pool."""
        return group_kv(setup, self.degree(setup), 1, self._token_cap(setup))

    def _token_cap(self, setup: Setup) -> int:
        """Tokens an iteration: `max_batched_tokens` for each group of `cluster.tp` GPUs, as for other schemes."""
        return self.max_batched_tokens * max(1, self.degree(setup) // setup.cluster.tp)
