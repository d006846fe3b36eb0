"""Data parallelism over tensor-parallel groups: independent chunked-prefill replicas behind a router.

Each group of `tp` GPUs has all weights, a queue and a KV pool of its own; nothing is exchanged between replicas and a
request stays where the router sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from confsim.kv.pools import BlockPool, InPlaceKv
from confsim.routers.base import new_router
from confsim.run.request import Request
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.chunked_prefill import TUNED_CHUNKS, running_limit, static_chunk
from confsim.schemes.cobatch import CoBatchInstance
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.schemes.degrees import tp_candidates, tp_degree
from confsim.schemes.fill import Limits
from confsim.specs import ClusterSpec


@dataclass(frozen=True)
class DataParallel:
    """Options of `scheme=data_parallel`; `tp` None takes groups of `cluster.tp` GPUs."""

    name: str = "data_parallel"
    tp: int | str | None = None
    router: str = "least_tokens"
    chunk_tokens: int | str = "auto"
    max_batched_tokens: int = 8192
    max_partial_prefills: int = 4
    async_schedule: bool = True
    max_running: int | str | None = "vllm"

    def __post_init__(self) -> None:
        new_router(self.router, "scheme.router")

    def tunable(self, cluster: ClusterSpec | None = None) -> dict[str, list[int | str]]:
        """Values that a goodput search tries for options set to be searched, on GPUs such as `cluster` has."""
        axes: dict[str, list[int | str]] = {}
        if self.tp in ("auto", "tuned"):
            axes["tp"] = tp_candidates(cluster or ClusterSpec(4))
        if self.chunk_tokens == "tuned":
            axes["chunk_tokens"] = list(TUNED_CHUNKS)
        return axes

    def degree(self, setup: Setup) -> int:
        """GPUs of a replica.

        Raises:
            InputError: for `auto`, or a degree that does not divide the cluster.
        """
        return tp_degree(self.tp, setup.cluster)

    def build(self, setup: Setup) -> Instance:
        """One loop a replica."""
        return DataParallelInstance(setup, self)

    def build_replica(self, setup: Setup, home: DataParallelInstance, index: int) -> Replica:
        """The loop of one replica."""
        latency = setup.latency_of(self.degree(setup), 1)
        cost = CoBatchCost(latency, in_turn, async_schedule=self.async_schedule, one_kernel=True)
        kv = InPlaceKv(self.kv_report(setup).capacity_tokens, setup.kv, setup.entry_tokens)
        limits = Limits(
            setup.slo.target_s,
            static_chunk(self.chunk_tokens),
            self._token_cap(setup),
            self.max_partial_prefills,
            max_running=running_limit(self.max_running, setup.gpu),
        )
        dispatch = setup.policy.dispatch_class("even")
        placement = setup.policy.new_placement("least_context")
        replica = Replica(setup, f"{self.name}/{index}", cost, kv, limits, dispatch, placement)
        replica.join(home, index)
        return replica

    def kv_report(self, setup: Setup) -> KvReport:
        """A pool a replica."""
        tp = self.degree(setup)
        return replace(group_kv(setup, tp, 1, self._token_cap(setup)), groups=setup.cluster.gpus // tp)

    def _token_cap(self, setup: Setup) -> int:
        """Tokens an iteration: `max_batched_tokens` for each group of `cluster.tp` GPUs, as for other schemes."""
        return self.max_batched_tokens * max(1, self.degree(setup) // setup.cluster.tp)


class Replica(CoBatchInstance):
    """A chunked-prefill loop that tells the instance around it when a request has ended."""

    def join(self, home: DataParallelInstance, index: int) -> None:
        """Become replica `index` of `home`."""
        self._home = home
        self._index = index
        self.crowded = True

    def complete(self, request: Request, time_s: float) -> None:
        """A request's last token is out."""
        request.group = self._index
        self._home.ended(request)
        super().complete(request, time_s)


class DataParallelInstance(Instance):
    """The replicas and their router."""

    def __init__(self, setup: Setup, scheme: DataParallel) -> None:
        super().__init__(setup)
        count = setup.cluster.gpus // scheme.degree(setup)
        self._router = new_router(scheme.router, "scheme.router")
        self.replicas: Sequence[Replica] = [scheme.build_replica(setup, self, index) for index in range(count)]

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why no replica could serve a request (they are alike), or an empty string."""
        return self.replicas[0].refusal(prompt_tokens, output_tokens)

    def enqueue(self, request: Request) -> None:
        """Send a request to a replica."""
        self.replicas[self._router.choose(request, self.replicas)].submit(request)

    def preload(self, request: Request, gpu: int) -> bool:
        """Let a request decode on the replica of a GPU."""
        replica = self.replicas[gpu * len(self.replicas) // self.setup.cluster.gpus]
        if not replica.preload(request, gpu):
            return False
        self._count(request)
        return True

    def close(self) -> None:
        """End the replicas' loops."""
        for replica in self.replicas:
            replica.close()
        super().close()

    def ended(self, request: Request) -> None:
        """A replica's request is complete."""
        self.outstanding_requests -= 1
        self.outstanding_tokens -= request.prompt_tokens

    def pools(self) -> tuple[BlockPool, ...]:
        """The pool of each replica."""
        return tuple(pool for replica in self.replicas for pool in replica.pools())

    def audit(self) -> None:
        """Recount every pool, and the router's counts."""
        for replica in self.replicas:
            replica.audit()
        assert self.outstanding_requests == sum(replica.outstanding_requests for replica in self.replicas)
        assert self.outstanding_tokens == sum(replica.outstanding_tokens for replica in self.replicas)
