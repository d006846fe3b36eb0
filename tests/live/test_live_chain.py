"""The whole chain on two gloo ranks, from the command line: profile, fit, live simulation, validation, report."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from confsim.cli import main

GRID = (
    "grid.chunk_tokens=128", "grid.prefix_tokens=128", "grid.context_tokens=64", "grid.sequences=4",
    "grid.kv_tokens=1024", "grid.rounds=3", "grid.budget_s=20",
)  # fmt: skip
SLICE = (
    "trace=fixed", "trace.requests=12", "trace.prompt_tokens=96", "trace.output_tokens=12", "trace.interval_s=0.01",
    "arrivals=recorded", "slo.tbt_s=0.05",
)  # fmt: skip


def confsim(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile `p`, its fit `fit.json`, a live run `live` and a validation `validation`."""
    folder = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        latency = f"latency.profile={folder / 'fit.json'}"
        assert confsim("profile", "executor=cpu_tiny", "output=p", *GRID, "--quiet") == 0
        assert confsim("fit", "source=executor", "profile=p", "output=fit.json", "--quiet") == 0
        assert confsim("simulate", "backend=live", latency, *SLICE, "hydra.run.dir=live", "--quiet") == 0
        words = ("executor=cpu_tiny", latency, "live.repeats=2", "live.rates=[80]", "hydra.run.dir=validation")
        assert confsim("validate", *words, *SLICE, "--quiet") == 0
    return folder


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_profile_of_real_ranks(chain: Path):
    table = pq.read_table(next((chain / "p").glob("*/round-000.parquet")))
    assert set(table["part"].to_pylist()) == {"prefill", "decode", "transfer", "pair", "mixed"}
    rows = table.to_pylist()
    stages = ("linear_s", "prefill_attention_s", "decode_attention_s", "communication_s", "head_s", "transfer_s")
    for row in rows:
        assert row["duration_s"] == pytest.approx(sum(row[name] for name in stages) + row["overhead_s"], rel=1e-6)
        assert (row["communication_s"] > 0) == bool(row["tokens"])
    head = read(chain / "p" / "xp-2x1" / "profile.json")
    assert head["ranks"][0]["attention"] and head["ranks"][1]["device"] == "cpu"


def test_a_fit_of_real_ranks(chain: Path):
    profile = read(chain / "fit.json")
    assert profile["provenance"]["source"] == "executor"
    assert set(profile["linear"]) == {"tp1"} and set(profile["exchange"]) == {"tp1sp2"}
    errors = profile["errors"]
    for name in ("linear", "decode_attention", "prefill_attention", "exchange", "mixed_iterations"):
        assert errors[name]["held_out"]["rows"] > 0
        assert errors[name]["replicates"]["mean_pct"] is not None


def test_a_live_run_of_real_ranks(chain: Path):
    summary = read(chain / "live" / "summary.json")
    live = summary["live"]
    assert summary["requests"]["completed"] == 12
    assert live["tokens"] == 12 * 12
    assert live["warmup_iterations"] == 8
    table = pq.read_table(chain / "live" / "iterations.parquet")
    assert live["iterations"] == len(table)
    predicted = table["predicted_s"].to_numpy()
    measured = table["end_s"].to_numpy() - table["start_s"].to_numpy()
    assert (predicted > 0).all() and (measured > 0).all()
    assert not np.array_equal(predicted, measured)


def test_a_validation_of_real_ranks(chain: Path):
    content = read(chain / "validation" / "summary.json")
    assert content["source"] == "executor" and content["repeats"] == 2
    plans, tokens = content["plans"], content["tokens"]
    assert plans["first_difference_on_measured_times"] is None
    assert plans["same_on_measured_times"] == plans["live"] > 0
    assert tokens["produced"] == tokens["emitted"] == 12 * 12
    everything = next(row for row in content["errors"] if row["by"] == "all")
    assert everything["rows"] == plans["live"] and everything["noise_single"] > 0
    # Other work on the machine decides how large errors are; that they are errors of the same thing is sure.
    assert 0.0 < everything["median"] < 5.0
    assert content["goodput"]["rates"][0]["rate"] == 80.0
    assert "mean absolute error" in content["verdict"]
    assert (chain / "validation" / "report.html").stat().st_size > 100_000


@pytest.mark.browser
def test_the_report_opens_in_a_browser(chain: Path, tmp_path: Path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))
    try:
        tools_of = importlib.import_module("test_report_browser")
    finally:
        sys.path.pop(0)
    if tools_of.CHROMIUM is None:
        pytest.skip("no Chromium")
    with tools_of.browser(tmp_path) as tools:
        tools_of.open_page(tools, chain / "validation" / "report.html")
        assert "our own executor" in tools.evaluate("document.querySelector('h1').textContent")
        assert tools.evaluate("document.querySelectorAll('.plot .main-svg').length") > 0
        assert tools.evaluate("document.querySelectorAll('.plot').length") == 6
        assert tools_of.complaints(tools) == []
