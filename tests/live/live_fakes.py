"""Ranks with a known law in place of real ones, and the configurations that the live tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.calibrate.command import SOURCES, fit_source
from confsim import api
from confsim.latency.affine import AffineLatency
from confsim.latency.profile import Profile
from confsim.run.engine import Simulation
from confsim.run.plan import IterationPlan
from confsim.schemes.cost import beside
from confsim.specs import GpuSpec, KvConfig, ModelSpec
from executor.config import Device, ExecutorConfig, Layout, ModelConfig
from executor.live import LiveBackendConfig, frozen
from executor.message import Ready, Report
from executor.runtime import ExecutedIteration
from traces.trace import SCHEMA, Trace

MODEL = ModelConfig(
    family="llama",
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
)
CPU = GpuSpec("cpu", 2**32, 1e10, 5e10, 1e9, 1)
# Every term is linear in its work (prefill attention in token pairs), so that tables can hold the law exactly.
LAW: dict[str, float] = {
    "linear_base_s": 2e-3,
    "linear_token_s": 31e-6,
    "decode_base_s": 3e-4,
    "decode_sequence_s": 21e-6,
    "decode_token_s": 1.7e-6,
    "prefill_pair_s": 9e-8,
    "all_to_all_base_s": 5e-4,
    "all_to_all_token_s": 8e-6,
    "head_base_s": 1e-4,
    "head_token_s": 7e-6,
    "iteration_overhead_s": 4e-4,
    "sequence_overhead_s": 13e-6,
    "transfer_base_s": 0.0,
    "transfer_token_s": 2e-6,
}


def fit_folder(source: str, folder: Path) -> tuple[Profile, ModelSpec, GpuSpec]:
    """A profile of what was measured into a folder, and the model and GPU that it is for."""
    found = SOURCES.make(source, folder)
    specs = found.specs()
    assert specs is not None, f"{source} reads no folder"
    return fit_source(found, *specs), *specs


Factor = Callable[[int], float]  # of an iteration's time, by its number


@dataclass
class FakeRanks:
    """A runtime's interface; times follow `law`, each token is `request % vocabulary`."""

    model: ModelConfig
    layout: Layout
    law: AffineLatency
    factor: Factor = lambda number: 1.0
    known: set[int] = field(default_factory=set)
    plans: list[IterationPlan] = field(default_factory=list)
    closed: int = 0
    _done: list[ExecutedIteration] = field(default_factory=list)

    @property
    def ready(self) -> tuple[Ready, ...]:
        """As real ranks say it."""
        return tuple(
            Ready(rank, {"device": "fake", "attention": "sdpa", "attention_version": "2"})
            for rank in range(self.layout.ranks)
        )

    def add(self, request: int, tokens: Sequence[int] | np.ndarray, sampling: object = None) -> None:
        """Make a request known, once."""
        assert request not in self.known
        self.known.add(request)

    def forget(self, request: int) -> None:
        """Drop it."""
        self.known.discard(request)

    def drop_prompt(self, request: int) -> None:
        """Drop its prompt, so that it can be added again."""
        self.known.discard(request)

    def submit(self, plan: IterationPlan) -> None:
        """Time a plan."""
        number = len(self.plans)
        self.plans.append(frozen(plan))
        for chunk in plan.prefill:
            assert chunk.request.id in self.known
        stages = self._stages(plan)
        factor = self.factor(number)
        stages = {name: seconds * factor for name, seconds in stages.items()}
        duration_s = self.duration_s(stages)
        tokens = {r: r % self.model.vocab_size for batch in plan.decode for r in batch.members}
        tokens |= {c.request.id: c.request.id % self.model.vocab_size for c in plan.prefill if c.last}
        reports = [
            Report(number, rank, duration_s, stages, {}, tokens if rank == 0 else {}, 0, "none", False, 1.0, 0.0)
            for rank in range(self.layout.ranks)
        ]
        self._done.append(ExecutedIteration.of(reports, duration_s))

    def duration_s(self, stages: dict[str, float]) -> float:
        """One stage after the other."""
        return sum(stages.values())

    def result(self) -> ExecutedIteration:
        """The oldest result."""
        return self._done.pop(0)

    def run(self, plan: IterationPlan) -> ExecutedIteration:
        """Both."""
        self.submit(plan)
        return self.result()

    def close(self) -> None:
        """Count."""
        self.closed += 1

    def _stages(self, plan: IterationPlan) -> dict[str, float]:
        law, groups = self.law, self.layout.groups
        counts = [batch.count for batch in plan.decode] or [0] * groups
        shards = plan.shards(groups)
        firsts = sum(chunk.last for chunk in plan.prefill)
        moved: dict[int, int] = {}
        for chunk in plan.prefill:
            if chunk.group >= 0:
                moved[chunk.group] = moved.get(chunk.group, 0) + chunk.start + chunk.tokens
        return {
            "linear": law.linear_s(max(map(sum, zip(shards, counts, strict=True)))),
            "prefill_attention": sum(law.prefill_attention_s(c.tokens, c.start) for c in plan.prefill),
            "decode_attention": max(law.decode_attention_s(b.count, b.context_tokens) for b in plan.decode),
            "communication": law.all_to_all_s(max(shards)),
            "head": law.head_s(max(counts) + firsts),
            "transfer": max((law.kv_transfer_s(tokens) for tokens in moved.values()), default=0.0),
            "prepare": law.overhead_s(sum(counts) + len(plan.prefill))
            + (law.mixed_overhead_s if plan.prefill and sum(counts) else 0.0),
        }


