"""Validation against ranks with a known law: 0% where the profile was fitted to it, and honest figures elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from live_fakes import CPU, LAW, FakeLive, executor, fake_ranks, fit_folder, mixed_trace, rows, simulation

from analysis.validate import executor as validation
from analysis.validate.command import command
from analysis.validate.plans import PlanLog, RecordedTimes
from confsim import api
from confsim.errors import InputError
from confsim.latency.config import FittedLatency
from confsim.run.model_backend import ModelBackendConfig
from executor.profile.command import profile
from executor.profile.plan import Grid


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a profile that was fitted to fake ranks."""
    folder = tmp_path_factory.mktemp("fitted")
    grid = Grid(chunk_tokens=512, prefix_tokens=512, context_tokens=512, sequences=16, kv_tokens=8192, rounds=4)
    profile(executor(), CPU, grid, folder, ranks=fake_ranks)
    fitted, _, _ = fit_folder("executor", folder)
    fitted.save(folder / "profile.json")
    return folder / "profile.json"


def live(path: Path, trace: Any = None, *overrides: str, **keys: Any) -> Any:
    """A simulation on fake ranks, planned with the profile of a file."""
    backend = FakeLive(executor(), keep_plans=True, **keys)
    return replace(simulation(backend, *overrides, trace=trace), latency=FittedLatency(str(path)))


def summary(sim: Any, repeats: int = 2, rates: tuple[float, ...] = ()) -> dict[str, Any]:
    comparison = validation.compare(sim, repeats)
    tables = validation.iterations_table(comparison), validation.requests_table(comparison)
    goodput = validation.compare_goodput(sim, rates, lambda line: None)
    return validation.summarise(sim, comparison, *tables, goodput, {})


def test_s11_a_law_is_validated_at_zero_percent(fitted: Path):
    content = summary(live(fitted), rates=(40.0, 80.0))
    by_name = {row["name"]: row for row in content["errors"]}
    assert {"prefill only", "decode only", "mixed", "all iterations"} <= set(by_name)
    for row in content["errors"]:
        assert row["mean"] < 1e-4 and row["p95"] < 1e-4 and row["noise_single"] < 1e-9, row
    assert content["met"] and "is met" in content["verdict"] and "0.0%" in content["verdict"]
    for row in content["requests"]:
        assert row["mean"] is None or row["mean"] < 1e-4
    assert content["plans"]["same_on_measured_times"] == content["plans"]["live"]
    assert content["plans"]["first_difference_on_model_times"] is None
    assert content["tokens"]["produced"] == content["tokens"]["emitted"]
    assert all(row["live"] == row["simulated"] for row in content["goodput"]["rates"])
    assert content["goodput"]["live"] == content["goodput"]["simulated"]


def test_s11_prompts_of_4096_beside_4_decodes(fitted: Path):
    """Chunks of a long prompt ride with decodes: mixed iterations are most of the work, and exact on a law."""
    trace = rows([64, 64, 64, 64, 4096, 4096], [60] * 4 + [2, 2], 0.004)
    sim = live(fitted, trace, "kv.capacity_tokens=8192")
    comparison = validation.compare(sim, 1)
    table = validation.iterations_table(comparison)
    mixed = table.filter(pa.array([kind == "mixed" for kind in table["kind"].to_pylist()]))
    assert len(mixed) > 5 and sum(mixed["prefill_tokens"].to_pylist()) > 4096
    errors = {row["name"]: row for row in validation.iteration_errors(table)}
    assert errors["mixed"]["rows"] == len(mixed) and errors["mixed"]["mean"] < 1e-3


def test_errors_are_those_of_the_law_they_miss(fitted: Path):
    """Ranks that take a quarter longer than when they were profiled: everything is 20% too low."""
    content = summary(live(fitted, factor=lambda number: 1.25))
    for row in content["errors"]:
        assert row["mean"] == pytest.approx(0.2, abs=1e-3) and row["bias"] == pytest.approx(-0.2, abs=1e-3)
    assert not content["met"] and "is not met" in content["verdict"]
    assert content["plans"]["same_on_measured_times"] == content["plans"]["live"]


def test_noise_is_told_from_error(fitted: Path):
    rng = np.random.default_rng(1)
    noise = (1.0 + 0.05 * rng.standard_normal(100_000)).tolist()
    content = summary(live(fitted, factor=lambda number: noise[number]), repeats=8)
    everything = content["errors"][-1]
    assert 0.01 < everything["mean"] < 0.03  # of a median of nine
    assert 0.02 < everything["noise_single"] < 0.06
    assert everything["noise_median"] > everything["mean"]


