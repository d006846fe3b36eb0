"""Ranks that exist already: torchrun or Slurm started this process as one of them.

Rank 0 drives, and runs its own rank on a second thread; every other rank connects to it, serves until the driver
closes, and then its process exits. They find each other through the rendezvous of the launcher.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from confsim.errors import InputError
from confsim.specs import KvConfig
from executor.config import Device, Layout, ModelConfig
from executor.message import RankConfig
from executor.serve import connect, process_device, serve
from executor.team import Team

LEAVE_S = 10.0  # for the others to end after the driver has


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
    return JoinedTeam(RankConfig(rank, model, layout, device, kv, ""), local)


class JoinedTeam(Team):
    """The ranks of one launch; made by all of them, driven by rank 0."""

    def __init__(self, config: RankConfig, local_rank: int) -> None:
        super().__init__(config.layout.ranks, config.device.start_timeout_s)
        self._config = config
        self._local_rank = local_rank

    def _open(self) -> None:
        """On rank 0: find the others. On the others: serve, then exit the process."""
        config = self._config
        store, _, _ = next(rendezvous("env://", config.rank, self._size))
        ranks = PrefixStore("ranks", store)
        device = process_device(config.device, self._local_rank)
        if config.rank:
            self._serve_and_exit(_call(store), ranks, device)
        own, theirs = Pipe()
        self._thread = threading.Thread(target=self._serve, args=(theirs, ranks, device), daemon=True)
        self._thread.start()
        self.lines = [own, *self._accept(store)]

    def _serve_and_exit(self, line: Connection, ranks: Any, device: Any) -> None:
        line.send(self._config.rank)
        good = self._serve(line, ranks, device)
        if not good:
            wait([line], LEAVE_S)  # a launcher ends all ranks as soon as one does: let the driver say why first
        sys.stderr.flush()
        os._exit(0 if good else 1)

    def _serve(self, line: Connection, ranks: Any, device: Any) -> bool:
        try:
            return serve(line, self._config, lambda: connect(self._config, ranks), device)
        except (EOFError, OSError):  # the driver is gone, or closed at once
            return False

    def _accept(self, store: Any) -> list[Connection]:
        """Lines of the other ranks, in order; only who knows the secret in the store is listened to."""
        secret = secrets.token_bytes(32)
        found: dict[int, Connection] = {}
        with socket.create_server(("", 0), backlog=self._size) as server:
            server.settimeout(self._timeout_s)
            store.set("executor", pickle.dumps((server.getsockname()[1], secret)))
            while len(found) < self._size - 1:
                caller, _ = server.accept()
                caller.setblocking(True)
                line = Connection(caller.detach())
                try:
                    if line.poll(LEAVE_S) and secrets.compare_digest(line.recv_bytes(64), secret):
                        found[line.recv()] = line
                        continue
                except (EOFError, OSError):
                    pass
                line.close()
        return [found[rank] for rank in sorted(found)]

    def _end(self, at_once: bool) -> None:
        if at_once:
            return
        self._thread.join(timeout=LEAVE_S)
        waiting = self.lines[1:]
        while waiting and (ended := wait(waiting, LEAVE_S)):  # the store of rank 0 outlives the others
            waiting = [line for line in waiting if line not in ended]


def _call(store: Any) -> Connection:
    """The line to rank 0."""
    port, secret = pickle.loads(store.get("executor"))
    line = Connection(socket.create_connection((os.environ["MASTER_ADDR"], port)).detach())
    line.send_bytes(secret)
    return line


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
