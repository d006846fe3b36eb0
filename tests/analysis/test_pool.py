"""The pool of worker processes: what it promises to those who hand it jobs, and to the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loky import cpu_count

from analysis.search.pool import Pool, WorkerError, worker_count
from confsim.errors import InputError

GONE_S = 10  # by when workers have to be gone without their parent


class Counting:
    """Numbers the jobs that it runs."""

    def __init__(self) -> None:
        self.jobs = 0

    def __call__(self, *_: Any) -> tuple[int, int]:
        self.jobs += 1
        return os.getpid(), self.jobs


def pid(*_: Any) -> int:
    return os.getpid()


def double(number: int) -> int:
    return 2 * number


def slow_pid(_: int) -> int:
    time.sleep(0.2)
    return os.getpid()


def refuse(number: int) -> int:
    raise InputError(f"no {number}")


def die(marks: Path, often: int, name: str) -> str:
    """Kill the process that runs this, the first `often` times for a name."""
    (marks / f"{name}.{os.getpid()}").touch()
    if len(list(marks.glob(f"{name}.*"))) <= often:
        os.kill(os.getpid(), signal.SIGKILL)
    return name


def lives(number: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("workers", [1, 2])
def test_results_do_not_depend_on_the_workers(workers: int) -> None:
    with Pool(double, workers) as pool:
        assert [future.result() for future in [pool.submit(number) for number in range(7)]] == list(range(0, 14, 2))
        assert dict(pool.completed({str(number): (number,) for number in range(5)})) == {
            str(number): 2 * number for number in range(5)
        }
        assert pool.together(lambda: pool.submit(4).result(), lambda: pool.submit(5).result()) == [8, 10]


def test_one_worker_is_this_process() -> None:
    with Pool(pid, 1) as pool:
        assert pool.submit().result() == os.getpid()


def test_a_worker_keeps_what_its_function_keeps() -> None:
    with Pool(Counting(), 2) as pool:
        found = [pool.submit(number).result() for number in range(6)]
    assert os.getpid() not in {process for process, _ in found}
    for process in {process for process, _ in found}:
        assert [jobs for own, jobs in found if own == process] == list(
            range(1, 1 + sum(own == process for own, _ in found))
        )


def test_no_more_workers_than_work() -> None:
    with Pool(slow_pid, 10**20) as pool:
        assert len({future.result() for future in [pool.submit(1)]}) == 1
        assert len(pool._processes) == 1
        assert len({future.result() for future in [pool.submit(number) for number in range(20)]}) <= cpu_count()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_reaches_the_caller(workers: int) -> None:
    with Pool(refuse, workers) as pool:
        with pytest.raises(InputError, match="no 3"):
            pool.submit(3).result()
        with pytest.raises(InputError, match="no 4"):
            list(pool.completed({"a": (4,)}))


def test_what_was_raised_first_is_raised_and_ends_the_others() -> None:
    def wrong() -> None:
        raise InputError("mine")

    began = time.monotonic()
    with Pool(time.sleep, 2) as pool, pytest.raises(InputError, match="mine"):
        pool.together(lambda: pool.together(wrong, lambda: pool.submit(60).result()), lambda: pool.submit(60).result())
    assert time.monotonic() - began < 30


def test_a_killed_worker_is_survived(tmp_path: Path) -> None:
    with Pool(die, 2) as pool:
        jobs = {name: (tmp_path, int(name == "b"), name) for name in "abcd"}
        assert dict(pool.completed(jobs)) == {name: name for name in "abcd"}
    assert len(list(tmp_path.glob("b.*"))) == 2


def test_a_worker_killed_while_idle_is_replaced() -> None:
    with Pool(pid, 2) as pool:
        first = pool.submit().result()
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: not lives(first), GONE_S)
        assert pool.submit().result() != first


def test_a_job_that_kills_its_worker_twice_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with Pool(die, 2) as pool:
        bad, good = pool.submit(tmp_path, 9, "the bad one"), pool.submit(tmp_path, 0, "good")
        with pytest.raises(WorkerError, match=r"the bad one.*2 times"):
            bad.result()
        assert good.result() == "good"


def test_leaving_a_pool_ends_its_workers() -> None:
    with Pool(pid, 2) as pool:
        processes = [pool.submit().result() for _ in range(2)]
    assert not any(map(lives, processes))


SCRIPT = """
import sys, time
from analysis.search.pool import Pool
print("once", flush=True)
with Pool(time.sleep, 2) as pool:  # and no guard of the main module
    jobs = [pool.submit(0.01), pool.submit(0.01)]
    print([job.result() for job in jobs], *(process for one in pool._processes.values() for process in one._processes))
    sys.stdout.flush()
    if "--wait" in sys.argv:
        pool.submit(600).result()
"""


def script(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return subprocess.Popen(
        (sys.executable, str(path), *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    process = script(tmp_path)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == ""
    assert text.count("once") == 1 and "[None, None]" in text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_is_left_when_the_parent_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    process = script(tmp_path, "--wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "once\n"
    workers = [int(word) for word in process.stdout.readline().split("]")[1].split()]
    assert workers and all(map(lives, workers))
    process.send_signal(number)
    process.wait(10)
    assert wait_until(lambda: not any(map(lives, workers)), GONE_S)
    assert "Traceback" not in process.communicate(timeout=10)[1]


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None, True])
def test_a_number_of_workers_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"goodput\.workers=.*use 1 or more"):
        worker_count("goodput.workers", value)


def test_any_whole_number_of_workers_will_do() -> None:
    assert worker_count("workers", 10**20) == 10**20
