"""Elastic sequence parallelism after LoongServe: instances join for a prefill and part for decoding.

Every TP group is an instance with all weights. A prefill takes as many of them as its dynamic programme gives it and
is never chunked; what its KV does not need is released when it ends, and decodes stay where the KV is. Decodes whose
instances a prefill takes pause for its macro-iteration. Where LoongServe's paper and code disagree: instances are
filled fullest first, the prefill-time cap is the artifact's, and in ring attention each send waits for its step's
attention, as in the code (`scheme.ring_overlap=true` overlaps them, as the paper describes); prefill batches are split
by the exact search of the paper (`scheme.split_batches=false`: never, to which the shipped search is pruned).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from confsim.errors import InputError
from confsim.kv.memory import COMMUNICATOR_BYTES
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.degrees import tp_candidates, tp_degree
from confsim.schemes.elastic.dispatch import DispatchLimits
from confsim.schemes.elastic.instance import ElasticInstance, ElasticOptions
from confsim.schemes.elastic.ring import RingCost
from confsim.schemes.link import require_model_backend
from confsim.specs import ClusterSpec

LEAST_BATCHED_TOKENS = 8192  # short prompts are batched up to so many, as other schemes' tokens an iteration
TUNED_PREFILL_S = [0.5, 1.0, 2.0, 5.0]


@dataclass(frozen=True)
class LoongServe:
    """Options of `scheme=loongserve`; see `conf/scheme/loongserve.yaml`."""

    name: str = "loongserve"
    tp: int | str | None = None
    max_batched_tokens: int | None = None
    ring_overlap: bool = False
    max_wait_tokens: int = 10
    max_prefill_s: float | str = 5.0
    avg_decoding_s: float = 0.022
    max_out_of_order: int = 4
    max_running: int = 1024
    max_new_tokens: int = 1024
    compute_bound_batch: int = 128
    split_batches: bool | str = True

    def __post_init__(self) -> None:
        for key in ("max_batched_tokens", "max_running", "max_new_tokens", "compute_bound_batch"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise InputError(f"scheme.{key}={getattr(self, key)}: use 1 or more")
        for key in ("max_wait_tokens", "avg_decoding_s", "max_out_of_order"):
            if getattr(self, key) < 0:
                raise InputError(f"scheme.{key}={getattr(self, key)}: use 0 or more")
        if self.max_prefill_s != "tuned" and (isinstance(self.max_prefill_s, str) or self.max_prefill_s <= 0):
            raise InputError(f"scheme.max_prefill_s={self.max_prefill_s}: use a positive number of seconds, or tuned")

    def tunable(self, cluster: ClusterSpec | None = None) -> dict[str, list[float | int | str]]:
        """Values that a goodput search tries for options set to be searched, on GPUs such as `cluster` has."""
        axes: dict[str, list[float | int | str]] = {}
        if self.tp in ("auto", "tuned"):
            axes["tp"] = [*tp_candidates(cluster or ClusterSpec(4))]
        if self.max_prefill_s == "tuned":
            axes["max_prefill_s"] = [*TUNED_PREFILL_S]
        if self.split_batches == "tuned":
            axes["split_batches"] = [True, False]
        return axes

    def build(self, setup: Setup) -> Instance:
        """The loop over all instances."""
        require_model_backend(setup, self.name)
        report = self.kv_report(setup)
        cost = RingCost.of(setup, report.gpus_per_group, report.groups, self.ring_overlap)
        options = ElasticOptions(
            self._limits(setup, report), self.max_wait_tokens, self.compute_bound_batch, self._splits()
        )
        return ElasticInstance(setup, self.name, cost, report.groups, report.capacity_tokens, options)

    def batched_tokens(self, setup: Setup) -> int:
        """Prompt tokens that an instance computes at once: by default the longest prefill of the load fits on one.

        A prompt is never chunked, and the one idle instance beside decodes has to take it whole. A request whose KV
        was dropped is prefilled with its output so far.
        """
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        limit = setup.model.max_context_tokens
        longest = setup.longest_tokens if limit is None else min(limit, setup.longest_tokens)
        return max(LEAST_BATCHED_TOKENS, longest)

    def _splits(self) -> bool:
        if isinstance(self.split_batches, str):
            raise InputError(
                f"scheme.split_batches={self.split_batches}: use true or false, or tuned in a goodput search"
            )
        return self.split_batches

    def _limits(self, setup: Setup, report: KvReport) -> DispatchLimits:
        if isinstance(self.max_prefill_s, str):
            raise InputError(f"scheme.max_prefill_s={self.max_prefill_s}: only `confsim goodput` can tune it")
        return DispatchLimits(
            report.capacity_tokens,
            self.batched_tokens(setup),
            self.avg_decoding_s,
            self.max_prefill_s,
            self.max_out_of_order,
            self.max_running,
            self.max_new_tokens,
        )

    def kv_report(self, setup: Setup) -> KvReport:
        """A pool an instance, beside the activations of its stripes, the ring's buffers and its communicators."""
        tp = tp_degree(self.tp, setup.cluster)
        instances = setup.cluster.gpus // tp
        extra, tokens = 0, self.batched_tokens(setup)
        if instances > 1:
            layer_bytes = setup.model.kv_bytes_per_token(tp) // setup.model.num_hidden_layers
            extra = 2 * tokens * layer_bytes  # to send from and to receive into
            extra += COMMUNICATOR_BYTES.get(instances, max(COMMUNICATOR_BYTES.values()))
        report = group_kv(setup, tp, 1, tokens, extra_bytes=extra)
        capacity = report.capacity
        if setup.kv.prefix_cache:
            note = f"{self.name} cannot reuse KV across requests: kv.prefix_cache has no effect on it"
            capacity = replace(capacity, warnings=(*capacity.warnings, note))
        return replace(report, groups=instances, capacity=capacity)
