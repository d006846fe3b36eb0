"""A run on ranks as its clock: warm-up, predictions, real time, repeated plans, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hydra.utils import instantiate
from live_fakes import MODEL, FakeLive, executor, mixed_trace, rows, simulation

from confsim import api
from confsim.errors import InputError
from confsim.run.engine import Run
from confsim.run.model_backend import ModelBackendConfig


def fake(**keys: Any) -> FakeLive:
    return FakeLive(executor(), **keys)


def assert_same_requests(one: pa.Table, other: pa.Table) -> None:
    """Equal but for the rounding of sums of seconds."""
    for name in one.column_names:
        if pa.types.is_floating(one.schema.field(name).type):
            pairs = (table[name].to_pandas().to_numpy() for table in (one, other))
            np.testing.assert_allclose(*pairs, rtol=1e-9, atol=1e-12, err_msg=name)
        else:
            assert one[name].equals(other[name]), name


def test_a_live_run_has_the_outputs_of_a_simulated_one_when_times_agree():
    live = simulation(fake()).run(check=True)
    simulated = simulation(ModelBackendConfig()).run()
    assert_same_requests(live.requests, simulated.requests)
    for name in ("start_s", "end_s", "predicted_s", "linear_s", "communication_s", "head_s", "overhead_s"):
        got, wanted = live.iterations[name].to_numpy(), simulated.iterations[name].to_numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
    for name in ("prefill_per_group", "decode_per_group", "context_tokens", "kv_used_blocks", "queued"):
        assert live.iterations[name].equals(simulated.iterations[name])
    assert set(live.summary) - set(simulated.summary) == {"live"}


def test_predictions_stand_beside_measured_times():
    table = simulation(fake(factor=lambda number: 1.25)).run().iterations
    measured = table["end_s"].to_numpy() - table["start_s"].to_numpy()
    np.testing.assert_allclose(measured, 1.25 * table["predicted_s"].to_numpy(), rtol=1e-9)


def test_warm_up_is_executed_counted_and_excluded():
    backend = fake(warmup_iterations=5)
    result = simulation(backend).run()
    report, ranks = result.summary["live"], backend.made[0]
    assert report["warmup_iterations"] == 5
    assert report["iterations"] == len(result.iterations) == len(ranks.plans) - 5
    assert all(chunk.request.id >= 1 << 40 for plan in ranks.plans[:5] for chunk in plan.prefill)
    warm = ranks.plans[:5]
    assert any(plan.prefill and any(b.members for b in plan.decode) for plan in warm)
    assert set(warm[-1].released) == {chunk.request.id for plan in warm for chunk in plan.prefill}


def test_tokens_are_conserved_and_ranks_are_closed():
    backend = fake()
    result = simulation(backend).run()
    emitted = int(np.sum(result.requests["emitted_tokens"].to_numpy()))
    assert result.summary["live"]["tokens"] == emitted == int(np.sum(result.requests["output_tokens"].to_numpy()))
    assert backend.made[0].closed >= 1


def test_every_run_has_ranks_of_its_own():
    backend = fake()
    sim = simulation(backend)
    first, second = sim.run(), sim.run()
    assert first.requests.equals(second.requests)
    assert len(backend.made) == 2


def test_ranks_are_closed_when_a_run_fails():
    def fail(number: int) -> float:
        if number == 20:
            raise OSError("a rank is gone")
        return 1.0

    backend = fake(factor=fail)
    with pytest.raises(OSError, match="gone"):
        simulation(backend).run()
    assert backend.made[0].closed >= 1


def test_waiting_for_the_schedule_is_measured():
    report = simulation(fake()).run().summary["live"]
    exposed = report["exposed_schedule_s"]
    assert 0.0 < exposed["p50"] <= exposed["p95"] <= exposed["max"] < 0.5
    assert report["attention_paths"] == "in turn"
    assert report["layout"] == "xp, 2 groups of 1"


def test_the_planner_prices_what_the_ranks_do():
    """Ranks that run the paths in turn, with host time exposed, are priced so whatever the scheme's options say."""
    table = simulation(fake(), "scheme.overlap=true", "scheme.async_schedule=true").run().iterations
    measured = table["end_s"].to_numpy() - table["start_s"].to_numpy()
    np.testing.assert_allclose(measured, table["predicted_s"].to_numpy(), rtol=1e-9)


