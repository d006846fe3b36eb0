"""Collectives between ranks, counted in bytes: over torch.distributed, or between threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from executor.config import Layout
from executor.cores import calm_gloo
from executor.errors import PeerLostError

Wait = Callable[[], None]


class Group:
    """Ranks that communicate, in a fixed order, all making the same calls in the same order. Here: one alone."""

    size = 1
    index = 0

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        """Row `sizes` of `data` go to the members in order; `out_sizes` rows come from them."""
        out.copy_(data)

    def start_all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> Wait:
        """The same, beside other work where that can be: `out` is complete once the returned call is made."""
        self.all_to_all(out, data, out_sizes, sizes)
        return lambda: None

    def all_reduce(self, data: torch.Tensor) -> None:
        """Sum in place."""

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The members' tensors, all shaped alike."""
        return [data]


@dataclass
class Groups:
    """The communicators of one rank: exchange and KV transfer over groups, TP inside one (a second one for mux)."""

    exchange: Group = field(default_factory=Group)
    transfer: Group = field(default_factory=Group)
    tensor: Group = field(default_factory=Group)
    tensor_second: Group = field(default_factory=Group)
    counts: Counter[str] = field(default_factory=Counter)  # bytes of buffers since it was last cleared, by use
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, use: str, data: torch.Tensor) -> None:
        """Add the bytes of a buffer; both paths may do so at once."""
        with self._lock:
            self.counts[use] += data.numel() * data.element_size()


class TorchGroup(Group):
    """A group of processes (gloo or nccl)."""

    def __init__(self, ranks: Sequence[int], rank: int, handle: Any) -> None:
        self.size = len(ranks)
        self.index = list(ranks).index(rank)
        self._handle = handle

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        """One call with split sizes: the list form refuses uneven sizes on gloo."""
        dist.all_to_all_single(out, data, out_sizes, sizes, group=self._handle)

    def start_all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> Wait:
        """Asynchronous."""
        work = dist.all_to_all_single(out, data, out_sizes, sizes, group=self._handle, async_op=True)
        return _Pending(work, data)

    def all_reduce(self, data: torch.Tensor) -> None:
        """Sum in place."""
        dist.all_reduce(data, group=self._handle)

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The members' tensors."""
        parts = [torch.empty_like(data) for _ in range(self.size)]
        dist.all_gather(parts, data, group=self._handle)
        return parts


@dataclass
class _Pending:
    work: Any
    data: torch.Tensor  # kept until it is sent

    def __call__(self) -> None:
        self.work.wait()


class Meeting:
    """Where threads of one group lay down tensors for each other.

    A member that fails calls `break_up`, which fails the others too.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.board: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)

    def exchange(self, index: int, item: Any) -> list[Any]:
        """Everybody's item; items stay untouched until all members `leave`."""
        self.board[index] = item
        self._wait()
        return list(self.board)

    def leave(self) -> None:
        """Wait until all have read what they need."""
        self._wait()

    def break_up(self) -> None:
        """Fail all members, now and later."""
        self.barrier.abort()

    def _wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerLostError("another rank left a collective") from error


class ThreadGroup(Group):
    """A group of threads that share memory (and, on CUDA, one device)."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.size = meeting.size
        self.index = index
        self._meeting = meeting

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        """Each member copies its part from the others' buffers."""
        _settle(data)
        parts = self._meeting.exchange(self.index, torch.split(data, sizes))
        start = 0
        for rows, part in zip(out_sizes, parts, strict=True):
            out[start : start + rows] = part[self.index]
            start += rows
        _settle(data)
        self._meeting.leave()

    def all_reduce(self, data: torch.Tensor) -> None:
        """Sum in member order, so that all get the same bits."""
        total = sum(self.all_gather(data))
        assert isinstance(total, torch.Tensor)
        data.copy_(total)

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the members' tensors."""
        _settle(data)
        parts = [part.clone() for part in self._meeting.exchange(self.index, data)]
        _settle(data)
        self._meeting.leave()
        return parts


def _settle(data: torch.Tensor) -> None:
    if data.is_cuda:  # other threads read this memory from their own streams
        torch.cuda.current_stream(data.device).synchronize()


def memberships(layout: Layout) -> dict[str, list[list[int]]]:
    """The rank lists of every communicator, by role, in the one order in which all ranks make them."""
    across = [[group * layout.tp + tp for group in range(layout.groups)] for tp in range(layout.tp)]
    inside = [[group * layout.tp + tp for tp in range(layout.tp)] for group in range(layout.groups)]
    roles = {"exchange": across, "transfer": across, "tensor": inside}
    if layout.rules.two_passes:
        roles["tensor_second"] = inside
    return roles


def torch_groups(layout: Layout, rank: int, timeout_s: float) -> Groups:
    """Communicators of a process whose default process group is up; a collective call."""
    found: dict[str, Group] = {}
    for role, lists in memberships(layout).items():
        for ranks in lists:
            handle = None
            if len(ranks) > 1:
                handle = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if rank in ranks:
                found[role] = TorchGroup(ranks, rank, handle) if handle is not None else Group()
    calm_gloo()
    return _assemble(found)


def thread_meetings(layout: Layout, timeout_s: float) -> dict[str, list[Meeting]]:
    """Meeting places for ranks that are threads, made once for all of them."""
    return {role: [Meeting(len(r), timeout_s) for r in lists] for role, lists in memberships(layout).items()}


def thread_groups(layout: Layout, rank: int, meetings: dict[str, list[Meeting]]) -> Groups:
    """Communicators of a rank that is a thread."""
    found: dict[str, Group] = {}
    for role, lists in memberships(layout).items():
        for ranks, meeting in zip(lists, meetings[role], strict=True):
            if rank in ranks:
                found[role] = ThreadGroup(meeting, ranks.index(rank)) if len(ranks) > 1 else Group()
    return _assemble(found)


def _assemble(found: dict[str, Group]) -> Groups:
    return Groups(found["exchange"], found["transfer"], found["tensor"], found.get("tensor_second", found["tensor"]))
