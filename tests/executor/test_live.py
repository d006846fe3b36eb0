"""Real ranks as the clock of a simulation: plans of the simulator's own schemes, KV counted alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from executor_harness import THREADS, alone, generate, tiny

from confsim import api
from confsim.run.plan import DecodeBatch, IterationPlan, IterationTiming, PrefillChunk
from confsim.run.request import Request
from confsim.schemes.base import Instance, Setup
from confsim.specs import KvConfig
from executor.backend import derive_tokens
from executor.config import ExecutorConfig
from executor.layouts import layout_kind
from executor.live import LiveBackendConfig, LiveLoop
from traces.trace import SCHEMA, Trace

MODEL = tiny("llama", 8, 4)
PROMPTS = [45, 3, 70, 33, 16, 50, 64, 9, 40, 40]
OUTPUTS = [40, 1, 5, 40, 60, 40, 25, 60, 3, 30]


def build(scheme: str, gpus: int, tp: int, capacity_tokens: int, **keys: Any) -> Any:
    """A simulation of ten requests on `gpus` GPUs, timed by real ranks."""
    overrides = [
        f"scheme={scheme}",
        "latency=affine",
        "arrivals=recorded",
        f"cluster.gpus={gpus}",
        f"cluster.tp={tp}",
        f"kv.capacity_tokens={capacity_tokens}",
        "kv.prefix_cache=false",
        *(f"{key}={value}" for key, value in keys.items()),
    ]
    trace = _trace()
    simulation = api.build(api.compose(overrides), trace)
    config = ExecutorConfig(MODEL, device=THREADS, kv=KvConfig(capacity_tokens=capacity_tokens))
    return replace(simulation, model=MODEL.spec("float32"), backend=LiveBackendConfig(config, warmup_iterations=0))


def _trace() -> Trace:
    rows = len(PROMPTS)
    columns = {
        "request_id": range(rows),
        "arrival_s": np.arange(rows) * 0.002,
        "prompt_tokens": PROMPTS,
        "output_tokens": OUTPUTS,
    }
    arrays = [pa.array(columns.get(field.name, [None] * rows), field.type) for field in SCHEMA]
    return Trace(pa.Table.from_arrays(arrays, schema=SCHEMA), 0, {"name": "rows"})


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Tokens of every request, from one rank without a simulator."""
    requests = {i: derive_tokens(i, count, MODEL.vocab_size) for i, count in enumerate(PROMPTS)}
    with alone(MODEL) as runtime:
        return generate(runtime, requests, OUTPUTS).tokens


CASES = {
    "conflux-2": ("conflux", 2, 1, 160),
    "conflux-4": ("conflux", 4, 1, 160),
    "conflux-2x2": ("conflux", 4, 2, 160),
    "chunked-tp2": ("chunked_prefill", 2, 2, 320),
    "uniform-sp2": ("uniform_sp", 2, 1, 160),
}


@pytest.mark.parametrize("name", CASES)
def test_schemes_run_on_real_ranks(name: str, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of one rank, none lost or repeated by preemptions; KV of every iteration is the simulator's."""
    simulation = build(*CASES[name])
    compared = []
    tokens: dict[int, list[int]] = {}
    instances: list[Instance] = []
    build_instance, result_of = type(simulation.scheme).build, LiveLoop.result

    def building(self: Any, setup: Setup) -> Instance:
        instances.append(build_instance(self, setup))
        return instances[-1]

    def resulting(self: LiveLoop) -> IterationTiming:
        timing = result_of(self)
        done, layout = self.last, self.runtime.layout  # type: ignore[attr-defined]
        assert done is not None
        held = [pool.held for pool in instances[0].pools()]
        found = [done.ranks[group * layout.tp].kv_units for group in range(layout.groups)]
        assert found == (held if len(held) > 1 else held * layout.groups)
        compared.append(sum(found))
        for request, token in done.tokens.items():
            tokens.setdefault(request, []).append(token)
        return timing

    monkeypatch.setattr(type(simulation.scheme), "build", building)
    monkeypatch.setattr(LiveLoop, "result", resulting)
    result = simulation.run(check=True)
    assert tokens == expected
    assert sum(result.requests["preemptions"].to_pylist()) > 0 or name == "conflux-4"
    assert max(compared) > 0
    assert set(result.requests["status"].to_pylist()) == {"completed"}


def test_layouts_match_the_simulators_groups() -> None:
    """A scheme that counts all groups as one batch of decodes has them dealt out, and the prompts' shards kept."""
    request, other = Request(3, 0.0, 7), Request(4, 0.0, 7)
    plan = IterationPlan((PrefillChunk(request, 0, (3, 4), True, 0),), (DecodeBatch(0, 1, 8, {4: other}),))
    spread = layout_kind("sp").arranged(plan, 2)
    assert spread.prefill[0].shards == (3, 4)
    assert spread.prefill[0].group == 1
    assert [list(batch.members) for batch in spread.decode] == [[4], []]
    assert layout_kind("tp").arranged(plan, 1) is plan
