"""Which queued prompts the next prefill takes, and whether they are worth stopping decodes for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from confsim.run.request import Request
from confsim.schemes.elastic.ring import PrefillLaw

FIRST_AVERAGE = 512  # output tokens of a request before any has finished
LEAST_ITERATIONS = 10  # that decodes are assumed to go on for
GROWTH = 1.1  # of its output so far that a request is assumed to emit at least
LOOK_AHEAD = 256  # requests examined in one pass


class Footprint(NamedTuple):
    """Slots that a request takes now, and tokens that it is assumed to emit yet."""

    current: int
    remaining: int


class MemoryGate:
    """LightLLM's bound on the peak of slots: by remaining output, descending, max_i(remaining_i * i + sum current)."""

    def __init__(self, running: Sequence[Footprint], slots: int) -> None:
        self._slots = slots
        self._items = sorted(running, key=lambda item: -item.remaining)
        self._prepare()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> list[Footprint]:
        """Those counted in, by remaining output."""
        return self._items

    def _prepare(self) -> None:
        """Peaks at each position, the largest before it, and the largest from it on if one more came before."""
        remaining = np.array([item.remaining for item in self._items], np.int64)
        self._sums = np.concatenate([[0], np.cumsum([item.current for item in self._items])]).astype(np.int64)
        peaks = remaining * np.arange(1, len(remaining) + 1) + self._sums[1:]
        self._before = np.concatenate([[0], np.maximum.accumulate(peaks)])
        later = peaks + remaining
        self._after = np.concatenate([np.maximum.accumulate(later[::-1])[::-1], [0]])
        self._keys = -remaining

    def fits(self, item: Footprint) -> bool:
        """Whether the peak stays within the slots with one request more."""
        at = int(np.searchsorted(self._keys, -item.remaining, side="right"))
        own = item.remaining * (at + 1) + int(self._sums[at]) + item.current
        later = int(self._after[at]) + item.current if at < len(self._items) else 0
        return max(own, later, int(self._before[at])) <= self._slots

    def add(self, item: Footprint) -> None:
        """Count a request in."""
        at = int(np.searchsorted(self._keys, -item.remaining, side="right"))
        self._items.insert(at, item)
        self._prepare()


@dataclass(frozen=True)
class DispatchLimits:
    """Options of the scheduler; times in seconds."""

    instance_slots: int
    instance_tokens: int  # prompt tokens that an instance can compute at once
    avg_decoding_s: float
    max_prefill_s: float
    max_out_of_order: int
    max_running: int
    max_new_tokens: int

    @property
    def room(self) -> int:
        """Prompt tokens that an idle instance takes."""
        return min(self.instance_slots, self.instance_tokens)


class Cluster(NamedTuple):
    """Instances as dispatch sees them: slots used on each, and (prompt, emitted) of every running decode."""

    used: Sequence[int]
    running: Sequence[tuple[int, int]]


@dataclass
class Sums:
    """A batch as the law sees it."""

    tokens: int = 0
    squares: int = 0
    inverse: float = 0.0

    def plus(self, length: int) -> Sums:
        """With one prompt more."""
        return Sums(self.tokens + length, self.squares + length**2, self.inverse + 1.0 / length)


def sums_of(requests: Iterable[Request]) -> Sums:
    """The sums of a batch of whole prompts."""
    out = Sums()
    for request in requests:
        out = out.plus(request.target_tokens)
    return out


@dataclass
class _Pass:
    """What one pass over the queue has decided so far."""

    gate: MemoryGate
    wait_s: float  # how long decodes are expected to keep their instances
    chosen: list[Request] = field(default_factory=list)
    sums: Sums = field(default_factory=Sums)
    held: list[Request] = field(default_factory=list)  # undecided: admitted only if worth stopping decodes for
    held_sums: Sums = field(default_factory=Sums)
    held_footprints: list[Footprint] = field(default_factory=list)
    admitted: int = 0  # of the undecided ones
    holds: bool = True  # further requests may be held
    skipped: bool = False
    out_of_order: bool = False  # something was chosen behind a skipped request
    full: bool = False  # a prompt above the time limit was taken: nothing follows it


