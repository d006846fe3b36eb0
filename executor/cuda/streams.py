"""The attention paths on two CUDA streams, with an event at every hand-over, and time by events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from executor.clock import STAGES, Spent, StageClock
from executor.config import Device
from executor.cuda.green_context import Partition, PartitionError, partition
from executor.fork import Fork, Path, Sms


@dataclass(frozen=True)
class StreamApi:
    """The calls of torch.cuda that are needed here."""

    stream: Callable[[Any], Any]  # context manager
    current_stream: Callable[[], Any]
    event: Callable[[], Any]


def cuda_api() -> StreamApi:
    """The real ones; events measure time."""
    return StreamApi(torch.cuda.stream, torch.cuda.current_stream, lambda: torch.cuda.Event(enable_timing=True))


class StreamFork(Fork):
    """Each path on a stream of its own: both wait for the caller's stream, which waits for both.

    Memory that one stream allocates and another reads is safe without `record_stream`: a path starts only after the
    caller's stream has passed everything that read the path's former results.
    """

    def __init__(
        self,
        prefill: Any,
        decode: Any,
        api: StreamApi,
        name: str,
        facts: dict[str, object],
        sms: tuple[Sms, Sms] = (None, None),
    ) -> None:
        super().__init__(facts)
        self.prefill_stream = prefill
        self.decode_stream = decode
        self.name = name
        self.prefill_sms, self.decode_sms = sms
        self._api = api

    def run(self, prefill: Path, decode: Path) -> None:
        """Enqueue both paths (decode first: it is short to launch) and their join."""
        api = self._api
        caller = api.current_stream()
        start = api.event()
        start.record(caller)
        ends = []
        paths = (self.decode_stream, decode, self.decode_sms), (self.prefill_stream, prefill, self.prefill_sms)
        for stream, path, sms in paths:
            stream.wait_event(start)
            with api.stream(stream):
                path(sms)
                end = api.event()
                end.record(stream)
                ends.append(end)
        for end in ends:
            caller.wait_event(end)


class EventClock(StageClock):
    """Time between events on the stream that a stage was launched on; read once the iteration is over."""

    def __init__(self, api: StreamApi) -> None:
        super().__init__()
        self._api = api
        self._marks: list[tuple[str, Any, Any]] = []
        self._begin: Any = None
        self._host = 0.0

    def start(self) -> None:
        """Begin an iteration."""
        self._marks = []
        self._host = time.perf_counter()
        self._begin = self._record()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is launched inside under `name`."""
        begin = self._record()
        try:
            yield
        finally:
            self._marks.append((name, begin, self._record()))

    def stop(self) -> Spent:
        """Wait for the device; launching is the host's time until here."""
        launch = time.perf_counter() - self._host
        end = self._record()
        end.synchronize()
        duration = self._begin.elapsed_time(end) / 1e3
        spent = dict.fromkeys(STAGES, 0.0)
        for name, begin, after in self._marks:
            spent[name] += begin.elapsed_time(after) / 1e3
        prefill = spent["prefill_attention"] + spent["communication"] + spent["transfer"]
        busy = spent["linear"] + spent["head"] + max(prefill, spent["decode_attention"])
        return Spent(duration, spent, launch, min(1.0, busy / duration) if duration else 0.0)

    def _record(self) -> Any:
        event = self._api.event()
        event.record(self._api.current_stream())
        return event


def partition_fork(found: Partition, api: StreamApi) -> StreamFork:
    """Paths on the parts of a partition, which are told what the driver granted them."""
    streams = found.prefill_stream, found.decode_stream
    return StreamFork(*streams, api, "partition", found.facts, (found.prefill_sms, found.decode_sms))


def make_clock_and_fork(settings: Device, device: torch.device) -> tuple[StageClock, Fork]:
    """Clock and fork of a rank on a GPU; two plain streams where no partition can be had, and the facts say why."""
    api = cuda_api()
    clock = EventClock(api)
    if settings.overlap == "turn":
        return clock, Fork()
    reason = "not asked for"
    if settings.overlap == "partition":
        try:
            found = partition(device.index or 0, settings.decode_sms)
            return clock, partition_fork(found, api)
        except PartitionError as error:
            reason = str(error)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return clock, StreamFork(*streams, api, "streams", {"no_partition": reason})
