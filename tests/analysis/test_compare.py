"""Goodput of real schemes on small loads, with and without worker processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.search.compare import compare
from analysis.search.goodput import Probe
from analysis.search.runner import CaseRun, CaseRunner, FullRun, sample_by_length, scaled
from confsim.api import load_trace
from confsim.errors import InputError
from confsim.setup.configuration import compose

SMALL = [
    "trace=fixed",
    "trace.requests=300",
    "trace.prompt_tokens=4096",
    "trace.output_tokens=24",
    "arrivals=poisson",
    "goodput.tolerance=0.1",
    "goodput.zero_load_requests=8",
    "cache=false",  # every search makes its own probes
    "schemes=[conflux,chunked_prefill]",
    "best_options=null",
]


class Log:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.started_tasks = 0
        self.probes: list[tuple[str, float]] = []
        self.goodputs: dict[str, float] = {}

    def started(self, scheme: str, tasks: int) -> None:
        self.started_tasks += tasks

    def probed(self, scheme: str, values: dict[str, Any], probe: Any) -> None:
        self.probes.append((scheme, probe.rate))

    def finished(self, scheme: str, goodput: float) -> None:
        self.goodputs[scheme] = goodput


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Log]:
    folder, log = tmp_path_factory.mktemp("goodput"), Log()
    result = compare(compose([*SMALL, "goodput.workers=1"], "goodput"), folder, log)
    return result, folder, log


def test_goodput_json_has_what_a_reader_needs(found: tuple[dict[str, Any], Path, Log]):
    result, folder, _ = found
    assert json.loads((folder / "goodput.json").read_text()) == json.loads(json.dumps(result, allow_nan=False))
    assert result["kind"] == "goodput"
    assert list(result["schemes"]) == ["conflux", "chunked_prefill"]
    for name, scheme in result["schemes"].items():
        rates = [probe["rate"] for probe in scheme["probes"]]
        assert rates == sorted(rates)
        passed = [probe["rate"] for probe in scheme["probes"] if probe["passed"]]
        failed = [probe["rate"] for probe in scheme["probes"] if not probe["passed"]]
        assert scheme["goodput"] == max(rate for rate in passed if rate < min(failed))
        assert min(failed) <= scheme["goodput"] * 1.1
        assert scheme["goodput_per_gpu"] == scheme["goodput"] / 4
        assert scheme["attainment"] >= 0.95
        assert scheme["zero_load"] == {"attainment": 1.0, "requests": 8, "of": 300}
        summary = json.loads((folder / name / "summary.json").read_text())
        assert summary["attainment"] == scheme["attainment"]
        assert summary["ttft_s"] == scheme["ttft_s"]
    assert result["provenance"]["config"]["goodput"]["tolerance"] == 0.1
    assert {"seed", "versions", "git_commit", "git_dirty", "profile_hash", "trace"} <= set(result["provenance"])


def test_s14_goodput_carries_a_band_and_utilisation(found: tuple[dict[str, Any], Path, Log]):
    """Longer latencies lower the goodput and shorter ones raise it, each by about its share or more."""
    for scheme in found[0]["schemes"].values():
        band = scheme["band"]
        assert 0.01 < band["latency_error"] < 0.2
        assert band["low"]["goodput"] < scheme["goodput"] < band["high"]["goodput"]
        assert 0.3 < scheme["utilisation"] <= 1.0


def test_a_load_shorter_than_a_few_ttfts_is_warned_about(found: tuple[dict[str, Any], Path, Log]):
    """300 requests at about 20 req/s are one burst of 15 s."""
    for scheme in found[0]["schemes"].values():
        assert any("arrive within" in line and "use a longer trace" in line for line in scheme["warnings"])


def test_listener_hears_of_every_run(found: tuple[dict[str, Any], Path, Log]):
    result, _, log = found
    assert log.started_tasks == len(log.probes)
    assert log.goodputs == {name: scheme["goodput"] for name, scheme in result["schemes"].items()}


def test_results_do_not_depend_on_the_number_of_workers(found: tuple[dict[str, Any], Path, Log], tmp_path: Path):
    parallel = compare(compose([*SMALL, "goodput.workers=2"], "goodput"), tmp_path)
    assert parallel["schemes"] == found[0]["schemes"]
    for name in parallel["schemes"]:
        for file in ("requests.parquet", "iterations.parquet"):
            assert (tmp_path / name / file).read_bytes() == (found[1] / name / file).read_bytes()
        first, second = (json.loads((folder / name / "summary.json").read_text()) for folder in (tmp_path, found[1]))
        for summary in (first, second):  # a checkout that somebody works in may change between two processes
            summary["provenance"] = {k: v for k, v in summary["provenance"].items() if not k.startswith("git_")}
        assert first == second


def test_an_slo_that_nobody_can_meet_is_a_structural_zero(tmp_path: Path):
    overrides = ["slo.ttft_s=0.0001", "schemes=[conflux]", "goodput.workers=1"]
    result = compare(compose([*SMALL, *overrides], "goodput"), tmp_path)
    scheme = result["schemes"]["conflux"]
    assert scheme["goodput"] == 0 and scheme["structural"]
    assert scheme["zero_load"]["attainment"] == 0.0
    assert scheme["attainment"] is None and scheme["band"] is None
    assert any("structural" in line for line in scheme["warnings"])
    assert any("goodput.min_rate" in line for line in scheme["warnings"])


def test_tuned_search_reports_what_it_chose(tmp_path: Path):
    overrides = ["schemes=[chunked_prefill]", "scheme.chunk_tokens=tuned", "goodput.workers=1", "goodput.band=false"]
    result = compare(compose([*SMALL, *overrides], "goodput"), tmp_path)
    scheme = result["schemes"]["chunked_prefill"]
    best = max(candidate["goodput"] for candidate in scheme["candidates"])
    assert scheme["goodput"] == best
    assert scheme["config"]["chunk_tokens"] == scheme["chosen"]["scheme.chunk_tokens"]
    assert isinstance(scheme["config"]["chunk_tokens"], int)


def test_a_candidate_that_does_not_fit_is_passed_over(tmp_path: Path):
    overrides = ["model=llama3_1_70b", "schemes=[data_parallel]", "scheme.tp=tuned", "goodput.band=false"]
    result = compare(compose([*SMALL, *overrides, "goodput.workers=1", "goodput.curve=[]"], "goodput"), tmp_path)
    scheme = result["schemes"]["data_parallel"]
    refused = {item["values"]["scheme.tp"]: item["refused"] for item in scheme["candidates"]}
    assert refused[1] and refused[4] is None
    assert scheme["goodput"] > 0 and scheme["chosen"]["scheme.tp"] in (2, 4)


def case(*overrides: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(compose([*SMALL[:5], *overrides]), resolve=True)  # type: ignore[return-value]


def test_a_latency_factor_divides_the_times_of_a_case_and_multiplies_its_rate():
    plain = {**case("warmup_s=10"), "horizon_s": None}
    slowed = scaled(plain, 2.0)
    assert slowed["slo"]["ttft_s"] == plain["slo"]["ttft_s"] / 2
    assert slowed["slo"]["tbt_s"] == plain["slo"]["tbt_s"] / 2
    assert slowed["slo"]["attainment"] == plain["slo"]["attainment"]
    assert slowed["warmup_s"] == 5
    assert scaled(plain, 1.0) is plain
    run = CaseRunner([plain])(CaseRun(0, "full", 2.0, latency_factor=2.0))
    assert isinstance(run, FullRun)
    assert run.probe.rate == 2.0
    assert run.summary["provenance"]["arrivals"]["rate"] == 4.0


def test_sample_takes_equal_steps_through_the_lengths():
    trace = load_trace(compose(["trace=conversation", "trace.requests=1000"]))
    sample = sample_by_length(trace, 50)
    everything = sorted(trace.table["prompt_tokens"].to_pylist())
    chosen = sorted(sample.table["prompt_tokens"].to_pylist())
    assert chosen == everything[10::20]
    arrivals = sample.table["arrival_s"].to_pylist()
    assert arrivals == sorted(arrivals)
    assert sample_by_length(trace, 5000) is trace


@pytest.mark.parametrize("workers", [1, 2])
def test_mistakes_in_a_case_reach_the_caller(workers: int, tmp_path: Path):
    overrides = ["cluster.gpus=3", "schemes=[conflux]", f"goodput.workers={workers}"]
    with pytest.raises(InputError, match="3"):
        compare(compose([*SMALL, *overrides], "goodput"), tmp_path)


def test_outcomes_are_read_from_disk_as_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONFSIM_CACHE", str(tmp_path))
    runs = [CaseRun(0, "probe", 2.0), CaseRun(0, "full", 2.0), CaseRun(0, "zero", requests=5)]
    made = [CaseRunner([case()])(run) for run in runs]
    monkeypatch.setattr(CaseRunner, "_outcome", lambda self, run: pytest.fail("made again"))
    read = [CaseRunner([case()])(run) for run in runs]
    assert [type(outcome) for outcome in read] == [Probe, FullRun, FullRun]
    assert json.dumps(read, default=vars) == json.dumps(made, default=vars)


def test_a_given_trace_is_replayed_and_not_looked_up():
    trace = load_trace(compose(["trace=fixed", "trace.requests=20"]))
    run = CaseRunner([case()], trace)(CaseRun(0, "full", 1.0))
    assert isinstance(run, FullRun)
    assert run.requests == run.of == run.summary["requests"]["injected"] == 20
