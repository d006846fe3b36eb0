"""Cores of ranks that are processes on CPU: each keeps to its own, and gloo's polling thread gives way to the rest.

gloo's receiving thread polls while its socket holds data that nobody has asked for yet. Linux lets a running thread
finish its slice of about 3 ms, so where ranks fill the cores it holds up the very thread that would ask: without this,
one exchange of 0.1 ms in ten took 3 to 5 ms on two cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

TASKS = Path("/proc/self/task")
POLLING = "gloo_tcp_loop"


def keep_to_cores(rank: int, ranks: int, threads: int, team: str) -> None:
    """Bind this thread, and those it will start, to the cores of a rank; where they cannot be shared out evenly, not.

    Linux only. `team` names the ranks that belong together: teams begin at different cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = shares(sorted(os.sched_getaffinity(0)), ranks, threads, crc32(team.encode()))
    if cores:
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, cores[rank])


def shares(cores: Sequence[int], ranks: int, threads: int, first: int) -> list[list[int]]:
    """The cores of each rank, `threads` of them from number `first` on; empty where some would serve more than others.

    One rank alone is left to the scheduler.
    """
    wanted = ranks * threads
    if ranks < 2 or threads > len(cores) or (wanted > len(cores) and wanted % len(cores)):
        return []
    return [[cores[(first + rank * threads + index) % len(cores)] for index in range(threads)] for rank in range(ranks)]


def calm_gloo() -> int:
    """Let gloo's polling threads of this process run only where no other thread would; how many there are.

    What wakes up preempts a thread of the idle class at once, which low priority alone does not grant.
    """
    found = 0
    with suppress(OSError):  # no /proc, thus no Linux, or a thread that has ended
        for task in TASKS.iterdir():
            if (task / "comm").read_text().strip() == POLLING:
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
                found += 1
    return found
