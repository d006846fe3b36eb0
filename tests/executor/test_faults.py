"""Faults end the call within 30 s, in one line that names the rank and the cause, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from executor_harness import PROCESSES, THREADS, generate, pids, prompts, tiny

from confsim.errors import InputError
from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from confsim.run.request import Request
from confsim.specs import KvConfig
from executor.config import Layout
from executor.errors import RankError
from executor.runtime import Runtime

KV = KvConfig(capacity_tokens=512)
TWO = Layout("xp", 2, 1)
ROOT = Path(__file__).resolve().parents[2]


def whole(request: int, tokens: int, shards: tuple[int, ...] = ()) -> IterationPlan:
    """A plan that prefills one request and is done with it."""
    shards = shards or (tokens // 2, tokens - tokens // 2)
    chunk = PrefillChunk(Request(request, 0.0, tokens), 0, shards, True, -1)
    return IterationPlan((chunk,), tuple(DecodeBatch(group) for group in range(len(shards))))


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test leaves behind is told from what others do at the same time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def clean(seconds: float = 30.0) -> Iterator[None]:
    """Whatever happens inside takes at most `seconds` and leaves no process, folder or shared memory."""
    memory = _shared_memory()
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds
    assert _children() == []
    assert list(Path(tempfile.gettempdir()).glob("confsim-ranks-*")) == []
    assert _shared_memory() == memory


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def _children(pid: int | None = None) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == (pid or os.getpid()) and b"executor.worker" in command:
            found.append(int(path.parent.name))
    return found


def test_rank_killed_between_iterations() -> None:
    with clean(), pytest.raises(RankError) as error, Runtime(tiny(), TWO, PROCESSES, KV) as runtime:
        runtime.add(0, prompts([8])[0])
        runtime.run(whole(0, 8))
        os.kill(pids(runtime)[1], signal.SIGKILL)
        time.sleep(0.2)
        runtime.add(1, prompts([8])[0])
        runtime.run(whole(1, 8))
    assert error.value.rank == 1
    assert "\n" not in str(error.value)
    assert "rank 1 of 2 was killed by SIGKILL in iteration" in str(error.value)


def test_rank_killed_inside_a_collective() -> None:
    """Rank 0 waits in the all-to-all for rank 1, which is stopped, then killed; rank 0 is not the one to blame."""
    with clean(), pytest.raises(RankError) as error, Runtime(tiny(), TWO, PROCESSES, KV) as runtime:
        runtime.add(0, prompts([8])[0])
        os.kill(pids(runtime)[1], signal.SIGSTOP)
        runtime.submit(whole(0, 8))
        time.sleep(0.5)
        os.kill(pids(runtime)[1], signal.SIGKILL)
        runtime.result()
    assert "rank 1 of 2 was killed by SIGKILL in iteration 0" in str(error.value)


def test_exception_in_one_rank() -> None:
    """One rank raises while the other waits for it in a collective."""
    with clean(), pytest.raises(RankError) as error, Runtime(tiny(), TWO, PROCESSES, KV) as runtime:
        runtime.add(0, prompts([8])[0])
        send = runtime._team.send_one
        runtime._team.send_one = lambda rank, message: send(rank, message._replace(released=None) if rank else message)
        runtime.run(whole(0, 8))
    assert str(error.value).startswith("rank 1 of 2 failed in iteration 0: TypeError")
    assert "Traceback" in error.value.details


def test_out_of_memory_at_the_start() -> None:
    with clean(), pytest.raises(RankError, match=r"^rank \d of 2 failed at its start: out of memory") as error:
        Runtime(tiny(), TWO, PROCESSES, KvConfig(capacity_tokens=2**46)).__enter__()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("device", [PROCESSES, THREADS], ids=["processes", "threads"])
def test_unknown_request(device) -> None:  # type: ignore[no-untyped-def]
    with clean(), pytest.raises(RankError) as error, Runtime(tiny(), TWO, device, KV) as runtime:
        runtime.run(whole(77, 8))
    assert "request 77 is unknown" in str(error.value)
    assert re.match(r"rank \d of 2 failed in iteration 0: PlanError", str(error.value))  # all say so at once


def test_pool_too_small_for_a_plan() -> None:
    with clean(), pytest.raises(RankError, match="KV pool is full: request 0 needs"):
        runtime = Runtime(tiny(), TWO, THREADS, KvConfig(capacity_tokens=64))
        with runtime:
            runtime.add(0, np.zeros(500, dtype=int))
            runtime.run(whole(0, 500))


def test_failed_runtime_stays_failed() -> None:
    with clean(), pytest.raises(RankError) as first:
        runtime = Runtime(tiny(), TWO, THREADS, KV)
        with runtime:
            runtime.run(whole(77, 8))
    with pytest.raises(RankError) as second:
        runtime.submit(whole(0, 8))
    assert str(second.value) == str(first.value)
    runtime.close()


def test_plan_out_of_turn() -> None:
    expected = "tokens 3 to 8 are planned, 0 of 8 are computed"
    with pytest.raises(RankError, match=expected), Runtime(tiny(), TWO, THREADS, KV) as runtime:
        runtime.add(0, prompts([8])[0])
        chunk = PrefillChunk(Request(0, 0.0, 8), 3, (3, 2), True, -1)
        runtime.run(IterationPlan((chunk,), ()))


def test_decode_without_kv() -> None:
    expected = "request 5 decodes on group 0 but has no KV there"
    with pytest.raises(RankError, match=expected), Runtime(tiny(), TWO, THREADS, KV) as runtime:
        batch = DecodeBatch(0, 1, 4, {5: Request(5, 0.0, 3)})
        runtime.run(IterationPlan((), (batch, DecodeBatch(1))))


def test_mistakes_of_the_caller() -> None:
    with Runtime(tiny(), TWO, THREADS, KV) as runtime:
        runtime.add(0, prompts([8])[0])
        with pytest.raises(InputError, match="added before"):
            runtime.add(0, [1])
        with pytest.raises(InputError, match="empty prompt"):
            runtime.add(1, [])
        with pytest.raises(InputError, match="outside 0 to 130"):
            runtime.add(1, [131])
        with pytest.raises(InputError, match="layout has 2"):
            runtime.submit(whole(0, 8, (8,)))
        with pytest.raises(InputError, match="without an iteration"):
            runtime.result()
    with pytest.raises(InputError, match="not running"):
        runtime.submit(whole(0, 8))
    with pytest.raises(InputError, match="prefix_cache"):
        Runtime(tiny(), TWO, THREADS, KvConfig(capacity_tokens=64, prefix_cache=True))
    with pytest.raises(InputError, match="page_tokens"):
        from executor.config import Device

        Runtime(tiny(), TWO, Device(page_tokens=24), KV)


def test_four_runtimes_at_once() -> None:
    """E3: each has its own store and no fixed port."""
    requests = prompts([20, 9])
    expected: list[dict[int, list[int]]] = []
    failures: list[BaseException] = []

    def drive() -> None:
        try:
            with Runtime(tiny(), TWO, PROCESSES, KV) as runtime:
                expected.append(generate(runtime, requests, 4, 7).tokens)
        except BaseException as error:
            failures.append(error)

    with clean(60.0):
        threads = [threading.Thread(target=drive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(expected) == 4
    assert all(tokens == expected[0] for tokens in expected)


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from executor_harness import *
from test_faults import whole
runtime = Runtime(tiny(), Layout("xp", 2, 1), PROCESSES, KvConfig(capacity_tokens=512))
with runtime:
    runtime.add(0, prompts([8])[0])
    runtime.run(whole(0, 8))  # everything is imported from here on: extension modules may swallow an interrupt
    print(*pids(runtime), runtime._team._folder, flush=True)
    while True:
        runtime.submit(whole(0, 8)); runtime.result()
        time.sleep(0.05)
"""


def _start_script() -> tuple[subprocess.Popen[str], list[int], Path]:
    code = SCRIPT.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    first, second, folder = process.stdout.readline().split()
    return process, [int(first), int(second)], Path(folder)


def _gone(ranks: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in ranks):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_driver_interrupted_or_killed(name: str) -> None:
    """Ctrl-C, or the driver killed outright: ranks and their folder are gone soon after."""
    process, ranks, folder = _start_script()
    process.send_signal(getattr(signal, name))
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert _gone(ranks, 10.0)
    deadline = time.monotonic() + 10.0
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    if name == "SIGINT":
        assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
        assert "executor.worker" not in errors
