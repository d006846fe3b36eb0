"""Which queued prompts the next prefill takes, and whether they are worth stopping decodes for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confsim.run.request import Request
from confsim.schemes.elastic.gate import Footprint, MemoryGate
from confsim.schemes.elastic.law import PrefillLaw, Sums

FIRST_AVERAGE = 512  # output tokens of a request before any has finished
MIN_ITERATIONS = 10  # that decodes are assumed to go on for
GROWTH = 1.1  # of its output so far that a request is assumed to emit at least
LOOK_AHEAD = 256  # requests examined in one pass

Pop = Callable[[], Request | None]  # the next request of the queue


@dataclass(slots=True)
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


class Dispatcher:
    """Chooses prompts in queue order, with a bounded number of passes that overtake."""

    def __init__(self, law: PrefillLaw, instances: int, limits: DispatchLimits) -> None:
        self.law = law
        self.instances = instances
        self.slots = instances * limits.instance_slots
        self.limits = limits
        self._finished = 1
        self._finished_tokens = FIRST_AVERAGE
        self._overtaking = 0  # passes in a row that were out of order

    def ended(self, output_tokens: int) -> None:
        """A request has finished: the average output moves."""
        self._finished += 1
        self._finished_tokens += output_tokens

    def footprint(self, prompt_tokens: int, emitted: int, waiting: bool) -> Footprint:
        """A request's slots now and its assumed rest, at most what the slots of all instances allow.

        Its maximum output is not in a trace: the router's own estimate max(1.1 * emitted, `max_new_tokens`) stands in.
        """
        most = min(max(int(GROWTH * emitted), self.limits.max_new_tokens), self.slots - prompt_tokens)
        current = min(prompt_tokens + emitted + waiting, self.slots)
        return Footprint(current, max(0, most - emitted - 1 - waiting))

    def choose(
        self, pop: Pop, used: Sequence[int], running: Sequence[tuple[int, int]]
    ) -> tuple[list[Request], list[Request]]:
        """Requests for the next prefill, and those examined that go back to the queue.

        `used` are the slots in use on each instance, `running` (prompt, emitted) tokens of every running decode.
        """
        if len(running) >= self.limits.max_running:
            return [], []
        one = _Pass(self, used, running, self._wait_s(running), self._overtaking < self.limits.max_out_of_order)
        rest: list[Request] = []
        for _ in range(LOOK_AHEAD):
            request = pop()
            if request is None:
                break
            item = self.footprint(request.prompt_tokens, request.emitted, True)
            if one.take(request, item) or one.hold(request, item):
                continue
            rest.append(request)
            if not one.may_overtake or one.full:
                break
            one.skipped = True
        chosen = one.chosen + one.held[: one.admitted]
        if chosen:
            self._overtaking = self._overtaking + 1 if one.out_of_order else 0
        return chosen, one.held[one.admitted :] + rest

    def _wait_s(self, running: Sequence[tuple[int, int]]) -> float:
        """How long decodes are expected to keep their instances."""
        average = self._finished_tokens / self._finished
        iterations = float(MIN_ITERATIONS)
        for _, emitted in running:
            iterations = max(iterations, average - emitted, 0.1 * emitted)
        return iterations * self.limits.avg_decoding_s

    def choose_within(self, pop: Pop, free: Sequence[int], left_s: float) -> tuple[list[Request], list[Request]]:
        """Requests whose prefill fits on instances with `free` slots and in the time left of a macro-iteration."""
        gate = MemoryGate([], sum(free))
        most = sum([min(slots, self.limits.instance_tokens) for slots in free])
        chosen: list[Request] = []
        rest: list[Request] = []
        sums = Sums()
        for _ in range(LOOK_AHEAD):
            request = pop()
            if request is None:
                break
            new = sums.plus(request.target_tokens)
            item = self.footprint(request.prompt_tokens, request.emitted, True)
            fits = new.tokens <= most and self.law.batch_s(len(free), new) <= left_s
            if fits and len(gate) < self.limits.max_running and gate.fits(item):
                chosen.append(request)
                gate.add(item)
                sums = new
            else:
                rest.append(request)
        return chosen, rest


class _Pass:
    """One pass over the queue, and what it has decided so far."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        used: Sequence[int],
        running: Sequence[tuple[int, int]],
        wait_s: float,
        may_overtake: bool,
    ) -> None:
        limits = self._limits = dispatcher.limits
        self._law = dispatcher.law
        self._instances = dispatcher.instances
        self._idle = dispatcher.instances - -(-sum(used) // limits.instance_slots)  # if decode KV were compacted
        self._most = sum([min(limits.instance_slots - slots, limits.instance_tokens) for slots in used])
        self._inverse_out = sum([1.0 / emitted for _, emitted in running])
        self._gate = MemoryGate([dispatcher.footprint(*one, False) for one in running], dispatcher.slots)
        self._wait_s = wait_s
        self._sums = Sums()
        self._held_sums = Sums()
        self._held_footprints: list[Footprint] = []
        self._holds = True  # further requests may be held
        self.may_overtake = may_overtake
        self.chosen: list[Request] = []
        self.held: list[Request] = []  # undecided: admitted only if worth stopping decodes for
        self.admitted = 0  # of the undecided ones
        self.skipped = False
        self.out_of_order = False  # something was chosen behind a skipped request
        self.full = False  # a prompt above the time limit was taken: nothing follows it

    def take(self, request: Request, item: Footprint) -> bool:
        """Admit where idle instances are enough, and waiting for the others would cost more than it gains."""
        new = self._sums.plus(request.target_tokens)
        if (self.held and not self.may_overtake) or new.tokens > min(self._most, self._idle * self._limits.room):
            return False
        if len(self._gate) >= self._limits.max_running or not self._gate.fits(item):
            return False
        seconds = self._law.batch_s(self._idle, new)
        slower_s = seconds - self._law.batch_s(self._instances, new)
        in_time = seconds <= self._limits.max_prefill_s
        if slower_s > self._wait_s or not (in_time or not self.chosen):
            return False
        self.full = self.full or not in_time
        self.out_of_order = self.out_of_order or self.skipped or bool(self.held)
        self.chosen.append(request)
        self._gate.add(item)
        self._sums = new
        return True

    def hold(self, request: Request, item: Footprint) -> bool:
        """Keep a request undecided; all held so far are admitted if prefilling them gains more than decodes lose."""
        new = self._held_sums.plus(request.target_tokens)
        tokens, squares = self._sums.tokens + new.tokens, self._sums.squares + new.squares
        if not self._holds or tokens > self._most or not self._fits_with_held(item):
            if self._gate.fits(item) and self._sums.tokens + request.target_tokens <= self._most:
                self._holds = False
            return False
        self.held.append(request)
        self._held_sums = new
        self._held_footprints.append(item)
        seconds = self._law.seconds(self._instances, tokens, squares)
        in_time = seconds <= self._limits.max_prefill_s
        alone = len(self.chosen) + len(self.held) == 1
        if seconds * self._inverse_out <= self._wait_s * new.inverse and (in_time or alone):
            self.full = self.full or not in_time
            self.admitted = len(self.held)
        return True

    def _fits_with_held(self, item: Footprint) -> bool:
        """Whether a request fits with the undecided ones counted in."""
        if len(self._gate) + len(self.held) >= self._limits.max_running:
            return False
        gate = self._gate.with_more(self._held_footprints) if self.held else self._gate
        return gate.fits(item)
