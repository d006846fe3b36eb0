"""The budget search, and planning on a fitted profile."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
from simulator_harness import SCHEMES, RecordingBackendConfig

import confsim
from confsim.policies.dispatch.waterfill import Dispatch as Waterfill
from confsim.run.backend import Stepwise
from confsim.run.model_backend import Cost, ModelBackend, Noise
from confsim.run.plan import IterationPlan, IterationTiming


@dataclass
class Optimal(Stepwise):
    """A backend that checks of every plan which its budget ended that one token more would miss the target."""

    cost: Cost
    target_s: float
    cap: int
    inner: ModelBackend
    checked: list[int]

    def submit(self, plan: IterationPlan) -> None:
        self.inner.submit(plan)
        tokens = sum(chunk.tokens for chunk in plan.prefill)
        decodes = [batch.count for batch in plan.decode]
        room = Waterfill(decodes).capacity(self.cap)
        if not plan.prefill or plan.prefill[-1].last or not sum(decodes) or tokens in (16, room):
            return
        assert self.cost.timing(plan).duration_s <= self.target_s * (1 + 1e-9)
        more = self._with_one_more(plan, Waterfill(decodes).spread(tokens + 1))
        assert self.cost.timing(more).duration_s > self.target_s * (1 + 1e-9)
        self.checked.append(tokens)

    def _with_one_more(self, plan: IterationPlan, shards: tuple[int, ...]) -> IterationPlan:
        """The last chunk with a token more; where it ended the prompt with it, it would emit too."""
        last = plan.prefill[-1]
        before = [sum(column) for column in zip(*[chunk.shards for chunk in plan.prefill[:-1]], strict=True)]
        rest = tuple(a - b for a, b in zip(shards, before or [0] * len(shards), strict=True))
        ends = last.start + last.tokens + 1 == last.request.target_tokens
        return plan._replace(prefill=(*plan.prefill[:-1], last._replace(shards=rest, last=ends)))

    def result(self) -> IterationTiming:
        return self.inner.result()

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class OptimalConfig:
    """`Optimal` for every loop; `checked` collects the budgets."""

    target_s: float
    cap: int
    checked: list[int] = field(default_factory=list)

    def create(self, cost: Cost, noise: Noise, tp: int, sp: int, layout: str) -> Optimal:
        return Optimal(cost, self.target_s, self.cap, ModelBackend(cost, noise), self.checked)


@pytest.mark.parametrize("scheme,tbt_s", [("conflux", 0.1), ("conflux", 0.04), ("chunked_prefill", 0.1)])
def test_budget_is_the_largest_on_a_fitted_profile(scheme: str, tbt_s: float) -> None:
    """Prompts of every length beside decodes: no chunk could take a token more."""
    cfg = confsim.compose(["trace=conversation", "trace.limit=60", "rate=4", f"scheme={scheme}", f"slo.tbt_s={tbt_s}"])
    cap = 8192 if scheme == "conflux" else 4 * 8192
    backend = OptimalConfig(tbt_s, cap)
    dataclasses.replace(confsim.build(cfg), backend=backend).run()
    assert len(backend.checked) > 50
    assert len(set(backend.checked)) > 20


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_fitted_profile_by_either_path(scheme: str, noise: float) -> None:
    """Decodes that run ahead over the bends of a fitted profile take the times of iterations planned one by one."""
    cfg = confsim.compose(
        ["trace=conversation", "trace.limit=40", "rate=4", f"scheme={scheme}", f"latency.noise={noise}"]
    )
    simulation = confsim.build(cfg)
    plans = RecordingBackendConfig()
    planned = dataclasses.replace(simulation, backend=plans).run()
    ahead = simulation.run()
    assert planned.iterations.num_rows == ahead.iterations.num_rows == len(plans.plans) > 500
    for name in ("start_s", "end_s"):
        assert np.allclose(planned.iterations[name].to_numpy(), ahead.iterations[name].to_numpy(), rtol=1e-9)
    for name in ("prefill_per_group", "decode_per_group", "context_tokens"):
        assert planned.iterations[name].to_pylist() == ahead.iterations[name].to_pylist()
    assert planned.requests["attained"].equals(ahead.requests["attained"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_iterations_with_prefill_meet_the_target(scheme: str) -> None:
    """The prediction covers the whole iteration; only decodes alone, or a first block, may exceed the target."""
    cfg = confsim.compose(["trace=toolagent", "trace.limit=80", "rate=6", f"scheme={scheme}", "slo.tbt_s=0.05"])
    table = confsim.simulate(cfg).iterations.to_pandas()
    mixed = table[(table["prefill_tokens"] > 16) & (table["decode_tokens"] > 0)]
    assert len(mixed) > 20
    assert mixed["predicted_s"].max() <= 0.05 * (1 + 1e-9)
    assert np.quantile(mixed["predicted_s"], 0.5) > 0.04, "and they use it"
    assert np.allclose(table["end_s"] - table["start_s"], table["predicted_s"])
