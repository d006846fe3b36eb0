"""Prefill-decode disaggregation after DistServe: each phase on GPUs of its own.

Prefill workers batch whole prompts and emit the first token; a decode worker pulls the KV and emits the rest. The
transfer comes after the first token, so it lands in the first gap. Where DistServe's paper and code disagree: in the
code the decode loop awaits each transfer (`scheme.transfer=awaited`, the default here), the paper copies while the GPU
goes on decoding (`asynchronous`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from confsim.errors import InputError
from confsim.kv.pools import BlockPool
from confsim.run.request import Request
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.schemes.disagg.decode import DecodeLimits, DecodeWorker
from confsim.schemes.disagg.prefill import PrefillLimits, PrefillWorker, PromptCost
from confsim.schemes.link import KvLink, require_model_backend
from confsim.specs import ClusterSpec


@dataclass(frozen=True)
class Sides:
    """GPUs and TP degree of each phase."""

    prefill_gpus: int
    prefill_tp: int
    decode_gpus: int
    decode_tp: int


@dataclass(frozen=True)
class Disaggregated:
    """Options of `scheme=disaggregated`; see `conf/scheme/disaggregated.yaml`."""

    name: str = "disaggregated"
    split: str = "1+1"
    prefill_gpus: int | None = None
    decode_gpus: int | None = None
    prefill_tp: int | None = None
    decode_tp: int | None = None
    max_batched_tokens: int = 8192
    max_prefill_batch: int = 128
    max_decode_batch: int = 1024
    max_prompt_tokens: int = 196608
    waiting_block_share: float = 0.05
    transfer: str = "awaited"
    host_bandwidth: float = 25e9
    async_schedule: bool = True

    def __post_init__(self) -> None:
        if self.transfer not in ("awaited", "asynchronous"):
            raise InputError(f"scheme.transfer={self.transfer}: use awaited or asynchronous")
        for key in ("max_batched_tokens", "max_prefill_batch", "max_decode_batch", "max_prompt_tokens"):
            if getattr(self, key) < 1:
                raise InputError(f"scheme.{key}={getattr(self, key)}: use 1 or more")
        if not 0 <= self.waiting_block_share <= 1:
            raise InputError(f"scheme.waiting_block_share={self.waiting_block_share}: use a share from 0 to 1")
        if not 0 < self.host_bandwidth < float("inf"):
            raise InputError(f"scheme.host_bandwidth={self.host_bandwidth}: use a positive number of bytes a second")

    def tunable(self, cluster: ClusterSpec | None = None) -> dict[str, list[int | str]]:
        """Splits that a goodput search tries: every one of `cluster`'s groups, or three where it is not known."""
        if self.split not in ("auto", "tuned"):
            return {}
        if cluster is None:
            return {"split": ["1+1", "1+3", "3+1"]}
        return {"split": [f"{count}+{cluster.groups - count}" for count in range(1, cluster.groups)]}

    def sides(self, cluster: ClusterSpec) -> Sides:
        """How the GPUs are divided.

        Raises:
            InputError: where they cannot be.
        """
        prefill, decode = self._gpus(cluster)
        return Sides(
            prefill, _degree("prefill", self.prefill_tp, prefill, cluster),
            decode, _degree("decode", self.decode_tp, decode, cluster),
        )  # fmt: skip

    def _gpus(self, cluster: ClusterSpec) -> tuple[int, int]:
        if self.prefill_gpus is None and self.decode_gpus is None:
            return _split(self.split, cluster)
        prefill = cluster.gpus - (self.decode_gpus or 0) if self.prefill_gpus is None else self.prefill_gpus
        decode = cluster.gpus - prefill if self.decode_gpus is None else self.decode_gpus
        if prefill < 1 or decode < 1 or prefill + decode != cluster.gpus:
            raise InputError(
                f"scheme.prefill_gpus={prefill} and scheme.decode_gpus={decode} must be positive and add up to "
                f"cluster.gpus={cluster.gpus}"
            )
        return prefill, decode

    def build(self, setup: Setup) -> Instance:
        """One process a worker."""
        require_model_backend(setup, self.name)
        return DisaggregatedInstance(setup, self)

    def kv_report(self, setup: Setup) -> KvReport:
        """The decode side's pools; the prefill side's are among the counters of the summary."""
        sides = self.sides(setup.cluster)
        report = group_kv(setup, sides.decode_tp, 1, self.max_decode_batch)
        return replace(report, groups=sides.decode_gpus // sides.decode_tp)

    def prefill_kv(self, setup: Setup) -> KvReport:
        """The prefill side's pools, beside the activations of the longest prompt."""
        sides = self.sides(setup.cluster)
        report = group_kv(setup, sides.prefill_tp, 1, max(self.max_prompt_tokens, self.max_batched_tokens))
        return replace(report, groups=sides.prefill_gpus // sides.prefill_tp)

    def cost(self, setup: Setup, tp: int) -> CoBatchCost:
        """Decode iterations of a TP group."""
        return CoBatchCost(setup.latency_of(tp, 1), in_turn, async_schedule=self.async_schedule)

    def prompt_cost(self, setup: Setup, tp: int) -> PromptCost:
        """Prefills of a TP group."""
        return PromptCost(setup.latency_of(tp, 1), in_turn, async_schedule=self.async_schedule)

    def decode_limits(self, setup: Setup, tp: int) -> DecodeLimits:
        """Of a decode worker; every GPU swaps its own shard over its own host link."""
        swap_s = setup.model.kv_bytes_per_token(tp) / self.host_bandwidth
        return DecodeLimits(self.max_decode_batch, self.waiting_block_share, self.transfer == "awaited", swap_s)


def _split(split: str, cluster: ClusterSpec) -> tuple[int, int]:
    """GPUs of each phase in the proportion `P+D`, in whole groups of `cluster.tp`."""
    if split in ("auto", "tuned"):
        raise InputError(f"scheme.split={split}: only `confsim goodput` can search it; give a split such as 1+3")
    parts = str(split).split("+")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise InputError(f"scheme.split={split}: write prefill+decode, such as 1+3 (a quarter of the GPUs prefills)")
    prefill, decode = map(int, parts)
    groups = cluster.groups
    if prefill * groups % (prefill + decode):
        raise InputError(
            f"scheme.split={split} does not divide {groups} groups of {cluster.tp} GPUs (cluster.gpus, cluster.tp)"
        )
    share = prefill * groups // (prefill + decode)
    return share * cluster.tp, (groups - share) * cluster.tp


def _degree(side: str, tp: int | None, gpus: int, cluster: ClusterSpec) -> int:
    """TP within a side; by default the largest doubling of `cluster.tp` that divides its GPUs."""
    if tp is None:
        tp = cluster.tp
        while gpus % (2 * tp) == 0:
            tp *= 2
    if tp < 1 or gpus % tp:
        raise InputError(f"scheme.{side}_tp={tp} does not divide the {gpus} GPUs that {side}: choose another split")
    return tp


class DisaggregatedInstance(Instance):
    """Prefill workers, decode workers, and who gets what: the shortest prefill queue, the least loaded decode."""

    def __init__(self, setup: Setup, scheme: Disaggregated) -> None:
        super().__init__(setup)
        self.sides = sides = scheme.sides(setup.cluster)
        self._scheme = scheme
        self._prefill_kv, self._decode_kv = scheme.prefill_kv(setup), scheme.kv_report(setup)
        limits = PrefillLimits(scheme.max_prefill_batch, scheme.max_batched_tokens)
        self.prefills = [
            PrefillWorker(
                setup, f"prefill/{index}", index, scheme.prompt_cost(setup, sides.prefill_tp),
                self._prefill_kv.capacity_tokens, limits, self._hand_over, self.complete,
            )
            for index in range(self._prefill_kv.groups)
        ]  # fmt: skip
        link = KvLink.between(setup, min(sides.prefill_tp, sides.decode_tp))
        self.decodes = [
            DecodeWorker(
                setup, f"decode/{index}", index, self._prefill_kv.groups + index,
                scheme.cost(setup, sides.decode_tp), self._decode_kv.capacity_tokens,
                scheme.decode_limits(setup, sides.decode_tp), link.seconds, self.complete,
            )
            for index in range(self._decode_kv.groups)
        ]  # fmt: skip

        for prefill in self.prefills:
            self.spawn(prefill.run())
        for decode in self.decodes:
            self.spawn(decode.run())

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never be served here, or an empty string."""
        if prompt_tokens > self._scheme.max_prompt_tokens:
            return "prompt_limit"
        block = self.setup.kv.block_tokens
        prefill = -(-prompt_tokens // block)
        decode = -(-(prompt_tokens + output_tokens - 1) // block) if output_tokens > 1 else 0
        fits = prefill <= self.prefills[0].pool.capacity and decode <= self.decodes[0].pool.capacity
        return "" if fits else "kv_capacity"

    def enqueue(self, request: Request) -> None:
        """Send a request to the prefill worker with the shortest queue."""
        min(self.prefills, key=lambda worker: worker.waiting).enqueue(request)

    def preload(self, request: Request, gpu: int) -> bool:
        """Let a request decode on the least loaded decode worker, whatever the GPU: some of those only prefill."""
        if not min(self.decodes, key=lambda worker: worker.load).preload(request):
            return False
        self._count(request)
        return True

    def _hand_over(self, request: Request, source: PrefillWorker) -> None:
        min(self.decodes, key=lambda worker: worker.load).offer(request, source)

    def pools(self) -> tuple[BlockPool, ...]:
        """Those of the prefill workers, then those of the decode workers."""
        return (*(worker.pool for worker in self.prefills), *(worker.pool for worker in self.decodes))

    def audit(self) -> None:
        """Recount every pool."""
        for prefill in self.prefills:
            prefill.audit()
        for decode in self.decodes:
            decode.audit()

    def counters(self) -> dict[str, float]:
        """The layout that ran, the prefill side's KV, and swaps to the host."""
        return {
            "prefill_gpus": self.sides.prefill_gpus,
            "prefill_tp": self.sides.prefill_tp,
            "decode_gpus": self.sides.decode_gpus,
            "decode_tp": self.sides.decode_tp,
            "prefill_kv_tokens": self._prefill_kv.capacity_tokens,
            "swaps": sum(worker.swaps for worker in self.decodes),
        }
