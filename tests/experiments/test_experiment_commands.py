"""`confsim scenario` and `confsim advise`, from the command line and as functions."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from analysis.commands import advise as words
from analysis.search.advise import advise
from confsim.api import compose
from confsim.cli import main
from confsim.errors import InputError

TINY = ("trace=fixed", "trace.prompt_tokens=6000", "trace.output_tokens=40", "trace.requests=60", "latency=affine")
SEARCH = ("goodput.tolerance=0.3", "goodput.zero_load_requests=4", "goodput.workers=1", "quiet=true")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFSIM_CACHE", str(tmp_path_factory.getbasetemp() / "commands-cache"))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_scenario_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("latency=affine", "decodes_per_gpu=[8,2,2,0]", "decode_context=800", "prefill_tokens=4000", "prefills=2")
    assert run("scenario", *keys, f"hydra.run.dir={tmp_path / 'out'}") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["kind"] == "scenario"
    assert len(summary["prefill_s"]) == 2
    assert summary["provenance"]["config"]["prefill_tokens"] == 4000
    for name in ("iterations", "tokens"):
        ET.parse(tmp_path / "out" / f"{name}.svg")
    text = capsys.readouterr().out
    for part in ("2 prefills of 4000 beside 12 decodes of 800", "prefills per second", "group 3", "largest gap"):
        assert part in text


def test_a_mistake_is_one_line_x1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("scenario", "decodes_per_gpu=[1,2]", f"output.dir={tmp_path}") == 2
    assert capsys.readouterr().err.count("\n") == 1


def settings(*overrides: str) -> Any:
    return compose([*TINY, *SEARCH, *overrides], command="advise")


def test_advice(tmp_path: Path) -> None:
    cfg = settings("schemes=[conflux,chunked_prefill,disaggregated]", "requests=50")
    result = advise(cfg, tmp_path)
    assert json.loads((tmp_path / "advise.json").read_text()) == result
    assert result["requests"] == 50
    assert result["prompt_tokens"] == {"p50": 6000, "p90": 6000, "p95": 6000, "p99": 6000}
    assert result["gpus_for_p95"] == 1
    goodputs = [scheme["goodput"] for scheme in result["schemes"].values()]
    assert goodputs == sorted(goodputs, reverse=True)
    assert result["best"] == next(iter(result["schemes"]))
    assert result["margin"] == pytest.approx(goodputs[0] / goodputs[1] - 1)
    assert result["schemes"]["conflux"]["order"] == "deadline"
    assert result["schemes"]["chunked_prefill"]["order"] == "srpf"
    assert result["schemes"]["disaggregated"]["chosen"]["scheme.split"] in ("1+3", "2+2", "3+1")
    slack = result["decode_slack"]
    assert 0 < slack["share"] < 1
    assert slack["prefill_tokens"] > 0
    assert result["best"] in words.verdict(result)
    assert "P95 prompt (6,000)" in words.gpus(result)
    assert "decodes of 6,020 tokens" in words.slack(result)


def test_advice_where_no_scheme_keeps_the_slo(tmp_path: Path) -> None:
    result = advise(settings("schemes=[conflux]", "slo.ttft_s=0.001", "orders=null"), tmp_path)
    assert result["best"] is None
    assert result["decode_slack"] is None
    assert result["gpus_for_p95"] is None
    assert "no scheme keeps this SLO" in words.verdict(result)
    assert "more than were tried" in words.gpus(result)


@pytest.mark.parametrize(
    ("word", "says"),
    [("requests=0", "requests=0"), ("schemes=[confluks]", "did you mean"), ("+per_scheme.x.y=1", "has no x")],
)
def test_mistakes_x1(word: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        advise(settings(word), tmp_path)


def result_of(margin: float | None) -> dict[str, Any]:
    schemes = {"a": {"goodput": 2.0}, "b": {"goodput": 1.0}}
    return {"best": "a", "margin": margin, "tolerance": 0.02, "schemes": schemes}


def test_verdicts_say_how_far_ahead_the_best_is() -> None:
    assert words.verdict(result_of(0.3)) == "best goodput: a, 2 req/s, 30.0% above b"
    assert "no difference" in words.verdict(result_of(0.01))
    assert "the only scheme" in words.verdict(result_of(None))
