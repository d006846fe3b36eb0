"""Ranks that exist already: torchrun or Slurm started this process as one of them.

Rank 0 drives; it runs its own rank on a second thread and reaches the others through the store of the rendezvous.
Every other rank serves until the driver closes, then its process exits.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from confsim.errors import InputError
from confsim.specs import KvConfig
from executor.collectives import Groups, torch_groups
from executor.config import Device, Layout, ModelConfig
from executor.errors import RankError
from executor.message import Failure, Iteration, RankConfig, Ready, Report
from executor.serve import process_device, serve

DAY = timedelta(days=1)
POLL_S = 0.001


def joined_team(model: ModelConfig, layout: Layout, device: Device, kv: KvConfig) -> JoinedTeam | None:
    """The team of the ranks around this process, or None if it was started alone.

    Raises:
        InputError: if their number is not what the layout needs.
    """
    world = world_of(os.environ)
    if world is None:
        return None
    rank, size, local = world
    if size != layout.ranks:
        raise InputError(
            f"executor.layout has {layout.ranks} ranks but {size} were started: "
            f"start {layout.ranks} (torchrun --nproc-per-node, srun --ntasks) or change the layout"
        )
    return JoinedTeam(RankConfig(rank, model, layout, device, kv, "env://"), local)


class JoinedTeam:
    """The ranks of one launch; made by all of them, driven by rank 0."""

    def __init__(self, config: RankConfig, local_rank: int) -> None:
        self._config = config
        self._local_rank = local_rank
        self._size = config.layout.ranks
        self._inbox: queue.SimpleQueue[Iteration | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Ready | Report | Failure] = queue.SimpleQueue()
        self._number = -1
        self._got: list[Ready | Report] = []
        self._collected = 0

    def start(self) -> list[Ready]:
        """On rank 0: wait until all are ready. On the others: serve, then exit the process."""
        store, _, _ = next(rendezvous("env://", self._config.rank, self._size))
        self._store = PrefixStore("executor", store)
        device = process_device(self._config.device, self._local_rank)
        ranks_store = PrefixStore("ranks", store)

        def connect() -> Groups:
            return self._connect(ranks_store)

        if self._config.rank:
            try:
                good = serve(_StoreLine(self._store, self._config.rank), self._config, connect, device)
            except EOFError:
                good = False
            if not good:
                # A launcher ends all ranks as soon as one does: let the driver say why first.
                _wait_for(self._store, "closed", 10.0)
            sys.stderr.flush()
            os._exit(0 if good else 1)
        line = _LocalLine(self._inbox, self._outbox)
        self._thread = threading.Thread(target=serve, args=(line, self._config, connect, device), daemon=True)
        self._thread.start()
        ready = self._collect("ready")
        return [item for item in ready if isinstance(item, Ready)]

    def send(self, iteration: Iteration) -> None:
        """Give all ranks their next iteration."""
        self._number = iteration.number
        _put(self._store, f"plan/{iteration.number}", iteration)
        self._inbox.put(iteration)

    def receive(self) -> Report:
        """The next report of any rank."""
        if not self._got:
            self._got = self._collect(f"report/{self._collected}")
            self._store.delete_key(f"plan/{self._collected}")
            self._collected += 1
        report = self._got.pop(0)
        assert isinstance(report, Report)
        return report

    def close(self, at_once: bool) -> None:
        """Tell all ranks to end."""
        _put(self._store, "closed", None)
        _put(self._store, f"plan/{self._number + 1}", None)
        self._inbox.put(None)
        if not at_once:
            self._thread.join(timeout=10.0)
            for rank in range(1, self._size):  # the store of rank 0 must outlive their last look
                _wait_for(self._store, f"gone/{rank}", 10.0)

    def _collect(self, key: str) -> list[Ready | Report]:
        """One message of every rank, in rank order."""
        own: Ready | Report | Failure | None = None
        missing = list(range(1, self._size))
        found: dict[int, Ready | Report] = {}
        while own is None or missing:
            if own is None:
                own = _take(self._outbox, POLL_S)
                if isinstance(own, Failure) and not own.lost_peer:
                    self._fail(own)
            self._raise_failure(own)
            if missing and self._store.check([f"{key}/{missing[0]}"]):
                rank = missing.pop(0)
                found[rank] = pickle.loads(self._store.get(f"{key}/{rank}"))
                self._store.delete_key(f"{key}/{rank}")
            elif own is not None:
                time.sleep(POLL_S)
        assert not isinstance(own, Failure)
        return [own, *(found[rank] for rank in range(1, self._size))]

    def _raise_failure(self, own: Ready | Report | Failure | None) -> None:
        if self._store.check(["failure"]):
            self._fail(pickle.loads(self._store.get("failure")))
        if isinstance(own, Failure):
            self._fail(own)

    def _fail(self, failure: Failure) -> None:
        where = "at its start" if self._number < 0 else f"in iteration {self._number}"
        raise RankError(
            f"rank {failure.rank} of {self._size} failed {where}: {failure.cause}",
            failure.rank,
            failure.cause,
            failure.details,
        )

    def _connect(self, store: Any) -> Groups:
        config = self._config
        timeout = config.device.collective_timeout_s
        dist.init_process_group(
            "gloo" if config.device.kind == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=config.rank,
            world_size=self._size,
            timeout=timedelta(seconds=timeout),
        )
        return torch_groups(config.layout, config.rank, timeout)


class _StoreLine:
    """The rendezvous store as the channel of a rank that does not drive."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._next = 0

    def receive(self) -> Iteration | None:
        """Wait for the next message; a driver that is gone ends the rank."""
        try:
            self._store.wait([f"plan/{self._next}"], DAY)
            message: Iteration | None = pickle.loads(self._store.get(f"plan/{self._next}"))
        except dist.DistError as error:
            raise EOFError from error
        if message is None:
            self._store.set(f"gone/{self._rank}", b"")
        self._next += 1
        return message

    def send(self, message: Ready | Report | Failure) -> None:
        """Leave an answer in the store; a root cause goes where the driver looks first."""
        if isinstance(message, Ready):
            _put(self._store, f"ready/{self._rank}", message)
        elif isinstance(message, Report):
            _put(self._store, f"report/{message.number}/{self._rank}", message)
        elif not message.lost_peer:
            _put(self._store, "failure", message)


