"""What a scheme is: a frozen set of options that builds instances, each a set of SimPy processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import simpy
from mypy_extensions import mypyc_attr

from confsim.kv.memory import KvCapacity, kv_capacity
from confsim.kv.pools import BlockPool
from confsim.latency.base import LatencyModel
from confsim.latency.share import SmShares
from confsim.outcome.slo import Slo
from confsim.policies import Policy
from confsim.run.backend import Backend
from confsim.run.ledger import Ledger
from confsim.run.model_backend import Cost, Noise
from confsim.run.request import Request
from confsim.specs import ClusterSpec, GpuSpec, KvConfig, ModelSpec


class LatencySource(Protocol):
    """What `latency=...` instantiates."""

    @property
    def noise(self) -> float:
        """Relative standard deviation of the time charged around its prediction."""

    @property
    def frontend_s(self) -> float:
        """Seconds between a request's arrival and the scheme: HTTP, chat template, tokenisation."""

    @property
    def shares(self) -> SmShares:
        """What a part of a GPU's SMs does to these times."""

    def describe(self, model: ModelSpec, gpu: GpuSpec) -> Mapping[str, Any]:
        """`profile_hash`, provenance and errors, as plain JSON data."""

    def compile(self, model: ModelSpec, gpu: GpuSpec, tp: int, sp: int) -> LatencyModel:
        """The latency model of a layout."""


class BackendFactory(Protocol):
    """What `backend=...` instantiates."""

    @property
    def many_loops(self) -> bool:
        """Whether several loops can be timed that run at once."""

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> Backend:
        """A backend for one loop."""


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class Setup:
    """Everything that an instance is built from."""

    env: simpy.Environment
    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    latency: LatencySource
    slo: Slo
    kv: KvConfig
    policy: Policy
    backend: BackendFactory
    ledger: Ledger
    noise_std: float = 0.0
    seed: int = 0
    instance: int = 0
    entry_tokens: int = 0  # prefix block size of the trace, 0 where it has none
    longest_tokens: int = 0  # of a request of the load: prompt and output but its last token, 0 without a load
    compiled: dict[tuple[int, int], LatencyModel] = field(default_factory=dict)

    def latency_of(self, tp: int, sp: int) -> LatencyModel:
        """The latency model of a layout, compiled once a run."""
        if (tp, sp) not in self.compiled:
            self.compiled[tp, sp] = self.latency.compile(self.model, self.gpu, tp, sp)
        return self.compiled[tp, sp]

    def noise(self, stream: int = 0) -> Noise:
        """The noise of one loop, a stream of its own."""
        return Noise(self.noise_std, np.random.default_rng([self.seed, 0x4E, self.instance, stream]))


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class KvReport:
    """KV of a scheme as results state it: `groups` pools of `gpus_per_group` GPUs, each of `capacity_tokens`."""

    groups: int
    gpus_per_group: int
    capacity_tokens: int
    capacity: KvCapacity  # of one TP group, term by term


def group_kv(
    setup: Setup, tp: int, sp: int, max_batched_tokens: int, spread: bool = False, extra_bytes: int = 0
) -> KvReport:
    """KV of `sp` groups of `tp` GPUs, by memory or as `kv.capacity_tokens` says (that of `cluster.tp` GPUs).

    `spread`: KV heads are spread over all groups for decode too, so that they are one pool.
    """
    given = setup.kv.capacity_tokens
    capacity = kv_capacity(
        setup.model,
        setup.gpu,
        tp,
        sp,
        utilisation=setup.kv.utilisation,
        max_batched_tokens=max_batched_tokens,
        extra_bytes=extra_bytes,
        block_tokens=setup.kv.block_tokens,
        capacity_tokens=None if given is None else given * tp // setup.cluster.tp,
    )
    if not spread:
        return KvReport(sp, tp, capacity.tokens, capacity)
    return KvReport(1, tp * sp, int(capacity.tokens / capacity.shard_fraction), capacity)


@mypyc_attr(allow_interpreted_subclasses=True)
class Instance(ABC):
    """One serving instance: it takes requests and runs its loops as SimPy processes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.env = setup.env
        self.ledger = setup.ledger
        self.outstanding_requests = 0
        self.outstanding_tokens = 0  # prompt tokens of requests that have not ended
        self._loops: list[Generator[simpy.Event, Any, None]] = []

    @abstractmethod
    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never be served here, or an empty string."""

    @abstractmethod
    def enqueue(self, request: Request) -> None:
        """Take a request; an idle loop wakes."""

    @abstractmethod
    def pools(self) -> tuple[BlockPool, ...]:
        """Every KV pool."""

    @abstractmethod
    def audit(self) -> None:
        """Recount what the pools hold.

        Raises:
            AssertionError: if a pool's books do not balance.
        """

    def spawn(self, loop: Generator[simpy.Event, Any, None]) -> simpy.Process:
        """Run a loop as a SimPy process until `close`."""
        self._loops.append(loop)
        return self.env.process(loop)

    def close(self) -> None:
        """End the loops, which wait for events that will never come and would keep the instance in memory."""
        for loop in self._loops:
            loop.close()
        self._loops.clear()

    def counters(self) -> Mapping[str, float]:
        """What the scheme counts of its own, for the summary."""
        return {}

    @property
    def utilised_s(self) -> float:
        """Seconds in which this instance's busiest loop ran iterations."""
        tracks = [track.busy_s() for track in self.ledger.tracks if track.instance == self.setup.instance]
        return max(tracks, default=0.0)

    def submit(self, request: Request) -> None:
        """Take a request and keep the router's counts."""
        self._count(request)
        self.enqueue(request)

    def preload(self, request: Request, gpu: int) -> bool:
        """Take a request whose prompt's KV exists: it decodes from the next iteration on.

        `gpu` asks for a place; a scheme that places KV by a rule of its own may choose another. False: no KV for it.
        """
        return False

    def _count(self, request: Request) -> None:
        self.outstanding_requests += 1
        self.outstanding_tokens += request.prompt_tokens
        request.instance = self.setup.instance

    def complete(self, request: Request, time_s: float) -> None:
        """A request's last token is out."""
        self.outstanding_requests -= 1
        self.outstanding_tokens -= request.prompt_tokens
        self.ledger.complete(request, time_s)


class Scheme(Protocol):
    """What `scheme=...` instantiates: options only."""

    @property
    def name(self) -> str:
        """Its name in results."""

    def build(self, setup: Setup) -> Instance:
        """An instance with its processes started."""

    def kv_report(self, setup: Setup) -> KvReport:
        """Groups and their KV capacity."""
