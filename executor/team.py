"""The driver's side: starting ranks, talking to them, and noticing when one fails.

Whatever a rank is (a process, a thread, a process that somebody else started), it is at the other end of a line.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import torch

from executor.collectives import Meeting, thread_groups, thread_meetings
from executor.config import Device
from executor.errors import RankError
from executor.message import Failure, Iteration, RankConfig, Ready, Report
from executor.serve import serve

GRACE_S = 2.0  # how long to listen for the root cause once a rank has failed


class Team(ABC):
    """All ranks, as their driver sees them; `lines[rank]` leads to each."""

    def __init__(self, size: int, start_timeout_s: float) -> None:
        self.lines: list[Connection] = []
        self._size = size
        self._timeout_s = start_timeout_s
        self._sent = -1

    def start(self) -> list[Ready]:
        """Start the ranks and wait until all are ready.

        Raises:
            RankError: if one fails, or they are not ready in time.
        """
        self._open()
        deadline = time.monotonic() + self._timeout_s
        ready: dict[int, Ready] = {}
        while len(ready) < self._size:
            message = self._next(deadline)
            assert isinstance(message, Ready)
            ready[message.rank] = message
        return [ready[rank] for rank in sorted(ready)]

    def send(self, iteration: Iteration) -> None:
        """Give all ranks their next iteration."""
        self._sent = iteration.number
        for rank in range(self._size):
            self.send_one(rank, iteration)

    def send_one(self, rank: int, message: object) -> None:
        """Give one rank a message."""
        try:
            self.lines[rank].send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._diagnose(rank, None)

    def receive(self) -> Report:
        """The next report of any rank; raises RankError as soon as one has failed."""
        message = self._next(None)
        assert isinstance(message, Report)
        return message

    def close(self, at_once: bool) -> None:
        """End the ranks; `at_once` does not wait for work in progress."""
        if not at_once:
            for line in self.lines:
                try:
                    line.send(None)
                except OSError:
                    continue
        self._end(at_once)
        for line in self.lines:
            line.close()

    @abstractmethod
    def _open(self) -> None:
        """Start the ranks, or find them, and the lines to them."""

    @abstractmethod
    def _end(self, at_once: bool) -> None:
        """See the ranks off; unless `at_once` they have been told."""

    def _obituary(self, rank: int) -> tuple[str, str]:
        """What became of a rank whose line is closed, and details."""
        return "closed its line", ""

    def _next(self, deadline: float | None) -> Ready | Report:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(self.lines, remaining)
        if not ready:
            raise RankError(f"ranks were not ready within {self._timeout_s:.0f} s", -1, "timeout")
        rank = self.lines.index(ready[0])  # type: ignore[arg-type]
        message = _heard(self.lines[rank])
        if not isinstance(message, (Ready, Report)):
            self._diagnose(rank, message)
        assert isinstance(message, (Ready, Report))
        return message

    def _diagnose(self, rank: int, message: Failure | None) -> None:
        """Listen for what others say, then raise the root cause."""
        found = {rank: message}
        deadline = time.monotonic() + GRACE_S
        while len(found) < self._size and all(item is not None and item.lost_peer for item in found.values()):
            waiting = {line: index for index, line in enumerate(self.lines) if index not in found}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for line in ready:
                heard = _heard(line)  # type: ignore[arg-type]
                if heard is None or isinstance(heard, Failure):
                    found[waiting[line]] = heard  # type: ignore[index]
        raise self._error(found)

    def _error(self, found: dict[int, Failure | None]) -> RankError:
        """A rank that is gone comes before an exception, an exception before a broken connection."""

        def blame(item: tuple[int, Failure | None]) -> tuple[int, int]:
            return (0 if item[1] is None else 2 if item[1].lost_peer else 1), item[0]

        rank, failure = min(found.items(), key=blame)
        who = f"rank {rank} of {self._size}"
        where = "at its start" if self._sent < 0 else f"in iteration {self._sent}"
        if failure is None:
            cause, details = self._obituary(rank)
            return RankError(f"{who} {cause} {where}", rank, cause, details)
        return RankError(f"{who} failed {where}: {failure.cause}", rank, failure.cause, failure.details)


class ProcessTeam(Team):
    """Ranks as processes of this machine, each on a socket of its own, with a private file store."""

    def __init__(self, configs: list[RankConfig], folder: str, timeout_s: float) -> None:
        super().__init__(len(configs), timeout_s)
        self._configs = configs
        self._folder = Path(folder)
        self._processes: list[subprocess.Popen[bytes]] = []

    def _open(self) -> None:
        for config in self._configs:
            self._launch(config)
        for config in self._configs:
            self.send_one(config.rank, config)

    def _launch(self, config: RankConfig) -> None:
        ours, theirs = socket.socketpair()
        log = (self._folder / f"rank{config.rank}.log").open("wb")
        with theirs, log:
            process = subprocess.Popen(
                [sys.executable, "-m", "executor.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=_environment(config.device),
                start_new_session=True,  # a Ctrl-C of the terminal reaches the driver alone, which ends the ranks
            )
        self._processes.append(process)
        self.lines.append(Connection(ours.detach()))

    def _end(self, at_once: bool) -> None:
        deadline = time.monotonic() + (0.0 if at_once else 10.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _obituary(self, rank: int) -> tuple[str, str]:
        log = (self._folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]
        try:
            code = self._processes[rank].wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its line", log
        return f"was killed by {name_signal(code)}" if code < 0 else f"exited with code {code}", log


class ThreadTeam(Team):
    """Ranks as threads of this process, on one device: what one GPU can do, and quick on CPU."""

    def __init__(self, configs: list[RankConfig]) -> None:
        super().__init__(len(configs), configs[0].device.start_timeout_s)
        self._configs = configs
        self._threads: list[threading.Thread] = []
        self._meetings: dict[str, list[Meeting]] = {}
        self._former_threads = 0

    def _open(self) -> None:
        first = self._configs[0]
        if first.device.kind == "cpu":
            self._former_threads = torch.get_num_threads()
            torch.set_num_threads(first.device.torch_threads)  # of the whole process, until close
        self._meetings = thread_meetings(first.layout, first.device.collective_timeout_s)
        for config in self._configs:
            ours, theirs = Pipe()
            self.lines.append(ours)
            thread = threading.Thread(target=self._run, args=(config, theirs), name=f"rank{config.rank}", daemon=True)
            self._threads.append(thread)
            thread.start()
            # One after another: CUDA captures one graph at a time in a process, and nothing else may run meanwhile.
            wait([ours], self._timeout_s)

    def _end(self, at_once: bool) -> None:
        if at_once:
            self._break_up()
            for line in self.lines:
                line.close()
        for thread in self._threads:
            thread.join(timeout=30.0)
        if self._former_threads:
            torch.set_num_threads(self._former_threads)

    def _run(self, config: RankConfig, line: Connection) -> None:
        device = torch.device(config.device.kind)
        try:
            good = serve(line, config, lambda: thread_groups(config.layout, config.rank, self._meetings), device)
        except (EOFError, OSError):  # closed at once
            good = False
        if not good:
            self._break_up()

    def _break_up(self) -> None:
        for meetings in self._meetings.values():
            for meeting in meetings:
                meeting.break_up()


def name_signal(code: int) -> str:
    """Name of the signal behind a negative exit code."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _environment(device: Device) -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names need not resolve for ranks of one machine
    if device.kind == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(device.torch_threads))
    return env


def _heard(line: Connection) -> Ready | Report | Failure | None:
    """The next message of a rank; None where its line is closed, or was in the middle of a message."""
    try:
        message: Ready | Report | Failure | None = line.recv()
        return message
    except (EOFError, OSError):
        return None
