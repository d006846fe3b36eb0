"""Sweeps in this process: what fails, what is kept, what is made again, and the table of it all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from sweep_harness import CHEAP, TROUBLE

import confsim
from analysis.sweep.driver import Sweep, SweepOutcome
from analysis.sweep.expand import expand
from analysis.sweep.folder import TABLE, is_complete, read_plan
from confsim.cli import main
from confsim.errors import InputError


def run(folder: str | Path, *words: str) -> SweepOutcome:
    grid = expand("simulate", [*words, f"hydra.sweep.dir={folder}"])
    assert grid is not None
    return Sweep(grid).run()


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["simulate", "-m", *words])
    return int(left.value.code or 0)


def runs(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "runs").iterdir()}


def test_a_sweep_leaves_a_table_and_whole_runs() -> None:
    outcome = run("s", *CHEAP, "rate=1,2", "slo.ttft_s=1,2", "scheme=conflux,chunked_prefill")
    assert outcome.complete and outcome.planned == 8 and not outcome.failures
    folder = Path("s")
    assert sorted(path.name for path in folder.iterdir()) == [TABLE, "runs", "sweep.json"]
    plan = read_plan(folder)
    assert plan is not None and plan["planned"] == 8
    assert plan["axes"] == {"rate": [1, 2], "slo.ttft_s": [1, 2], "scheme": ["conflux", "chunked_prefill"]}
    assert all(is_complete(folder / "runs" / entry["id"], entry["id"]) for entry in plan["runs"])
    frame = pd.read_parquet(folder / TABLE)
    assert list(frame.columns[:6]) == ["run", "id", "status", "rate", "slo.ttft_s", "scheme"]
    assert list(frame["rate"]) == [1, 1, 1, 1, 2, 2, 2, 2]
    assert list(frame["scheme"]) == ["conflux", "chunked_prefill"] * 4
    assert (frame["requests.completed"] == 8).all()
    first = json.loads((folder / "runs" / frame["id"][0] / "summary.json").read_text())
    assert frame["attainment"][0] == first["attainment"]
    assert frame["ttft_s.p95"][0] == first["ttft_s"]["p95"]
    assert frame["cluster.gpus"][0] == 4 and frame["trace"][0] == "fixed"


def test_the_table_opens_in_duckdb() -> None:
    duckdb = pytest.importorskip("duckdb")
    run("s", *CHEAP, "rate=1,2", "seed=0,1")
    found = duckdb.sql("select rate, count(*) as runs from 's/results.parquet' group by rate order by rate").fetchall()
    assert found == [(1, 2), (2, 2)]


def test_h1_failures_are_kept_and_do_not_stop_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    code = exit_code(*TROUBLE, "trace.mode=ok,mistake,defect,ok", "seed=0,1", "hydra.sweep.dir=s")
    out, err = capfd.readouterr()
    assert code == 1
    assert "8 runs planned" in out and "4 of 8 results" in out
    assert "4 of 8 runs failed" in err
    assert "trace.mode=mistake seed=0: trace.mode=mistake: this cannot be, use ok" in err
    frame = pd.read_parquet("s/results.parquet")
    assert list(frame["status"]) == ["done"] * 2 + ["failed"] * 4 + ["done"] * 2
    failed = frame[frame["trace.mode"] == "defect"].iloc[0]
    assert failed["error"] == "ZeroDivisionError: a defect"
    assert pd.isna(failed["attainment"])
    text = (Path("s/runs") / failed["id"] / "error.txt").read_text()
    assert "Traceback" in text and "sweep_targets.py" in text


def test_mistakes_alone_exit_with_2() -> None:
    assert exit_code(*CHEAP, "rate=1,-1", "hydra.sweep.dir=s", "--quiet") == 2
    assert exit_code(*CHEAP, "rate=1,2", "hydra/launcher=nope") == 2
    assert exit_code(*CHEAP, "rate=1,2", "sweep.workers=0") == 2
    assert exit_code(*CHEAP, "rate=1,2", "hydra.sweep.dir=s", "--quiet") == 0


def test_sys_exit_in_a_run_is_a_failure_of_that_run() -> None:
    outcome = run("s", *TROUBLE, "trace.mode=ok,exit,ok", "seed=0,1")
    assert [failure.error for failure in outcome.failures] == ["the run called sys.exit(0)"] * 2
    assert outcome.present == 4


def test_a_failed_run_is_tried_again(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    words = ["latency=affine", "trace=mooncake", f"trace.path={trace}", "rate=1,2"]
    assert len(run("s", *words).failures) == 2
    row = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [0]}
    trace.write_text("".join(json.dumps({**row, "timestamp": i * 1000}) + "\n" for i in range(3)))
    outcome = run("s", *words)
    assert outcome.complete and not outcome.failures


def test_a_finished_run_is_not_repeated_in_the_same_folder() -> None:
    run("s", *CHEAP, "rate=1,2")
    before = runs(Path("s"))
    table = Path("s/results.parquet").read_bytes()
    outcome = run("s", *CHEAP, "rate=1,2")
    assert (outcome.reused, outcome.present) == (2, 2)
    assert runs(Path("s")) == before
    assert Path("s/results.parquet").read_bytes() == table
    outcome = run("s", *CHEAP, "rate=1,2,3")
    assert (outcome.reused, outcome.present) == (2, 3)
    assert {name: runs(Path("s"))[name] for name in before} == before


def test_a_finished_run_is_taken_over_by_another_sweep() -> None:
    run("a", *CHEAP, "rate=1,2")
    outcome = run("b", *CHEAP, "rate=1,2,3")
    assert (outcome.reused, outcome.present) == (2, 3)
    name = next(iter(runs(Path("a"))))
    one, other = (Path(folder) / "runs" / name / "summary.json" for folder in "ab")
    assert one.stat().st_ino == other.stat().st_ino  # a link, no copy
    shutil.rmtree("a")
    assert run("c", *CHEAP, "rate=1,2,3").reused == 3  # from b


def test_resume_false_makes_every_run_again() -> None:
    run("s", *CHEAP, "rate=1,2")
    before = runs(Path("s"))
    outcome = run("s", *CHEAP, "rate=1,2", "resume=false")
    assert (outcome.reused, outcome.present) == (0, 2)
    after = runs(Path("s"))
    assert set(after) == set(before) and all(after[name] != before[name] for name in before)


@pytest.mark.parametrize("harm", ["truncate", "zero", "remove", "no_record", "garble"])
def test_half_written_runs_are_made_again(harm: str) -> None:
    first = run("a", *CHEAP, "rate=1,2")
    table = Path("a/results.parquet").read_bytes()
    name = first.table["id"][0].as_py()
    folder = Path("a/runs") / name
    if harm == "truncate":
        file = folder / "requests.parquet"
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data[:-10])
    elif harm == "zero":
        file = folder / "requests.parquet"
        size = file.stat().st_size
        file.unlink()
        file.write_bytes(bytes(size))
    elif harm == "remove":
        (folder / "iterations.parquet").unlink()
    elif harm == "no_record":
        (folder / "run.json").unlink()
    else:
        text = (folder / "summary.json").read_text()
        (folder / "summary.json").unlink()
        (folder / "summary.json").write_text(text.replace("conflux", "conflvx"))
    Path("a/runs/.leftover.host-1-aa").mkdir()
    outcome = run("a", *CHEAP, "rate=1,2")
    assert (outcome.reused, outcome.present) == (1, 2)
    assert Path("a/results.parquet").read_bytes() == table
    assert pq.read_table(folder / "requests.parquet").num_rows == 8
    assert sorted(runs(Path("a"))) == sorted(first.table["id"].to_pylist())


def test_points_that_are_the_same_run_are_run_once() -> None:
    outcome = run("s", *CHEAP, "rate=1,1.0", "kv.prefix_cache=false")
    assert outcome.planned == 2 and outcome.complete
    assert len(runs(Path("s"))) == len(set(outcome.table["id"].to_pylist()))


def test_a_full_disk_stops_the_sweep_and_keeps_what_is_there(capfd: pytest.CaptureFixture[str]) -> None:
    words = [*TROUBLE, "hydra.sweep.dir=s", "--quiet"]
    assert exit_code(*words, "trace.number=1,2", "trace.mode=ok,full", "seed=0,1") == 1
    err = capfd.readouterr().err
    assert "the disk is full, 2 of 8 results are there" in err
    assert "failed" not in err  # the run is not to blame
    frame = pd.read_parquet("s/results.parquet")
    assert list(frame["status"]) == ["done", "done"]
    assert not [path for path in Path("s/runs").iterdir() if path.name.startswith(".")]
    assert exit_code(*words, "trace.number=1,2", "trace.mode=ok", "seed=0,1") == 0


def test_writing_to_a_full_disk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from confsim.outcome import result

    real, written = pq.write_table, []

    def write(table: Any, path: Any, **options: Any) -> None:
        written.append(path)
        if len(written) == 4:  # a table of the second run
            raise OSError(errno.ENOSPC, "No space left on device")
        real(table, path, **options)

    monkeypatch.setattr(result.pq, "write_table", write)
    outcome = run("s", *CHEAP, "rate=1,2,3")
    assert outcome.disk_full and outcome.present == 1 and not outcome.failures
    assert run("s", *CHEAP, "rate=1,2,3").complete


def test_two_sweeps_never_share_a_folder(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert exit_code(*CHEAP, "rate=1,2") == 0
    capfd.readouterr()
    folders = [path for path in Path("outputs").iterdir() if not path.name.startswith(".")]
    assert len(folders) == 3
    assert len({path.name[:30] for path in folders}) <= 3  # the second is in the name, and a token


def test_a_folder_that_another_sweep_writes_to_is_refused() -> None:
    import fcntl

    Path("s/.work").mkdir(parents=True)
    with Path("s/.work/lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another sweep is writing here"):
            run("s", *CHEAP, "rate=1")


def test_progress_is_one_line_a_run_when_piped(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*CHEAP, "rate=1,2,3", "hydra.sweep.dir=s") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("3 runs planned, 1 worker (basic)")
    assert [line.split(":")[0] for line in lines[1:4]] == [f"[{i}/3] rate={i}" for i in (1, 2, 3)]
    assert lines[4] == "3 of 3 results: s/results.parquet"
    assert exit_code(*CHEAP, "rate=1,2,3", "hydra.sweep.dir=s", "--quiet") == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_goodput_sweeps_have_a_row_for_each_scheme() -> None:
    words = [*CHEAP, "trace.requests=12", "goodput.curve=[]", "goodput.tolerance=0.3", "slo.tbt_s=0.1,0.2"]
    grid = expand("goodput", [*words, "schemes=[conflux,chunked_prefill]", "hydra.sweep.dir=s"])
    assert grid is not None
    outcome = Sweep(grid).run()
    frame = outcome.table.to_pandas()
    assert list(frame["run"]) == [0, 0, 1, 1]
    assert list(frame["scheme"]) == ["conflux", "chunked_prefill"] * 2
    content = json.loads((Path("s/runs") / frame["id"][2] / "goodput.json").read_text())
    assert frame["goodput"][2] == content["schemes"]["conflux"]["goodput"] > 0
    assert frame["gpus"][2] == 4 and frame["slo.tbt_s"][2] == 0.2


# --- Python ----------------------------------------------------------------------------------------------------------


def test_sweep_from_python() -> None:
    frame = confsim.sweep(CHEAP, {"rate": [1, 2], "scheme": ["conflux", "chunked_prefill"]}, folder="p")
    assert list(zip(frame["rate"], frame["scheme"], strict=True)) == [
        (1, "conflux"), (1, "chunked_prefill"), (2, "conflux"), (2, "chunked_prefill"),
    ]  # fmt: skip
    assert Path("p/results.parquet").is_file()
    base = {"trace": "fixed", "trace.requests": 8, "trace.output_tokens": 4, "latency": "affine"}
    again = confsim.sweep(base, {"rate": [1, 2], "scheme": ["conflux", "chunked_prefill"]})
    pd.testing.assert_frame_equal(frame, again)


def test_sweep_from_a_composed_configuration() -> None:
    axes = {"scheme": ["conflux", "chunked_prefill"], "slo.tbt_s": [0.1, 0.2]}
    cfg = confsim.compose([*CHEAP, "rate=2"])
    frame = confsim.sweep(cfg, axes)
    words = confsim.sweep([*CHEAP, "rate=2"], axes)
    assert list(frame["id"]) == list(words["id"])
    assert cfg.slo.tbt_s == 0.1  # untouched
    with pytest.raises(InputError, match="no such key"):
        confsim.sweep(cfg, {"slo.tbt": [1]})


def test_sweep_from_python_warns_of_failures_and_refuses_nonsense() -> None:
    with pytest.warns(UserWarning, match=r"rate=-1 failed: rate=-1: expected a number above 0"):
        frame = confsim.sweep(CHEAP, {"rate": [1, -1]})
    assert list(frame["status"]) == ["done", "failed"]
    with pytest.raises(InputError, match="expected a list of values"):
        confsim.sweep(CHEAP, {"rate": 3})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="expected a list of values"):
        confsim.sweep(CHEAP, {"scheme": "conflux"})


def test_t17_contradictions_are_mistakes_and_labels_say_what_ran(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*CHEAP, "arrivals=closed_loop", "rate=1,2", "hydra.sweep.dir=a") == 2
    assert "2 of 2 runs failed" in capfd.readouterr().err
    outcome = run("b", *CHEAP, "arrivals=poisson,gamma", "rate=1,4")
    labels = dict(zip(outcome.table["label"].to_pylist(), outcome.table["rate"].to_pylist(), strict=True))
    assert all(f"{rate} req/s" in label for label, rate in labels.items())
    assert len(labels) == 4


def test_s16_a_report_flags_results_of_different_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from analysis.pages.sweep import write_sweep_report

    for commit, rate in (("a" * 40, 1), ("b" * 40, 2)):
        state = {"git_commit": commit, "git_dirty": False}
        monkeypatch.setattr("confsim.setup.provenance.source_state", lambda root=None, state=state: state)
        run(f"s{rate}", *CHEAP, f"rate={rate}")
    page, _ = write_sweep_report([Path("s1"), Path("s2")], tmp_path / "report.html")
    assert "results come from different commits (aaaaaaaaaaaa" in page.read_text()


def test_h6_multi_rank_runs_get_a_resolved_configuration(tmp_path: Path, command_line: Any) -> None:
    """Two ranks on this CPU are the clock of each run, in workers that never saw the command line."""
    pytest.importorskip("torch")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    words = ["backend=live", "latency=affine", "trace=fixed", "trace.requests=3", "trace.output_tokens=4"]
    words += ["trace.interval_s=0.01", "arrivals=recorded", "trace.prompt_tokens=32,48", "hydra.sweep.dir=s"]
    done = command_line("simulate", "-m", *words, "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    assert done.returncode == 0, done.stderr
    frame = pd.read_parquet(tmp_path / "s" / "results.parquet")
    assert list(frame["requests.completed"]) == [3, 3]
    for name, prompt in zip(frame["id"], (32, 48), strict=True):
        record = (tmp_path / "s" / "runs" / name / "run.json").read_text()
        assert "${" not in record
        assert json.loads(record)["config"]["trace"]["prompt_tokens"] == prompt