class _LocalLine:
    """Queues as the channel of the driver's own rank."""

    def __init__(self, inbox: queue.SimpleQueue[Iteration | None], outbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def receive(self) -> Iteration | None:
        """The next message."""
        return self._inbox.get()

    def send(self, message: Ready | Report | Failure) -> None:
        """Answer."""
        self._outbox.put(message)


def world_of(env: Any) -> tuple[int, int, int] | None:
    """Rank, size and local rank of this process among the ranks of its launch, or None."""
    if "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    # A batch script or an interactive shell has no step of several tasks: ranks are spawned there.
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        env.setdefault("MASTER_ADDR", _first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20000 + (int(env["SLURM_JOB_ID"]) * 97 + int(env["SLURM_STEP_ID"])) % 40000))
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"])
    return None


def _first_host(nodes: str) -> str:
    if "[" not in nodes:
        return nodes.split(",")[0]
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return listed.stdout.split()[0]


def _put(store: Any, key: str, message: object) -> None:
    store.set(key, pickle.dumps(message))


def _take(box: queue.SimpleQueue[Any], seconds: float) -> Any:
    try:
        return box.get(timeout=seconds)
    except queue.Empty:
        return None


def _wait_for(store: Any, key: str, seconds: float) -> None:
    """Until a key is there, for so long at most; a store that is gone ends the wait."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and not store.check([key]):
            time.sleep(POLL_S)
    except dist.DistError:
        return
