"""The driver's side: starting ranks, talking to them, and noticing when one fails."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

import torch

from confsim.specs import KvConfig
from executor.collectives import Meeting, thread_groups, thread_meetings
from executor.config import Device, Layout, ModelConfig
from executor.errors import RankError
from executor.message import Failure, Iteration, RankConfig, Ready, Report
from executor.serve import name_signal, serve

GRACE_S = 2.0  # how long to listen for the root cause once a rank has failed


class Team(Protocol):
    """All ranks, as their driver sees them."""

    def start(self) -> list[Ready]:
        """Start the ranks and wait until all are ready."""

    def send(self, iteration: Iteration) -> None:
        """Give all ranks their next iteration."""

    def receive(self) -> Report:
        """The next report of any rank; raises RankError as soon as one has failed."""

    def close(self, at_once: bool) -> None:
        """End the ranks; `at_once` does not wait for work in progress."""


class ProcessTeam:
    """Ranks as processes of this machine, each on a socket of its own, with a private file store."""

    def __init__(self, configs: list[RankConfig], folder: str, timeout_s: float) -> None:
        self._configs = configs
        self._folder = Path(folder)
        self._timeout_s = timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        self._sent = -1

    def start(self) -> list[Ready]:
        """Start the ranks and wait until all are ready."""
        for config in self._configs:
            self._launch(config)
        deadline = time.monotonic() + self._timeout_s
        ready: dict[int, Ready] = {}
        while len(ready) < len(self._configs):
            message = self._next(deadline)
            if isinstance(message, Ready):
                ready[message.rank] = message
        return [ready[rank] for rank in sorted(ready)]

    def send(self, iteration: Iteration) -> None:
        """Give all ranks their next iteration."""
        self._sent = iteration.number
        for rank in range(len(self._lines)):
            self.send_one(rank, iteration)

    def send_one(self, rank: int, message: object) -> None:
        """Give one rank a message."""
        try:
            self._lines[rank].send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._diagnose(rank, None)

    def receive(self) -> Report:
        """The next report of any rank."""
        message = self._next(None)
        assert isinstance(message, Report)
        return message

    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def close(self, at_once: bool) -> None:
        """End the ranks and wait for them, and remove the folder."""
        if not at_once:
            for line in self._lines:
                try:
                    line.send(None)
                except OSError:
                    continue
            self._await_exit(10.0)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for line in self._lines:
            line.close()
        shutil.rmtree(self._folder, ignore_errors=True)

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
        line = Connection(ours.detach())
        self._lines.append(line)
        try:
            line.send(config)
        except (BrokenPipeError, ConnectionResetError):
            self._diagnose(config.rank, None)

    def _next(self, deadline: float | None) -> Ready | Report:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(self._lines, remaining)
        if not ready:
            raise RankError(f"ranks were not ready within {self._timeout_s:.0f} s", -1, "timeout")
        line = ready[0]
        assert isinstance(line, Connection)
        rank = self._lines.index(line)
        message = _receive(line)
        if message is None or isinstance(message, Failure):
            self._diagnose(rank, message)
        assert isinstance(message, (Ready, Report))
        return message

    def _diagnose(self, rank: int, message: Failure | None) -> None:
        """Listen for what others say, then raise the root cause."""
        found = {rank: message}
        deadline = time.monotonic() + GRACE_S
        while len(found) < len(self._lines) and not _is_root(list(found.values())):
            open_lines = [line for index, line in enumerate(self._lines) if index not in found]
            ready = wait(open_lines, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for line in ready:
                assert isinstance(line, Connection)
                heard = _receive(line)
                if heard is None or isinstance(heard, Failure):
                    found[self._lines.index(line)] = heard
        raise self._error(found)

    def _error(self, found: dict[int, Failure | None]) -> RankError:
        def blame(item: tuple[int, Failure | None]) -> tuple[int, int]:
            rank, failure = item
            return (0 if failure is None else 2 if failure.lost_peer else 1), rank

        rank, failure = min(found.items(), key=blame)
        where = "at its start" if self._sent < 0 else f"in iteration {self._sent}"
        if failure is not None:
            cause = failure.cause
            return RankError(f"rank {rank} of {len(self._lines)} failed {where}: {cause}", rank, cause, failure.details)
        cause = self._obituary(rank)
        log = (self._folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]
        return RankError(f"rank {rank} of {len(self._lines)} {cause} {where}", rank, cause, log)

    def _obituary(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its line"
        return f"was killed by {name_signal(code)}" if code < 0 else f"exited with code {code}"

    def _await_exit(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return


class ThreadTeam:
    """Ranks as threads of this process, on one device: what one GPU can do, and quick on CPU."""

    def __init__(self, configs: list[RankConfig]) -> None:
        self._configs = configs
        self._inboxes: list[queue.SimpleQueue[Iteration | None]] = [queue.SimpleQueue() for _ in configs]
        self._outbox: queue.SimpleQueue[Ready | Report | Failure] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._meetings: dict[str, list[Meeting]] = {}
        self._former_threads = 0
        self._sent = -1

    def start(self) -> list[Ready]:
        """Start the ranks and wait until all are ready."""
        first = self._configs[0]
        if first.device.kind == "cpu":
            self._former_threads = torch.get_num_threads()
            torch.set_num_threads(first.device.torch_threads)  # of the whole process, until close
        self._meetings = thread_meetings(first.layout, first.device.collective_timeout_s)
        for config in self._configs:
            thread = threading.Thread(target=self._run, args=(config,), name=f"rank{config.rank}", daemon=True)
            self._threads.append(thread)
            thread.start()
        ready = [self._next() for _ in self._configs]
        return sorted((item for item in ready if isinstance(item, Ready)), key=lambda item: item.rank)

    def send(self, iteration: Iteration) -> None:
        """Give all ranks their next iteration."""
        self._sent = iteration.number
        for inbox in self._inboxes:
            inbox.put(iteration)

    def receive(self) -> Report:
        """The next report of any rank."""
        message = self._next()
        assert isinstance(message, Report)
        return message

    def close(self, at_once: bool) -> None:
        """End the threads."""
        if at_once:
            self._break_up()
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(timeout=30.0)
        if self._former_threads:
            torch.set_num_threads(self._former_threads)

    def _run(self, config: RankConfig) -> None:
        device = torch.device(config.device.kind)
        line = _Boxes(self._inboxes[config.rank], self._outbox)
        if not serve(line, config, lambda: thread_groups(config.layout, config.rank, self._meetings), device):
            self._break_up()

    def _break_up(self) -> None:
        for meetings in self._meetings.values():
            for meeting in meetings:
                meeting.break_up()

    def _next(self) -> Ready | Report:
        message = self._outbox.get()
        if not isinstance(message, Failure):
            return message
        failures = [message]
        deadline = time.monotonic() + GRACE_S
        while not _is_root(list(failures)) and time.monotonic() < deadline:
            try:
                heard = self._outbox.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(heard, Failure):
                failures.append(heard)
        failure = min(failures, key=lambda item: (item.lost_peer, item.rank))
        where = "at its start" if self._sent < 0 else f"in iteration {self._sent}"
        raise RankError(
            f"rank {failure.rank} of {len(self._configs)} failed {where}: {failure.cause}",
            failure.rank,
            failure.cause,
            failure.details,
        )


class _Boxes:
    """Two queues as a rank's channel."""

    def __init__(
        self, inbox: queue.SimpleQueue[Iteration | None], outbox: queue.SimpleQueue[Ready | Report | Failure]
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def receive(self) -> Iteration | None:
        """The next message."""
        return self._inbox.get()

    def send(self, message: Ready | Report | Failure) -> None:
        """Answer."""
        self._outbox.put(message)


def make_team(model: ModelConfig, layout: Layout, device: Device, kv: KvConfig) -> Team:
    """The ranks that a device configuration asks for."""
    if device.launcher == "auto":
        from executor.joined import joined_team

        team = joined_team(model, layout, device, kv)
        if team is not None:
            return team
    if device.launcher == "threads":
        return ThreadTeam([RankConfig(rank, model, layout, device, kv, "") for rank in range(layout.ranks)])
    folder = tempfile.mkdtemp(prefix="confsim-ranks-")
    store = str(Path(folder) / "store")
    configs = [RankConfig(rank, model, layout, device, kv, store) for rank in range(layout.ranks)]
    return ProcessTeam(configs, folder, device.start_timeout_s)


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


def _receive(line: Connection) -> object | None:
    try:
        message: object = line.recv()
        return message
    except (EOFError, OSError):  # closed, or closed in the middle of a message
        return None


def _is_root(found: list[Failure | None]) -> bool:
    return any(item is None or not item.lost_peer for item in found)
