"""The HTML report: what it holds, how large it gets, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factory import FakeResult, make_iterations, make_result

from analysis.pages.report import write_report
from analysis.pages.report.compare_runs import common_and_different, mismatches
from analysis.pages.report.load import BINS, load_results, read_series
from confsim.errors import InputError

LIMIT_BYTES = 8_000_000


def goodput_content(**schemes: dict[str, Any]) -> dict[str, Any]:
    """`goodput.json` of schemes that were found at 2 req/s; each argument replaces keys of one."""
    summary = make_result().summary

    def entry(changes: dict[str, Any]) -> dict[str, Any]:
        probes = [
            {"rate": 1.0, "passed": True, "attainment_low": 0.99, "attainment_high": 0.99, "decided_early": False},
            {"rate": 2.0, "passed": True, "attainment_low": 0.96, "attainment_high": 0.96, "decided_early": False},
            {"rate": 4.0, "passed": False, "attainment_low": 0.2, "attainment_high": 0.95, "decided_early": True},
        ]
        base = {
            "goodput": 2.0,
            "goodput_per_gpu": 0.5,
            "gpus": 4,
            "attainment": 0.96,
            **{key: summary[key] for key in ("ttft_s", "gap_s", "max_gap_s", "tpot_s", "e2e_s")},
            "utilisation": 0.8,
            "zero_load": {"attainment": 1.0, "requests": 100, "of": 200},
            "structural": False,
            "band": None,
            "chosen": {},
            "candidates": [],
            "probes": probes,
            "warnings": [],
            "folder": None,
            "kv": summary["kv"],
        }
        return {**base, **changes}

    shared = {key: summary[key] for key in ("model", "gpu", "cluster", "slo", "policy", "provenance")}
    return {
        "kind": "goodput",
        "label": "toolagent (synthetic), arrivals spread",
        "target": 0.95,
        "tolerance": 0.02,
        **shared,
        "schemes": {name: entry(changes) for name, changes in schemes.items()},
    }


def write_goodput(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "goodput.json").write_text(json.dumps(content))
    return folder


def figures_of(page: Path) -> list[dict[str, Any]]:
    text = page.read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_goodput_page_has_every_part(tmp_path: Path):
    folder = tmp_path / "search"
    content = goodput_content(conflux={"folder": "conflux", "warnings": ["KV is <small>"]}, chunked_prefill={})
    make_result("conflux").write(folder / "conflux")
    page = write_report([write_goodput(folder, content)], tmp_path / "report.html")
    text = page.read_text()
    assert "synthetic trace" in text
    assert "KV is &lt;small&gt;" in text and "KV is <small>" not in text
    bars, attainment, ttft, gap, largest, tokens, kv = figures_of(page)
    assert [trace["y"] for trace in bars["data"]] == [[2.0], [2.0]]
    exact = next(
        trace for trace in attainment["data"] if trace["name"] == "conflux" and trace["mode"] == "lines+markers"
    )
    assert (exact["x"], exact["y"]) == ([1.0, 2.0], [0.99, 0.96])
    assert attainment["layout"]["shapes"][0]["y0"] == 0.95
    assert attainment["layout"]["shapes"][0]["label"]["text"] == "target 95%"
    assert len(ttft["data"][0]["x"]) == 101
    assert ttft["layout"]["shapes"][0]["x0"] == 2.0
    assert gap["layout"]["shapes"][0]["x0"] == largest["layout"]["shapes"][0]["x0"] == 0.1
    assert [trace["name"] for trace in tokens["data"]] == ["prefill", "decode"]
    assert max(kv["data"][0]["y"]) <= 1.0
    assert "hidden_size" not in text or "model.name: qwen3_14b" in text
    assert "model.name: qwen3_14b" in text


def test_structural_zero_is_named(tmp_path: Path):
    changes = {"goodput": 0.0, "goodput_per_gpu": 0.0, "attainment": None, "ttft_s": None, "gap_s": None}
    content = goodput_content(conflux={**changes, "max_gap_s": None, "structural": True})
    page = write_report([write_goodput(tmp_path / "a", content)], tmp_path / "report.html")
    assert "0, structural" in page.read_text()


def test_r1_fifty_runs_stay_small_with_plotly_once(tmp_path: Path):
    for number in range(50):
        make_result(rate=1 + number / 10, iterations=2000).write(tmp_path / f"run{number:02}")
    page = write_report([tmp_path], tmp_path / "report.html")
    text = page.read_text()
    assert page.stat().st_size < LIMIT_BYTES
    assert len(re.findall(r"plotly\.js v\d", text)) == 1
    assert len(figures_of(page)) >= 50
    assert "24 of 50 runs are drawn" in text


def test_r1_a_million_iterations_are_bounded(tmp_path: Path):
    result = make_result()
    long = FakeResult(result.summary, result.requests, make_iterations(1_000_000, 1, np.random.default_rng(3)))
    long.write(tmp_path / "run")
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert page.stat().st_size < LIMIT_BYTES
    assert max(len(trace["x"]) for figure in figures_of(page) for trace in figure["data"]) <= BINS
    assert "1,000,000 iterations" in page.read_text()


def test_series_are_means_and_peaks_of_the_iterations(tmp_path: Path):
    result = make_result(iterations=4000)
    result.write(tmp_path)
    series = read_series(tmp_path / "iterations.parquet", bins=1)
    assert series is not None and series.iterations == 4000
    table = result.iterations
    assert series.prefill_tokens[0] == pytest.approx(np.mean(table["prefill_tokens"].to_numpy()))
    assert series.kv_peak_blocks[0] == np.max(table["kv_used_blocks"].to_numpy())


def test_r2_needs_no_browser_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    make_result().write(tmp_path / "run")
    text = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=\"(?!data:)", outside)


def test_s16_mismatched_code_and_profiles_are_flagged(tmp_path: Path):
    first, second = make_result(rate=1.0), make_result(rate=2.0)
    origin = {**second.summary["provenance"], "git_commit": "b" * 40, "profile_hash": "q" * 64, "git_dirty": True}
    second.summary["provenance"] = origin
    first.write(tmp_path / "a")
    second.write(tmp_path / "b")
    results = load_results([tmp_path / "a", tmp_path / "b"])
    found = mismatches(results)
    assert any("different commits (aaaaaaaaaaaa: " in line and "bbbbbbbbbbbb: " in line for line in found)
    assert any("different latency profiles" in line for line in found)
    assert any("uncommitted changes: conflux, fcfs, 2 req/s" in line for line in found)
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "different commits" in text


def test_s16_equal_provenance_is_not_flagged(tmp_path: Path):
    for name in ("a", "b"):
        make_result().write(tmp_path / name)
    assert mismatches(load_results([tmp_path])) == []


def test_settings_that_differ_are_a_table(tmp_path: Path):
    make_result(rate=1.0).write(tmp_path / "a")
    make_result(rate=2.0).write(tmp_path / "b")
    common, different = common_and_different(load_results([tmp_path]))
    assert common["model.name"] == "qwen3_14b"
    assert different.rows == (("rate", "1.0", "2.0"),)


def test_mixed_results_and_duplicates(tmp_path: Path):
    write_goodput(tmp_path / "search", goodput_content(conflux={}))
    make_result().write(tmp_path / "run")
    results = load_results([tmp_path, tmp_path / "run"])
    assert len(results.searches) == 1
    assert len(results.simulations) == 1
    write_report([tmp_path], tmp_path / "report.html")


def test_results_of_another_kind_are_named(tmp_path: Path):
    make_result().write(tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    (other / "summary.json").write_text(json.dumps({"kind": "calibration"}))
    assert "kind calibration" in write_report([tmp_path], tmp_path / "report.html").read_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "goodput"}'])
def test_broken_results_are_refused_by_name(tmp_path: Path, content: str):
    (tmp_path / "goodput.json").write_text(content)
    with pytest.raises(InputError, match=r"goodput\.json"):
        write_report([tmp_path], tmp_path / "report.html")


def test_folders_without_results_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no result in it"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(InputError, match="not a folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
