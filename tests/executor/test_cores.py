"""Cores of CPU ranks."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain

import pytest

from executor.cores import shares


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "expected"),
    [
        ([0, 1], 2, 1, [[1], [0]]),
        ([0, 1], 4, 1, [[1], [0], [1], [0]]),
        ([2, 5, 7, 9], 2, 2, [[5, 7], [9, 2]]),
        ([0, 1, 2, 3], 2, 1, [[1], [2]]),
        ([0, 1], 3, 1, []),  # one core would serve two ranks, the other one
        ([0, 1, 2, 3], 3, 2, []),
        ([0, 1], 1, 1, []),
        ([0], 2, 2, []),
    ],
)
def test_shares(cores: list[int], ranks: int, threads: int, expected: list[list[int]]) -> None:
    found = shares(cores, ranks, threads, 5)
    assert found == expected
    used = list(chain.from_iterable(found))
    assert len({used.count(core) for core in set(used)}) <= 1


RANK = """
import os, sys, time
import torch.distributed as dist
from pathlib import Path
from executor import cores
before = os.sched_getaffinity(0)
cores.keep_to_cores(1, 2, 1, "team")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.new_group([0])
for _ in range(100):  # a thread names itself a moment after its start, and no peer was waited for here
    found = cores.calm_gloo()
    if found == 2:
        break
    time.sleep(0.05)
classes = [os.sched_getscheduler(int(task.name)) for task in cores.TASKS.iterdir()
           if (task / "comm").read_text().strip() == cores.POLLING]
assert found == len(classes) > 0 and set(classes) == {os.SCHED_IDLE}, (found, classes)
assert os.sched_getscheduler(0) == os.SCHED_OTHER
assert len(os.sched_getaffinity(0)) == (1 if len(before) > 1 else len(before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and priorities of threads are Linux's")
def test_a_rank_keeps_to_its_core_and_gloo_gives_way(tmp_path) -> None:  # type: ignore[no-untyped-def]
    subprocess.run([sys.executable, "-c", RANK, str(tmp_path / "store")], check=True)