class Dispatcher:
    """Chooses prompts in queue order, with a bounded number of passes that overtake."""

    def __init__(self, law: PrefillLaw, instances: int, limits: DispatchLimits) -> None:
        self.law = law
        self.instances = instances
        self.limits = limits
        self.finished = 1
        self.finished_tokens = FIRST_AVERAGE
        self._overtaking = 0  # passes in a row that were out of order

    def ended(self, output_tokens: int) -> None:
        """A request has finished: the average output moves."""
        self.finished += 1
        self.finished_tokens += output_tokens

    def footprint(self, prompt_tokens: int, emitted: int, waiting: bool) -> Footprint:
        """A request's slots now and its assumed rest, at most what the slots of all instances allow.

        Its maximum output is not in a trace: the router's own estimate max(1.1 * emitted, `max_new_tokens`) stands in.
        """
        slots = self.instances * self.limits.instance_slots
        most = min(max(int(GROWTH * emitted), self.limits.max_new_tokens), slots - prompt_tokens)
        current = min(prompt_tokens + emitted + waiting, slots)
        return Footprint(current, max(0, most - emitted - 1 - waiting))

    def choose(self, pop: Callable[[], Request | None], cluster: Cluster) -> tuple[list[Request], list[Request]]:
        """Requests for the next prefill, and those examined that go back to the queue."""
        state = self._new_pass(cluster)
        rest: list[Request] = []
        slots = self.limits.instance_slots
        total = sum(cluster.used)
        idle = self.instances - -(-total // slots)  # if decode KV were compacted
        most = sum(min(slots - used, self.limits.instance_tokens) for used in cluster.used)
        inverse_out = sum(1.0 / emitted for _, emitted in cluster.running)
        may_overtake = self._overtaking < self.limits.max_out_of_order
        if len(cluster.running) >= self.limits.max_running:
            return [], []
        for _ in range(LOOK_AHEAD):
            request = pop()
            if request is None:
                break
            if self._take(request, state, idle, most, may_overtake) or self._hold(request, state, most, inverse_out):
                continue
            rest.append(request)
            if not may_overtake or state.full:
                break
            state.skipped = True
        chosen = state.chosen + state.held[: state.admitted]
        if chosen:
            self._overtaking = self._overtaking + 1 if state.out_of_order else 0
        return chosen, state.held[state.admitted :] + rest

    def choose_within(
        self, pop: Callable[[], Request | None], free: Sequence[int], left_s: float
    ) -> tuple[list[Request], list[Request]]:
        """Requests whose prefill fits on instances with `free` slots and in the time left of a macro-iteration."""
        gate = MemoryGate([], sum(free))
        most = sum(min(slots, self.limits.instance_tokens) for slots in free)
        chosen: list[Request] = []
        rest: list[Request] = []
        sums = Sums()
        for _ in range(LOOK_AHEAD):
            request = pop()
            if request is None:
                break
            new = sums.plus(request.target_tokens)
            item = self.footprint(request.prompt_tokens, request.emitted, True)
            fits = new.tokens <= most and self.law.seconds(len(free), new.tokens, new.squares) <= left_s
            if fits and len(gate) < self.limits.max_running and gate.fits(item):
                chosen.append(request)
                gate.add(item)
                sums = new
            else:
                rest.append(request)
        return chosen, rest

    def _new_pass(self, cluster: Cluster) -> _Pass:
        running = [self.footprint(prompt, emitted, False) for prompt, emitted in cluster.running]
        average = self.finished_tokens / self.finished
        iterations = float(LEAST_ITERATIONS)
        for _, emitted in cluster.running:
            iterations = max(iterations, average - emitted, 0.1 * emitted)
        gate = MemoryGate(running, self.instances * self.limits.instance_slots)
        return _Pass(gate, iterations * self.limits.avg_decoding_s)

    def _take(self, request: Request, state: _Pass, idle: int, most: int, may_overtake: bool) -> bool:
        """Admit where idle instances are enough, and waiting for the others would cost more than it gains."""
        new = state.sums.plus(request.target_tokens)
        if (state.held and not may_overtake) or new.tokens > min(most, idle * self.limits.room):
            return False
        item = self.footprint(request.prompt_tokens, request.emitted, True)
        if len(state.gate) >= self.limits.max_running or not state.gate.fits(item):
            return False
        seconds = self.law.seconds(idle, new.tokens, new.squares)
        slower_s = seconds - self.law.seconds(self.instances, new.tokens, new.squares)
        in_time = seconds <= self.limits.max_prefill_s
        if slower_s > state.wait_s or not (in_time or not state.chosen):
            return False
        state.full = state.full or not in_time
        state.out_of_order = state.out_of_order or state.skipped or bool(state.held)
        state.chosen.append(request)
        state.gate.add(item)
        state.sums = new
        return True

    def _hold(self, request: Request, state: _Pass, most: int, inverse_out: float) -> bool:
        """Keep a request undecided; all held so far are admitted if prefilling them gains more than decodes lose."""
        new = state.held_sums.plus(request.target_tokens)
        tokens, squares = state.sums.tokens + new.tokens, state.sums.squares + new.squares
        item = self.footprint(request.prompt_tokens, request.emitted, True)
        if not state.holds or tokens > most or not self._fits_held(state, item):
            if state.gate.fits(item) and state.sums.tokens + request.target_tokens <= most:
                state.holds = False
            return False
        state.held.append(request)
        state.held_sums = new
        state.held_footprints.append(item)
        seconds = self.law.seconds(self.instances, tokens, squares)
        in_time = seconds <= self.limits.max_prefill_s
        alone = len(state.chosen) + len(state.held) == 1
        if seconds * inverse_out <= state.wait_s * new.inverse and (in_time or alone):
            state.full = state.full or not in_time
            state.admitted = len(state.held)
        return True

    def _fits_held(self, state: _Pass, item: Footprint) -> bool:
        """Whether a request fits with the undecided ones counted in."""
        if len(state.gate) + len(state.held) >= self.limits.max_running:
            return False
        if not state.held:
            return state.gate.fits(item)
        slots = self.instances * self.limits.instance_slots
        return MemoryGate([*state.gate.items, *state.held_footprints], slots).fits(item)