def test_real_time_follows_the_wall_clock_and_records_lateness():
    trace = rows([40, 40, 40], [3, 3, 3], 0.15)
    began = time.perf_counter()
    result = simulation(fake(realtime=True), trace=trace).run()
    wall_s = time.perf_counter() - began
    report = result.summary["live"]
    assert report["realtime"] and report["lateness_s"]["max"] >= 0.0
    assert 0.3 <= result.summary["simulated_s"] <= wall_s  # the last request arrives at 0.3 s
    starts = result.iterations["start_s"].to_numpy()
    for arrival_s in (0.0, 0.15, 0.3):
        assert np.min(np.abs(starts - arrival_s)) < 1e-9  # idle ranks start on arrival


def test_repeats_execute_the_same_plans():
    backend = fake(keep_plans=True, factor=lambda number: 1.0 + (number % 7) / 100)
    sim = simulation(backend)
    run = Run(sim, sim.arrivals.apply(sim.trace, None, 0))
    run.execute(None, False)
    count = len(run.result().iterations)
    seconds = run.live.repeat(2)  # type: ignore[union-attr]
    run.close()
    assert seconds.shape == (2, count)
    plans = [plan for plan in backend.made[0].plans[8:] if plan.prefill or any(b.members for b in plan.decode)]
    assert len(plans) == 3 * count
    for first, again in zip(plans[:count], plans[count : 2 * count], strict=True):
        assert [c.shards for c in first.prefill] == [c.shards for c in again.prefill]
        assert [c.request.target_tokens for c in first.prefill] == [c.request.target_tokens for c in again.prefill]


def test_repeating_needs_plans_that_were_kept():
    sim = simulation(fake())
    run = Run(sim, sim.arrivals.apply(sim.trace, None, 0))
    run.execute(None, False)
    with pytest.raises(InputError, match=r"backend\.keep_plans"):
        run.live.repeat(1)  # type: ignore[union-attr]
    run.close()


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (("scheme=muxwise",), "muxwise"),
        (("scheme=data_parallel",), "data_parallel has no live layout"),
        (("scheme.co_batch=false",), "co_batch"),
        (("scheme.spread_decode=true",), "spread_decode"),
        (("cluster.instances=2",), "one instance"),
    ],
)
def test_what_ranks_cannot_do_is_refused(overrides: tuple[str, ...], match: str):
    keys = ["arrivals=recorded", "cluster.gpus=2", "kv.capacity_tokens=4096", "latency=affine", *overrides]
    built = api.build(api.compose(keys), mixed_trace())
    with pytest.raises(InputError, match=match):
        replace(built, model=MODEL.spec("float32"), backend=fake()).run()


def test_a_negative_warm_up_is_refused():
    with pytest.raises(InputError, match=r"backend.warmup_iterations=-1"):
        fake(warmup_iterations=-1)


def test_one_override_chooses_ranks_model_and_kv():
    cfg = api.compose(["backend=live"])
    model, cluster, kv = instantiate(cfg.model), instantiate(cfg.cluster), instantiate(cfg.kv)
    assert (model.name, model.hidden_size, model.torch_dtype) == ("executor", 128, "float32")
    assert (cluster.gpus, cluster.tp, kv.capacity_tokens) == (2, 1, 8192)
    other = api.compose(["backend=live", "executor=cpu_tiny_qwen3", "executor.kv.capacity_tokens=4096"])
    assert (instantiate(other.model).qk_norm, instantiate(other.cluster).gpus) == (True, 4)
    assert instantiate(other.kv).capacity_tokens == 4096


def test_configurations_without_ranks_import_no_torch():
    code = (
        "import sys; from confsim import api; from hydra.utils import instantiate;"
        "cfg = api.compose(['backend=live']); instantiate(cfg.model); instantiate(cfg.cluster);"
        "api.build(api.compose(['trace=fixed', 'latency=affine']));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
