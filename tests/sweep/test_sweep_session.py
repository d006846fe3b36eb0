"""The files through which a sweep and its workers talk, and runs' folders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from analysis.sweep.folder import SweepFolder, failure_of, is_complete, read_plan, replace_folder
from analysis.sweep.progress import Lines, Tally, describe, merit, status, watching
from analysis.sweep.session import EventLog, EventReader, Job, Session, Task, process_lives
from analysis.sweep.worker import is_full, task

TASKS = [Task(number, f"id{number}", f"x={number}", {"x": number}) for number in range(40)]


def session(tmp_path: Path) -> Session:
    return Session.create(tmp_path, Job("simulate", None, None), TASKS)


def test_a_plan_survives_the_disk(tmp_path: Path) -> None:
    plan = session(tmp_path).plan()
    assert plan is not None
    job, lines = plan
    assert job == Job("simulate", None, None)
    assert [Task(**json.loads(line)) for line in lines] == TASKS
    assert Session(tmp_path / "gone").plan() is None


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
    path = own.path / "events" / "0.jsonl"
    path.write_text(json.dumps({"event": "begin", "host": socket.gethostname(), "pid": child.pid}) + "\n")
    assert own.living() == 1
    child.kill()
    child.wait()
    assert own.living() == 0 and not process_lives(child.pid)
    path.write_text(json.dumps({"event": "begin", "host": "elsewhere", "pid": 1}) + "\n")
    assert own.living() == 1  # heard of just now
    os.utime(path, (0, 0))
    assert own.living() == 0
    log = EventLog(own, 1)
    log.close()
    assert own.living() == 0


def test_events_are_read_once_and_whole(tmp_path: Path) -> None:
    own = session(tmp_path)
    log, reader = EventLog(own, 0), EventReader(own)
    log.write("start", run=3)
    assert [event["event"] for event in reader.new()] == ["begin", "start"]
    with (own.path / "events" / "0.jsonl").open("a") as file:
        file.write('{"event": "do')
        file.flush()
        assert reader.new() == []
        file.write('ne", "run": 3}\n')
    assert reader.new() == [{"event": "done", "run": 3}]


def test_a_worker_without_a_plan_or_after_the_stop_does_nothing(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    nothing = {"done": 0, "failed": 0, "full": False}
    cfg = OmegaConf.create({"folder": str(tmp_path), "session": str(tmp_path / "gone"), "worker": 0})
    assert task(cfg) == nothing
    own = session(tmp_path)
    own.stop()
    assert own.stopped
    assert task(OmegaConf.merge(cfg, {"session": str(own.path)})) == nothing
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
    other = SweepFolder(tmp_path / "other", tmp_path / "index")
    assert other.adopt("ab1") and other.state("ab1") == "done" and not other.adopt("ab3")
    (folder.run("ab1") / "inner" / "data").unlink()
    assert SweepFolder(tmp_path / "third", tmp_path / "index").adopt("ab1")  # the index follows the latest copy


def test_replacing_a_folder(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


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


def note(attainment: float, rate: float, attained: bool) -> dict[str, object]:
    return {"attainment": attainment, "rate": rate, "attained": attained, "ttft_p95_s": 0.25}


def test_progress_counts_and_names_the_best(tmp_path: Path) -> None:
    from io import StringIO

    from rich.console import Console

    own = session(tmp_path)
    tally = Tally(5, 1, {number: f"x={number}" for number in range(5)})
    text = StringIO()
    lines = Lines(Console(file=text, soft_wrap=True))
    with watching(own, tally, lines.show):
        log = EventLog(own, 0)
        log.write("start", run=1)
        log.write("done", run=1, wall_s=1.5, note=note(0.97, 2.0, True))
        log.write("failed", run=2, error="broken")
        log.write("done", run=3, wall_s=0.5, note=note(0.99, 1.0, True))
        log.write("done", run=4, wall_s=0.5, note=note(0.2, 9.0, False))
    assert (tally.done, tally.failed, tally.best_text) == (3, 1, "x=1 (97.0% at 2 req/s)")
    assert text.getvalue().splitlines() == [
        "[2/5] x=1: attainment 97.0% at 2 req/s, P95 TTFT 250.0 ms, 1.50 s",
        "[3/5] x=2: FAILED, broken",
        "[4/5] x=3: attainment 99.0% at 1 req/s, P95 TTFT 250.0 ms, 0.50 s",
        "[5/5] x=4: attainment 20.0% at 9 req/s, P95 TTFT 250.0 ms, 0.50 s",
    ]
    assert status(tally) == "0 running, 1 failed, 0:00 left, best x=1 (97.0% at 2 req/s)"


def test_what_is_best() -> None:
    assert merit(note(0.96, 3.0, True)) > merit(note(0.99, 1.0, True)) > merit(note(0.94, 8.0, False))
    assert merit({"goodput": {"a": 1.0, "b": 2.5}})[1] == "b 2.5 req/s"
    assert describe({"goodput": {"a": 1.0}}) == "a 1 req/s"


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