def law_of(layout: Layout) -> AffineLatency:
    """The law on a layout."""
    return AffineLatency(tp=layout.tp, sp=layout.groups, **LAW)


def executor(groups: int = 2, **device: Any) -> ExecutorConfig:
    """The tiny model on a Conflux layout."""
    return ExecutorConfig(MODEL, Layout("xp", groups), Device(**device), KvConfig(capacity_tokens=4096))


@contextmanager
def fake_ranks(config: ExecutorConfig) -> Iterator[FakeRanks]:
    """What `profile` may measure in place of real ranks."""
    ranks = FakeRanks(config.model, config.layout, law_of(config.layout))
    yield ranks
    ranks.close()


class OneKernelRanks(FakeRanks):
    """Both phases in one attention call: twice the sum of its parts beside 4 decodes or fewer, 3 times beside more."""

    def _stages(self, plan: IterationPlan) -> dict[str, float]:
        stages = super()._stages(plan)
        if stages["prefill_attention"] and stages["decode_attention"]:
            factor = 2.0 if plan.decode[0].count <= 4 else 3.0
            stages["prefill_attention"] = factor * (stages["prefill_attention"] + stages["decode_attention"])
            stages["decode_attention"] = 0.0
        return stages


class OverlappingRanks(FakeRanks):
    """Attention paths side by side, each slowed by the other, and KV that moves beside everything else."""

    def duration_s(self, stages: dict[str, float]) -> float:
        """As the planner's model puts them together."""
        paths = ("communication", "prefill_attention", "decode_attention")
        communication_s, prefill_s, decode_s = (stages[name] for name in paths)
        both = min(prefill_s, decode_s) > 0.0
        law = replace(self.law, prefill_slowdown=1.6, decode_slowdown=1.2)
        attention_s = beside(communication_s, prefill_s, decode_s, law)
        if both:
            stages["prefill_attention"] *= 1.6
            stages["decode_attention"] *= 1.2
        return attention_s + stages["linear"] + stages["head"] + stages["prepare"]


@dataclass(frozen=True)
class FakeLive(LiveBackendConfig):
    """`backend=live` on fake ranks; `made` collects them."""

    factor: Factor = lambda number: 1.0
    made: list[FakeRanks] = field(default_factory=list)

    def runtime(self, layout: Layout) -> FakeRanks:
        """Fake ranks of a layout."""
        self.made.append(FakeRanks(self.executor.model, layout, law_of(layout), self.factor))
        return self.made[-1]


def rows(prompts: Sequence[int], outputs: Sequence[int], interval_s: float) -> Trace:
    """A trace of requests at equal intervals."""
    count = len(prompts)
    columns = {
        "request_id": range(count),
        "arrival_s": np.arange(count) * interval_s,
        "prompt_tokens": prompts,
        "output_tokens": outputs,
    }
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in SCHEMA]
    return Trace(pa.Table.from_arrays(arrays, schema=SCHEMA), 0, {"name": "rows"})


def mixed_trace(count: int = 40, interval_s: float = 0.012) -> Trace:
    """Prompts of 20 to 400 tokens, outputs of 1 to 30."""
    rng = np.random.default_rng(5)
    return rows(rng.integers(20, 400, count).tolist(), rng.integers(1, 31, count).tolist(), interval_s)


def simulation(backend: Any, *overrides: str, trace: Trace | None = None, groups: int = 2) -> Simulation:
    """A Conflux simulation of the tiny model that prices paths in turn, and host time beside them."""
    words = ["arrivals=recorded", f"cluster.gpus={groups}", "kv.capacity_tokens=4096", "slo.tbt_s=0.03"]
    words += ["scheme.overlap=false", "scheme.async_schedule=false", "scheme.overlap_transfer=false", *overrides]
    if not any(word.startswith("latency") for word in words):
        words += ["latency=affine", *(f"latency.{key}={value}" for key, value in LAW.items())]
        words += ["latency.prefill_base_s=0"]
    built = api.build(api.compose(words), trace or mixed_trace())
    return replace(built, model=MODEL.spec("float32", "executor"), gpu=CPU, backend=backend)
