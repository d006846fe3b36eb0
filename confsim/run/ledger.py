"""The engine's book of requests: what was injected, what became of it, and when a probe's verdict is certain."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import simpy

from confsim.outcome.slo import TOLERANCE, Slo
from confsim.run.loop import DecodeLoop
from confsim.run.record import Track
from confsim.run.request import Request, RequestState, Slice


class Oracle:
    """Output lengths; only the engine asks, to reject and to end a request."""

    def __init__(self, output_tokens: list[int]) -> None:
        self._output = output_tokens

    def output_tokens(self, request: Request) -> int:
        """Tokens that the request emits in all."""
        return self._output[request.id]

    def left(self, request: Request) -> int:
        """Tokens that it has not emitted yet."""
        return self._output[request.id] - request.emitted


class Watch:
    """Counts verdicts as they become certain and triggers `certain` once the attainment's side is fixed.

    Only requests that arrive inside the window count; `total` is their number.
    """

    def __init__(self, env: simpy.Environment, slo: Slo, total: int, window_s: tuple[float, float]) -> None:
        self.certain = env.event()
        self.slo = slo
        self.total = total
        self.window_s = window_s
        self.attained = 0
        self.missed = 0
        self._misses: set[int] = set()
        self._waiting: list[tuple[float, int, Request]] = []  # by TTFT deadline

    def counts(self, request: Request) -> bool:
        """Whether a request is inside the window."""
        return self.window_s[0] <= request.arrival_s <= self.window_s[1]

    def arrived(self, request: Request) -> None:
        """Wait for its first token; those whose deadline has passed have missed."""
        while self._waiting and self._waiting[0][0] < request.arrival_s:
            _, _, late = heappop(self._waiting)
            if late.first_token_s < 0:
                self.miss(late)
        heappush(self._waiting, (request.arrival_s + request.ttft_limit_s * TOLERANCE, request.id, request))

    def first_token(self, request: Request) -> None:
        """TTFT is known."""
        if request.first_token_s - request.arrival_s > request.ttft_limit_s * TOLERANCE:
            self.miss(request)

    def miss(self, request: Request) -> None:
        """A request has missed, whatever follows."""
        if request.id in self._misses or not self.counts(request):
            return
        self._misses.add(request.id)
        self.missed += 1
        self._settle()

    def ended(self, request: Request, token_s: npt.NDArray[np.float64]) -> None:
        """All token times are known."""
        if request.id in self._misses or not self.counts(request):
            return
        if self.slo.attains(request.arrival_s, request.prompt_tokens, token_s):
            self.attained += 1
            self._settle()
        else:
            self.miss(request)

    def bounds(self) -> tuple[float, float]:
        """Attainment at least and at most."""
        if self.total == 0:
            return 0.0, 0.0
        return self.attained / self.total, (self.total - self.missed) / self.total

    def _settle(self) -> None:
        low, high = self.bounds()
        decided = low >= self.slo.attainment or high < self.slo.attainment
        if decided and not self.certain.triggered:
            self.certain.succeed()


class Ledger:
    """Requests, their token times and their ends; `injected = completed + rejected + unfinished` at any time."""

    def __init__(self, oracle: Oracle, watch: Watch | None = None) -> None:
        self.oracle = oracle
        self.watch = watch
        self.requests: list[Request] = []
        self.timelines: list[array[float]] = []
        self.loops: list[DecodeLoop] = []
        self.tracks: list[Track] = []
        self.schedule_pass_s: array[float] = array("d")
        self.completed = 0
        self.rejected = 0
        self.preemptions = 0
        self.expected = -1  # requests in the load
        self.drained: simpy.Event | None = None  # triggered when all of them have ended
        self.on_end: list[Callable[[Request, float], None]] = []

    @property
    def injected(self) -> int:
        """Requests that have arrived."""
        return len(self.requests)

    def new_timeline(self) -> tuple[int, array[float]]:
        """A timeline and its index."""
        self.timelines.append(array("d"))
        return len(self.timelines) - 1, self.timelines[-1]

    def new_loop(self, groups: int, block_tokens: int) -> DecodeLoop:
        """A decode loop on a timeline of its own."""
        self.loops.append(DecodeLoop(*self.new_timeline(), groups, block_tokens))
        return self.loops[-1]

    def new_track(self, name: str, instance: int) -> Track:
        """A track of iterations."""
        self.tracks.append(Track(name, instance))
        return self.tracks[-1]

    def inject(self, request: Request) -> None:
        """A request arrives."""
        self.requests.append(request)
        if self.watch is not None:
            self.watch.arrived(request)

    def emit(self, request: Request, time_s: float) -> None:
        """The token of a prompt's last chunk is out."""
        request.slices.append(time_s)
        request.emitted += 1
        request.prefill_done_s = time_s
        if request.first_token_s < 0:
            request.first_token_s = time_s
            if self.watch is not None:
                self.watch.first_token(request)

    def complete(self, request: Request, time_s: float) -> None:
        """Its last token is out."""
        request.move_to(RequestState.COMPLETED)
        self.completed += 1
        if self.watch is not None:
            self.watch.ended(request, self.token_times(request))
        self._ended(request, time_s)

    def reject(self, request: Request, reason: str, time_s: float) -> None:
        """It can never be served."""
        request.move_to(RequestState.REJECTED)
        request.reason = reason
        self.rejected += 1
        if self.watch is not None:
            self.watch.miss(request)
        self._ended(request, time_s)

    def _ended(self, request: Request, time_s: float) -> None:
        for callback in self.on_end:
            callback(request, time_s)
        if self.drained is not None and self.completed + self.rejected == self.expected:
            self.drained.succeed()

    def cut(self, now_s: float) -> None:
        """The run ends at `now_s`, whatever still runs."""
        now_s *= 1 + 1e-12  # an end that is due now may have been predicted a rounding error later
        for loop in self.loops:
            loop.cut(now_s)
        for track in self.tracks:
            track.cut(now_s)

    def forget(self) -> None:
        """Let go of everything, once the result is out."""
        self.requests, self.timelines, self.tracks, self.loops, self.on_end = [], [], [], [], []
        self.schedule_pass_s = array("d")

    def token_times(self, request: Request) -> npt.NDArray[np.float64]:
        """Seconds of every token that is out, ascending."""
        parts = []
        for part in request.slices:
            if isinstance(part, Slice):
                parts.append(np.array(self.timelines[part.timeline][part.start : part.stop]))
            else:
                parts.append(np.array([part]))
        return np.concatenate(parts) if parts else np.empty(0)
