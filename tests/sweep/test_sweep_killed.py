"""Sweeps that are killed, interrupted, or lose workers: at most the runs in flight are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from sweep_harness import TROUBLE

from analysis.sweep.folder import TABLE, is_complete, read_plan

Start = Callable[..., "subprocess.Popen[str]"]
SLOW = [*TROUBLE, "++trace.seconds=0.3"]


def finished(folder: Path) -> list[Path]:
    """Runs that have a whole result."""
    found = (folder / "runs").glob("[0-9a-f]*") if (folder / "runs").is_dir() else iter(())
    return [path for path in found if is_complete(path, path.name)]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Processes that descend from a process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, own in parents.items() if own == parent]
    return found[1:]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_h3_a_killed_sweep_resumes_to_the_same_bytes(tmp_path: Path, confsim_process: Start) -> None:
    words = ["simulate", "-m", *SLOW, "trace.prompt_tokens=100,200,300", "seed=0,1"]
    whole = confsim_process(*words, "hydra.sweep.dir=whole", "output.dir=elsewhere")
    out, err = whole.communicate(timeout=240)
    assert whole.returncode == 0, err
    assert "6 of 6 results" in out

    killed = confsim_process(*words, "hydra.sweep.dir=killed")
    drafts = tmp_path / "killed" / "runs"
    wait_for(lambda: len(finished(tmp_path / "killed")) >= 3 and list(drafts.glob(".*")), killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    before = {path: path.stat().st_mtime_ns for path in finished(tmp_path / "killed")}
    assert 3 <= len(before) < 6
    assert not (tmp_path / "killed" / "results.parquet").exists()
    assert list(drafts.glob(".*")), "a run was half-written"

    again = confsim_process(*words, "hydra.sweep.dir=killed")
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert f"6 runs planned, {len(before)} there already" in out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    names = sorted(str(path.relative_to(tmp_path / "whole")) for path in (tmp_path / "whole").rglob("*"))
    assert sorted(str(path.relative_to(tmp_path / "killed")) for path in (tmp_path / "killed").rglob("*")) == names
    assert (tmp_path / "killed" / TABLE).read_bytes() == (tmp_path / "whole" / TABLE).read_bytes()
    assert read_plan(tmp_path / "killed")["runs"] == read_plan(tmp_path / "whole")["runs"]  # type: ignore[index]
    for path in (tmp_path / "whole" / "runs").rglob("*.parquet"):
        assert (tmp_path / "killed" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()

    other = confsim_process(*words, "hydra.sweep.dir=other")  # a new folder finds the runs by their content
    out, err = other.communicate(timeout=240)
    assert "6 runs planned, 6 there already" in out
    assert (tmp_path / "other" / "results.parquet").read_bytes() == (
        tmp_path / "whole" / "results.parquet"
    ).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_says_what_is_there(tmp_path: Path, confsim_process: Start, number: int) -> None:
    words = ["simulate", "-m", *SLOW, "trace.prompt_tokens=100,200,300", "seed=0,1", "hydra.sweep.dir=s"]
    process = confsim_process(*words)
    wait_for(lambda: len(finished(tmp_path / "s")) >= 2, process)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    there = len(finished(tmp_path / "s"))
    assert f"interrupted, {there} of 6 results are there; the same command goes on" in err
    assert "Traceback" not in err
    assert len(pd.read_parquet(tmp_path / "s" / "results.parquet")) == there


def test_ctrl_c_ends_the_workers_too(tmp_path: Path, confsim_process: Start) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    words = [*SLOW, "++trace.seconds=1", "trace.prompt_tokens=range(100,130)", "hydra.sweep.dir=s"]
    process = confsim_process("simulate", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *words)
    wait_for(lambda: finished(tmp_path / "s"), process)
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "results are there; the same command goes on" in err
    until = time.monotonic() + 30
    while not all(map(is_gone, workers)) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(map(is_gone, workers))
    assert not list((tmp_path / "s" / "runs").glob(".*"))


def test_workers_end_with_a_killed_parent(tmp_path: Path, confsim_process: Start) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    words = [*SLOW, "++trace.seconds=2", "trace.prompt_tokens=range(100,160)", "hydra.sweep.dir=s"]
    process = confsim_process("simulate", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *words)
    wait_for(lambda: finished(tmp_path / "s"), process)
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    until = time.monotonic() + 30
    while not all(map(is_gone, workers)) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(map(is_gone, workers))


def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path, confsim_process: Start) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    words = [
        *TROUBLE,
        f"++trace.marker={tmp_path / 'marker'}",
        "trace.mode=ok,kill_once",
        "seed=0,1,2",
        "hydra.sweep.dir=s",
    ]
    process = confsim_process("simulate", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *words)
    out, err = process.communicate(timeout=240)
    assert (tmp_path / "marker").exists()
    assert process.returncode == 0, err
    assert "6 of 6 results" in out


def test_a_run_that_always_takes_its_worker_along_is_recorded(tmp_path: Path, confsim_process: Start) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    words = [*TROUBLE, "trace.mode=ok,exit_process,ok", "trace.prompt_tokens=100,200", "hydra.sweep.dir=s"]
    process = confsim_process("simulate", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *words)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    frame = pd.read_parquet(tmp_path / "s" / "results.parquet")
    assert list(frame["status"]) == ["done"] * 2 + ["failed"] * 2 + ["done"] * 2
    assert frame["error"][2].startswith("its worker died twice")
