"""The command line as a user meets it: results, mistakes in one line, sweeps, folders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from confsim.cli import SUBCOMMANDS, load, main

SMALL = ("trace=fixed", "trace.requests=40", "trace.prompt_tokens=512", "trace.output_tokens=16", "arrivals=poisson")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def confsim(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to standard error, which must be one line."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert text.endswith("\n") and text.count("\n") == 1, text
    return text.strip()


def folders(pattern: str) -> list[Path]:
    return sorted(Path("outputs").glob(pattern))


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_lists_every_subcommand_with_an_example(capsys: pytest.CaptureFixture[str]):
    assert confsim("--help") == 0
    text = capsys.readouterr().out
    for row in SUBCOMMANDS:
        assert f"  {row.name}" in text and row.example in text
        assert f"{row.example} ".startswith(f"confsim {row.name} ")


def test_help_imports_nothing_heavy():
    code = "import sys, confsim.cli; print([m for m in ('hydra', 'numpy', 'pyarrow', 'simpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("row", SUBCOMMANDS, ids=lambda row: row.name)
def test_every_subcommand_explains_its_keys_and_can_be_loaded(row, capsys: pytest.CaptureFixture[str]):
    assert confsim(row.name, "--help") == 0
    text = capsys.readouterr().out
    assert row.help in text and row.example in text
    keys = [line for line in text.splitlines() if re.match(r"  [a-z_]+: \S+", line)]
    assert all("#" in line for line in keys), keys
    assert callable(load(row.target))


def test_group_help_shows_documented_keys(capsys: pytest.CaptureFixture[str]):
    assert confsim("simulate", "--help", "slo") == 0
    text = capsys.readouterr().out
    assert re.search(r"ttft_s: 2\.0 # \w+", text)


def test_list_names_the_choices(capsys: pytest.CaptureFixture[str]):
    assert confsim("list") == 0
    text = capsys.readouterr().out
    for name in ("qwen3_14b", "h100_sxm", "conflux", "deadline_waterfill", "toolagent", "h100_sxm/qwen3_14b"):
        assert name in text
    assert confsim("list", "gpu") == 0
    assert "qwen3_14b" not in capsys.readouterr().out
    assert not Path("outputs").exists()


# --- mistakes (X1) ---------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown model": (
        ["simulate", "model=qwen3_41b"],
        "model=qwen3_41b: unknown, use one of .*qwen3_14b.*did you mean",
    ),
    "word for a window": (["simulate", "warmup_s=abc"], r"warmup_s=abc: expected a number of 0 or more"),
    "negative window": (["simulate", "cooldown_s=-1"], r"cooldown_s=-1: expected a number of 0 or more"),
    "word for a switch": (["simulate", "kv.prefix_cache=maybe"], r"kv.prefix_cache=maybe: expected true or false"),
    "word for a top switch": (["simulate", "quiet=maybe"], r"quiet=maybe: expected true or false"),
    "word where null is the default": (
        ["simulate", "kv.capacity_tokens=abc"],
        r"capacity_tokens=abc: expected a whole",
    ),
    "no prompt in progress": (["simulate", "scheme.max_partial_prefills=0"], r"max_partial_prefills=0: use 1 or more"),
    "no token a batch": (["simulate", "scheme.max_batched_tokens=0"], r"max_batched_tokens=0: use 1 or more"),
    "part of a GPU": (["simulate", "cluster.gpus=2.5"], r"cluster.gpus=2.5: expected a whole number"),
    "no checkpoint": (["simulate", "model=hf"], r"model.hf_config is not set"),
    "model of no executor": (["simulate", "model=executor"], r"model=executor is the model of an executor"),
    "unknown help": (["simulate", "--help", "nope"], r"nope: no such group"),
    "negative rate": (["simulate", "rate=-1"], r"rate=-1: expected a number above 0"),
    "word for a rate": (["simulate", "rate=abc"], r"rate=abc: expected a number above 0"),
    "infinite rate": (["simulate", "rate=inf"], r"rate=inf: expected a number"),
    "word for a number": (["simulate", "slo.ttft_s=soon"], r"slo\.ttft_s=soon: expected a number"),
    "negative seed": (["simulate", "seed=-3"], r"seed=-3: expected a whole number"),
    "no horizon": (["simulate", "horizon_s=0"], r"horizon_s=0: expected a number above 0"),
    "no such file": (["simulate", "trace=mooncake", "trace.path=/nope"], r"/nope"),
    "a directory": (["simulate", "trace=mooncake", "trace.path=."], r"directory"),
    "an empty trace": (["simulate", "trace=mooncake", "trace.path=empty"], r"empty"),
    "a binary file": (["simulate", "trace=mooncake", "trace.path=binary"], r"binary"),
    "unknown key": (["simulate", "slo.tfft_s=1"], r"slo\.tfft_s: no such key; slo has .*did you mean ttft_s"),
    "unknown group": (["simulate", "modle=qwen3_14b"], r"modle: no such key; keys are .*did you mean model"),
    "no value": (["simulate", "rate"], r"rate: an override is written key=value"),
    "broken list": (["goodput", "schemes=[conflux"], r"key=value"),
    "several values": (["simulate", "rate=1,2"], r"rate=1,2: several values need -m"),
    "impossible value": (["simulate", "slo.attainment=2", *SMALL], r"slo\.attainment=2"),
    "timeline": (["simulate", "output.timeline=maybe"], r"output\.timeline=maybe: use true, false or auto"),
    "unknown scheme": (["goodput", "schemes=[conflx]"], r"schemes=\[conflx\]: unknown, use .*did you mean conflux"),
    "no scheme": (["goodput", "schemes=[]"], r"schemes=\[\]: name at least one of"),
    "scheme twice": (["goodput", "schemes=[conflux,conflux]"], r"each scheme once"),
    "key of no scheme": (["goodput", "scheme.chnk_tokens=1"], r"scheme\.chnk_tokens: none of conflux, chunked_prefill"),
    "key of another": (["goodput", "per_scheme.conflux.chunk_tokens=1"], r"per_scheme\.conflux\.chunk_tokens: no such"),
    "absent scheme": (["goodput", "schemes=[conflux]", "per_scheme.tp.x=1"], r"per_scheme\.tp: .* has no tp"),
    "rate of a search": (["goodput", "rate=2"], r"rate=2: goodput searches the rate"),
    "closed loop search": (["goodput", "arrivals=closed_loop"], r"arrivals=closed_loop has no rate"),
    "not tunable": (
        ["goodput", "scheme.max_partial_prefills=tuned"],
        r"max_partial_prefills=tuned: conflux can tune nothing",
    ),
    "tolerance": (["goodput", "goodput.tolerance=0"], r"goodput\.tolerance=0"),
    "search from nothing": (["goodput", "goodput.start_rate=0"], r"goodput\.start_rate=0: use a rate above 0"),
    "no result that is drawn": (["report", ".other"], r"results of kind scenario are not drawn .* see report.html"),
    "workers": (["goodput", "goodput.workers=0"], r"goodput\.workers=0"),
    "unknown trace": (["fetch", "converzation"], r"converzation: unknown, use .*did you mean conversation"),
    "nothing to fetch": (["fetch"], r"names=\[\]: name at least one of"),
    "nothing to report": (["report"], r"folders=\[\]"),
    "no result": (["report", "."], r"no result in it"),
    "not listed": (["list", "modle"], r"modle: not listed, use .*did you mean model"),
    "no subcommand": (["simulte"], r"no subcommand 'simulte' \(did you mean simulate\?\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_x1_mistakes_are_one_line_and_exit_code_2(name: str, capsys: pytest.CaptureFixture[str]):
    Path("empty").touch()
    Path(".other").mkdir()
    Path(".other/summary.json").write_text('{"kind": "scenario"}')
    Path("binary").write_bytes(bytes(range(256)) * 8)
    words, expected = MISTAKES[name]
    assert confsim(*words) == 2
    line = only_line(capsys)
    assert line.startswith("confsim")
    assert re.search(expected, line), line
    assert not any(Path("outputs").glob("*"))  # nothing ran, nothing is left


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("analysis.commands.listing.choices", lambda group: 1 / 0)
    assert confsim("list") == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


# --- runs ------------------------------------------------------------------------------------------------------------


def test_simulate_writes_its_files_and_a_first_screen(capsys: pytest.CaptureFixture[str]):
    assert confsim("simulate", *SMALL, "rate=2") == 0
    out = capsys.readouterr().out
    (folder,) = folders("simulate-*")
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "summary.json",
        "timing.json",
        "requests.parquet",
        "iterations.parquet",
        "timeline.json.gz",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["kind"] == "simulate"
    assert summary["requests"]["injected"] == 40 == pq.read_metadata(folder / "requests.parquet").num_rows
    assert "attainment 100.0%" in out and "40 requests, 40 completed" in out
    assert "rejected" not in out
    assert str(folder) in out


def test_rejected_requests_are_on_the_first_screen(capsys: pytest.CaptureFixture[str]):
    assert confsim("simulate", *SMALL, "rate=2", "kv.capacity_tokens=256", "output.timeline=false") == 0
    assert "40 rejected" in capsys.readouterr().out
    (folder,) = folders("simulate-*")
    assert not (folder / "timeline.json.gz").exists()


def test_runs_of_the_same_second_have_their_own_folders():
    for _ in range(3):
        assert confsim("simulate", *SMALL, "rate=2", "quiet=true", "output.timeline=false") == 0
    assert len(folders("simulate-*")) == 3


def test_a_named_folder_is_never_shared(capsys: pytest.CaptureFixture[str]):
    words = ("simulate", *SMALL, "rate=2", "quiet=true", "hydra.run.dir=here")
    assert confsim(*words) == 0
    assert confsim(*words) == 2
    assert "already holds a result" in only_line(capsys)


def test_same_seed_same_bytes():
    for _ in range(2):
        assert confsim("simulate", *SMALL, "rate=2", "quiet=true") == 0
    first, second = folders("simulate-*")
    for name in ("summary.json", "requests.parquet", "iterations.parquet", "timeline.json.gz"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_sweep_runs_every_combination_in_its_own_folder():
    assert confsim("simulate", "-m", "rate=1,2", "scheme=conflux,chunked_prefill", *SMALL) == 0
    found = [json.loads(path.read_text()) for path in Path("outputs").rglob("summary.json")]
    ran = sorted((summary["provenance"]["config"]["rate"], summary["scheme"]) for summary in found)
    assert ran == [(1, "chunked_prefill"), (1, "conflux"), (2, "chunked_prefill"), (2, "conflux")]
    assert not list(Path("outputs").rglob("timeline.json.gz"))


def test_a_failing_job_of_a_sweep_leaves_the_others_and_fails_the_sweep(capsys: pytest.CaptureFixture[str]):
    assert confsim("simulate", "-m", "rate=1,-2,2", *SMALL) == 2
    assert len(list(Path("outputs").rglob("summary.json"))) == 2
    (trace,) = Path("outputs").rglob("error.txt")
    assert "rate=-2" in trace.read_text() and "Traceback" in trace.read_text()
    err = capsys.readouterr().err
    assert "1 of 3 runs failed" in err and re.search(r"^  rate=-2.*: rate=-2: expected", err, re.MULTILINE)


def test_subcommands_without_resumable_sweeps_sweep_too(capsys: pytest.CaptureFixture[str]):
    assert confsim("stats", "-m", "trace=toolagent,nope", "trace.requests=300") == 2
    assert "trace=nope: unknown" in capsys.readouterr().err
    assert confsim("stats", "-m", "trace=toolagent,conversation", "trace.requests=300,0") == 2
    err = capsys.readouterr().err
    assert "2 of 4 runs failed" in err
    assert len(list(Path("outputs").rglob("stats.json"))) == 2
    assert len(list(Path("outputs").rglob("error.txt"))) == 2


def test_stats_of_a_preset(capsys: pytest.CaptureFixture[str]):
    assert confsim("stats", "trace=toolagent", "trace.requests=500") == 0
    (folder,) = folders("stats-*")
    content = json.loads((folder / "stats.json").read_text())
    assert (content["kind"], content["requests"], content["synthetic"]) == ("stats", 500, True)
    assert "synthetic" in capsys.readouterr().out


def test_report_rebuilds_from_results(capsys: pytest.CaptureFixture[str]):
    for rate in ("1", "2"):
        assert confsim("simulate", *SMALL, f"rate={rate}", "quiet=true") == 0
    first, second = folders("simulate-*")
    assert confsim("report", str(first)) == 0
    assert (first / "report.html").exists()
    assert confsim("report", str(first), str(second), "title=Two rates") == 0
    (page,) = Path("outputs").glob("report-*/report.html")
    assert "<h1>Two rates" in page.read_text()
    assert str(page) in capsys.readouterr().out


def test_report_takes_folders_with_odd_names():
    assert confsim("simulate", *SMALL, "rate=2", "quiet=true", "hydra.run.dir=plain") == 0
    odd = Path("it's rate=2, [x] {y}")
    Path("plain").rename(odd)
    assert confsim("report", str(odd), "quiet=true") == 0
    assert (odd / "report.html").exists()


def test_module_and_pipe(tmp_path: Path):
    """`python -m confsim` works, and a reader that goes away early is no error worth a traceback."""
    command = f"{sys.executable} -m confsim list | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "Models\n"
    assert "Traceback" not in done.stderr
