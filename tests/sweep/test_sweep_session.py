"""The files through which a sweep and its workers talk, and runs' folders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from analysis.sweep.expand import SweepRun
from analysis.sweep.folder import SweepFolder, failure_of, is_complete, read_plan
from analysis.sweep.progress import Progress, gist, merit
from analysis.sweep.session import Session, is_orphaned, process_lives
from analysis.sweep.worker import work
from traces.files import is_full

ABOUT = {"command": "simulate", "index": "index", "owner": None}
RUNS = [SweepRun({"x": n}, f"x={n}", {"x": n}, {}, None, n, f"id{n}", {"code": "c"}) for n in range(40)]


def session(tmp_path: Path) -> Session:
    return Session.create(tmp_path / ".work", ABOUT, RUNS)


def test_a_plan_survives_the_disk(tmp_path: Path) -> None:
    about, *lines = map(json.loads, session(tmp_path).plan())
    assert about == ABOUT
    assert [SweepRun(**line) for line in lines] == RUNS
    assert Session(tmp_path / "gone").plan() == []


def test_each_run_is_taken_once(tmp_path: Path) -> None:
    shared = session(tmp_path)
    taken: list[int] = []

    def take() -> None:
        taken.extend(number for number in range(40) if shared.claim(number))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(40)) and shared.claimed() == set(range(40))


def test_who_lives(tmp_path: Path) -> None:
    own = session(tmp_path)
    assert own.living() == 0
    child = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(60)"))
    sign = own.path / "workers" / "0"
    sign.write_text(json.dumps([socket.gethostname(), child.pid]))
    assert own.living() == 1
    child.kill()
    assert not is_orphaned([socket.gethostname(), os.getpid()]) and not is_orphaned(["elsewhere", child.pid])
    child.wait()
    assert own.living() == 0 and not process_lives(child.pid)
    assert is_orphaned([socket.gethostname(), child.pid]) and not is_orphaned(None)
    sign.write_text(json.dumps(["elsewhere", 1]))
    assert own.living() == 1  # heard of just now
    os.utime(sign, (0, 0))
    assert own.living() == 0
    with own.attended(1, None):
        assert own.living() == 1
    assert own.living() == 0


def test_a_worker_without_a_plan_or_after_the_stop_does_nothing(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    cfg = OmegaConf.create({"folder": str(tmp_path), "session": str(tmp_path / "gone"), "worker": 0})
    assert work(cfg) is False
    own = session(tmp_path)
    own.stop()
    assert own.is_over
    assert work(OmegaConf.merge(cfg, {"session": str(own.path)})) is False
    assert own.claimed() == set()


def test_run_folders_are_whole_or_absent(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "s", tmp_path / "index")
    with folder.draft("ab1") as draft:
        (draft / "inner").mkdir()
        (draft / "inner" / "data").write_text("x" * 10)
        assert folder.state("ab1") == "missing"
        folder.finish(draft, "ab1", {"text": "x=1"})
    assert folder.state("ab1") == "done"
    assert [path.name for path in (tmp_path / "s" / "runs").iterdir()] == ["ab1"]
    assert not is_complete(folder.run("ab1"), "ab2")
    with pytest.raises(RuntimeError), folder.draft("ab2") as draft:
        (draft / "data").write_text("x")
        raise RuntimeError
    assert folder.state("ab2") == "missing"
    folder.fail("ab2", {"error": "no"}, "Traceback")
    assert folder.state("ab2") == "failed"
    assert (failure_of(folder.run("ab2")) or {})["error"] == "no"
    folder.fail("ab1", {"error": "late"}, "Traceback")  # a result is not replaced by a failure
    assert folder.state("ab1") == "done"
    with folder.draft("ab2") as draft:
        (draft / "data").write_text("y")
        folder.finish(draft, "ab2", {})
    assert folder.state("ab2") == "done"
    with folder.draft("ab2") as draft:  # nor by what a worker that was given up for dead brings
        (draft / "data").write_text("z")
        folder.finish(draft, "ab2", {})
    assert (folder.run("ab2") / "data").read_text() == "y"
    assert not list((tmp_path / "s" / "runs").glob(".*"))


def test_runs_of_other_sweeps_are_kept_while_they_are_whole(tmp_path: Path) -> None:
    one, other, third = (SweepFolder(tmp_path / name, tmp_path / "index") for name in ("one", "other", "third"))
    with one.draft("ab1") as draft:
        (draft / "data").write_text("x" * 10)
        one.finish(draft, "ab1", {})
    assert one.keep("ab1")
    assert other.keep("ab1") and is_complete(other.run("ab1"), "ab1") and not other.keep("ab3")
    (one.run("ab1") / "data").unlink()
    assert third.keep("ab1")  # the index follows the latest copy
    assert one.keep("ab1") and (one.run("ab1") / "data").exists()  # repaired by what another sweep has
    for folder in (one, other, third):
        (folder.run("ab1") / "data").write_text("y" * 10)  # as long as it was
        assert not folder.keep("ab1") and not folder.run("ab1").exists()
    assert not list(tmp_path.glob("*/runs/.*"))


@pytest.mark.parametrize(
    "record", ["[]", "{}", "[" * 100_000, '{"id": "ab1", "files": []}', "\x00", '{"files": {"a": 1}}']
)
def test_records_that_are_none_of_ours(tmp_path: Path, record: str) -> None:
    folder = SweepFolder(tmp_path).run("ab1")
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(record)
    assert not is_complete(folder, "ab1")
    (folder / "run.json").rename(folder / "failure.json")
    assert (failure_of(folder) or {}).get("error") is None


def test_plans(tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None
    (tmp_path / "sweep.json").write_text("[]")
    assert read_plan(tmp_path) is None


def test_a_full_disk_is_seen_through_other_errors() -> None:
    import errno

    full = OSError(errno.ENOSPC, "full")
    wrapped = RuntimeError("while writing")
    wrapped.__cause__ = full
    assert is_full(full) and is_full(wrapped) and is_full(OSError(errno.EDQUOT, "quota"))
    assert not is_full(OSError(errno.EACCES, "no")) and not is_full(None)


# --- progress --------------------------------------------------------------------------------------------------------


def summary(attainment: float, rate: float, attained: bool) -> dict[str, object]:
    return {"attainment": attainment, "offered_rate": rate, "attained": attained, "ttft_s": {"p95": 0.25}}


def finish(folder: SweepFolder, number: int, wall_s: float, content: dict[str, object]) -> None:
    with folder.draft(f"id{number}") as draft:
        (draft / "summary.json").write_text(json.dumps(content))
        folder.finish(draft, f"id{number}", {"wall_s": wall_s})


def test_progress_counts_and_names_the_best(tmp_path: Path) -> None:
    own, folder, text = session(tmp_path), SweepFolder(tmp_path), StringIO()
    progress = Progress(folder, RUNS[1:5], 5, Console(file=text, soft_wrap=True))
    with progress.following(own):
        for number in (1, 2, 3, 4):
            own.claim(number)
        progress.look(own.claimed())
        assert progress.describe() == "4 running"
        finish(folder, 1, 1.5, summary(0.97, 2.0, True))
        folder.fail("id2", {"error": "broken"}, "Traceback")
        finish(folder, 3, 0.5, summary(0.99, 1.0, True))
        finish(folder, 4, 0.5, summary(0.2, 9.0, False))
    assert (progress.ended, progress.failed, progress.best) == (4, 1, "x=1 (97.0% at 2 req/s)")
    assert sorted(text.getvalue().splitlines(), key=lambda line: line.split()[1]) == [
        "[2/5] x=1: attainment 97.0% at 2 req/s, P95 TTFT 250.0 ms, 1.50 s",
        "[3/5] x=2: FAILED, broken",
        "[4/5] x=3: attainment 99.0% at 1 req/s, P95 TTFT 250.0 ms, 0.50 s",
        "[5/5] x=4: attainment 20.0% at 9 req/s, P95 TTFT 250.0 ms, 0.50 s",
    ]
    assert progress.describe() == "0 running, 1 failed, 0:00 left, best x=1 (97.0% at 2 req/s)"


def test_what_is_best() -> None:
    assert merit(summary(0.96, 3.0, True)) > merit(summary(0.99, 1.0, True)) > merit(summary(0.94, 8.0, False))
    assert merit({"schemes": {"a": {"goodput": 1.0}, "b": {"goodput": 2.5}}})[1] == "b 2.5 req/s"
    assert gist({"schemes": {"a": {"goodput": 1.0}}}) == "a 1 req/s"


def test_a_terminal_gets_one_live_line(tmp_path: Path) -> None:
    import pty

    code = (
        "from confsim.cli import main; main(['simulate', '-m', 'trace=fixed', 'trace.requests=8', 'latency=affine',"
        f" 'rate=1,2,3', 'hydra.sweep.dir={tmp_path / 's'}'])"
    )
    parent, child = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen((sys.executable, "-c", code), stdout=child, stderr=child, env=env, cwd=tmp_path)
    os.close(child)
    seen = b""
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(parent)
    assert process.wait(timeout=60) == 0
    text = seen.decode()
    assert "3/3" in text and "best rate=3" in text and "3 of 3 results" in text
    assert "[1/3]" not in text  # lines are for pipes