def test_loud_noise_is_a_warning(fitted: Path):
    rng = np.random.default_rng(2)
    noise = np.exp(0.4 * rng.standard_normal(100_000)).tolist()
    content = summary(live(fitted, factor=lambda number: noise[number]), repeats=2)
    assert any("say nothing about the model" in line for line in content["warnings"])


def test_plans_on_measured_times_are_those_of_the_live_run(fitted: Path):
    """A simulation charged with what was measured makes the same plans, whatever the times are."""
    rng = np.random.default_rng(4)
    factors = rng.uniform(0.5, 3.0, 100_000).tolist()
    sim = live(fitted, factor=lambda number: factors[number])
    comparison = validation.compare(sim, 0)
    assert comparison.clocked.plans == comparison.live.plans
    assert comparison.simulated.plans != comparison.live.plans
    live_s, clocked_s = (run.result.requests["e2e_s"].to_numpy() for run in (comparison.live, comparison.clocked))
    np.testing.assert_allclose(live_s, clocked_s, rtol=1e-9)


def test_more_iterations_than_were_recorded_are_an_error():
    sim = simulation(RecordedTimes([0.01] * 3))
    with pytest.raises(InputError, match="more iterations than were recorded"):
        sim.run()


def test_a_log_changes_nothing():
    one, other = simulation(ModelBackendConfig()), simulation(PlanLog(ModelBackendConfig()))
    a, b = one.run().requests, other.run().requests
    np.testing.assert_allclose(a["e2e_s"].to_numpy(), b["e2e_s"].to_numpy(), rtol=1e-9)


def test_results_and_page(fitted: Path, tmp_path: Path):
    comparison = validation.compare(live(fitted), 2)
    iterations, requests = validation.iterations_table(comparison), validation.requests_table(comparison)
    goodput = [{"rate": 40.0, "live": 1.0, "simulated": 0.9}]
    content = validation.summarise(live(fitted), comparison, iterations, requests, goodput, {"key": "value"})
    page = validation.write_results(tmp_path / "out", content, iterations, requests)
    names = {path.name for path in page.parent.iterdir()}
    assert names == {"summary.json", "iterations.parquet", "requests.parquet", "report.html"}
    text = page.read_text()
    for words in ("Parity and error", "Error by kind of batch", "Error over time", "Goodput", content["verdict"][:40]):
        assert words in text
    assert 'data-figure="4"' in text


def test_an_iteration_table_of_one_execution_has_no_noise(fitted: Path):
    content = summary(live(fitted), repeats=0)
    assert content["repeats"] == 0 and "noise is unknown" in content["verdict"]


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [
        ([1.1, 0.9], [1.0, 1.0], (0.1, 0.0)),
        ([2.0, np.nan], [1.0, 1.0], (1.0, 1.0)),
        ([1.0], [0.0], (None, None)),
    ],
)
def test_errors_by_hand(predicted: list[float], measured: list[float], expected: tuple[float | None, float | None]):
    found = validation.errors_of(np.array(predicted), np.array(measured))
    assert (found["mean"], found["bias"]) == pytest.approx(expected)


def test_configurations_price_what_ranks_do():
    cfg = validation.live_config(["executor=cpu_tiny", "trace=fixed", "latency=affine"])
    assert (cfg.scheme.overlap, cfg.scheme.async_schedule, cfg.backend.keep_plans) == (False, False, True)
    assert cfg.backend._target_ == "executor.live.LiveBackendConfig"
    tp = validation.live_config(["executor=cpu_tiny", "trace=fixed", "scheme=chunked_prefill"])
    assert tp.scheme.async_schedule is False and "overlap" not in tp.scheme


def test_sources_that_do_not_exist_are_refused():
    cfg = api.compose(["source=elsewhere"], command="validate")
    with pytest.raises(InputError, match="source=elsewhere"):
        command(cfg)


def test_the_law_has_every_term():
    assert all(value > 0 for name, value in LAW.items() if name != "transfer_base_s")
    assert mixed_trace().table.num_rows == 40


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("live.rates=[2,-1]", r"live\.rates=\[2, -1\]: use numbers above 0"),
        ("latency.profile=/nowhere.json", r"/nowhere\.json cannot be read"),
    ],
)
def test_mistakes_are_told_before_ranks_start(word: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(validation, "compare", lambda *words: pytest.fail("ranks were started"))
    words = ["executor=cpu_tiny", "trace=fixed", "trace.requests=2"]
    words += ["latency=affine"] if word.startswith("live") else []
    with pytest.raises(InputError, match=message):
        validation.validate(validation.live_config([*words, word]))
