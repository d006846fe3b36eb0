"""The loop of a rank: messages in, reports out, one failure at most."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from executor.collectives import Groups, torch_groups
from executor.config import Device
from executor.errors import PeerLostError
from executor.message import Failure, RankConfig, Ready
from executor.rank import Rank


def serve(line: Connection, config: RankConfig, connect: Callable[[], Groups], device: torch.device) -> bool:
    """Run a rank until the driver ends it; False if it failed (the driver has been told why).

    Raises:
        EOFError, OSError: if the driver is gone.
    """
    number = -1
    try:
        rank = Rank(config, connect(), device)
        line.send(Ready(config.rank, rank.facts()))
        while (message := line.recv()) is not None:
            number = message.number
            line.send(rank.execute(message))
        rank.close()
    except EOFError:
        raise
    except Exception as error:
        line.send(failure(config.rank, number, error))
        return False
    return True


def failure(rank: int, number: int, error: BaseException) -> Failure:
    """What the driver is told about an error."""
    text = (str(error).strip().splitlines() or [""])[0]
    cause = f"{type(error).__name__}: {text}"
    if is_out_of_memory(error):
        cause = f"out of memory ({cause})"
    return Failure(rank, number, cause, "".join(traceback.format_exception(error)), is_lost_peer(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, (PeerLostError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Socket closed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def process_device(settings: Device, local_rank: int) -> torch.device:
    """Device of a rank that is a process; sets it up."""
    if settings.kind == "cpu":
        torch.set_num_threads(settings.torch_threads)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def connect(config: RankConfig, store: Any) -> Groups:
    """Communicators of a rank that is a process, with the ranks that share `store`; a collective call."""
    layout, timeout = config.layout, config.device.collective_timeout_s
    if layout.ranks == 1:
        return Groups()
    dist.init_process_group(
        "gloo" if config.device.kind == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=config.rank,
        world_size=layout.ranks,
        timeout=timedelta(seconds=timeout),
    )
    return torch_groups(layout, config.rank, timeout)
