"""What serving loops have in common: sleep and wake-up, decodes with their KV and record, run-ahead, preemption.

A scheme's loop admits requests, plans an iteration, has a backend price it and applies what came out; `Serving` does
for it what does not depend on the scheme.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable
from typing import Any

import simpy

from confsim.kv.pools import KvStore
from confsim.run.backend import Backend
from confsim.run.holders import Holders
from confsim.run.ledger import Ledger
from confsim.run.plan import DecodeLoad, DecodeRun, IterationPlan
from confsim.run.request import Request, RequestState

AHEAD_STEPS = 32  # decode-only iterations looked ahead to where an event may cut them


class Bell:
    """Wakes a loop that has nothing to do."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._event: simpy.Event | None = None

    def wait(self) -> simpy.Event:
        """The event that the loop sleeps on."""
        self._event = event = self._env.event()
        return event

    def ring(self) -> None:
        """End the sleep, if there is any."""
        if self._event is not None and not self._event.triggered:
            self._event.succeed()


class Serving:
    """The decodes of one loop: their KV, their clock and record, who holds KV, and who has lost it."""

    def __init__(self, env: simpy.Environment, ledger: Ledger, kv: KvStore, name: str, instance: int) -> None:
        self.env = env
        self.ledger = ledger
        self.kv = kv
        kv.oracle = ledger.oracle
        self.loop = ledger.new_loop(len(kv.pools), kv.block_tokens)
        self.track = ledger.new_track(name, instance)
        self.backend: Backend | None = None  # that times this loop; set before it starts
        self.holders = Holders()
        self.landed: list[Request] = []  # KV has arrived, decode starts in the next iteration
        self._released: list[int] = []  # requests that gave their KV up since the last plan
        self._bell = Bell(env)
        self._ahead: DecodeRun | None = None  # looked ahead to; an event of this loop cuts it
        self._process: simpy.Process | None = None  # that looked ahead

    # Sleep

    def sleep(self) -> simpy.Event:
        """The event that the loop waits for while it has nothing to do."""
        return self._bell.wait()

    def rouse(self) -> None:
        """Something has come: wake the loop, or have it stop looking ahead."""
        if self._ahead is not None:
            self._cut_ahead(self._ahead)
        self._bell.ring()

    # Who decodes

    def preload(self, request: Request, group: int) -> bool:
        """Give a request KV on a group, as if its prompt had been prefilled; false where there is none."""
        kv = self.kv
        kv.copies.start(request, 0)
        if not kv.place(request, group):
            kv.copies.cancel(request)
            return False
        self.holders.add(request)
        request.prefilled = request.target_tokens
        request.group = group
        self.land(request)
        return True

    def land(self, request: Request) -> None:
        """Its KV is where it decodes, from the next iteration on."""
        self.kv.settle(request)
        request.move_to(RequestState.LANDED)
        self.landed.append(request)

    def join_landed(self) -> None:
        """Have the requests that have landed decode."""
        for request in self.landed:
            self.loop.join(request, request.group, self.ledger.oracle.left(request))
        self.landed.clear()

    def end(self, request: Request, returns: bool = False) -> None:
        """Its last token is out: give up its KV, or that of its prompt where it never decoded.

        With `returns` it has not ended: what it has stored may stay cached for it.
        """
        if request.state is RequestState.DECODE:
            tokens = self.loop.leave(request)
            self.kv.release(request, request.group, tokens, request.stored_tokens if returns else 0)
        else:
            self.kv.release(request, -1, 0, request.stored_tokens if returns else 0)
        self.holders.remove(request)
        self._released.append(request.id)

    def take_released(self) -> tuple[int, ...]:
        """Requests that gave their KV up since this was asked last, for the next plan."""
        released = tuple(self._released)
        self._released.clear()
        return released

    # KV that is short

    def victim(self, held: Iterable[Request]) -> Request | None:
        """The latest-arrived of some holders of KV that is not the oldest holder of all."""
        able = [request for request in held if not self.holders.is_oldest(request)]
        return max(able, key=lambda request: (request.arrival_s, request.id), default=None)

    def preempt(self, request: Request) -> None:
        """Take a request's KV away, to recompute of prompt and emitted tokens what does not stay cached."""
        self.end(request, returns=True)
        request.requeue()
        self.ledger.preemptions += 1

    def grow(self, make_room: Callable[[int], bool]) -> bool:
        """Blocks for every decode's next token.

        Where a group is short, `make_room(group)` takes KV away from a request; false from it, that nothing can be
        taken now, is the answer here, and nothing has grown.
        """
        loop, kv = self.loop, self.kv
        if loop.grown or kv.whole_request or not loop.grows():
            loop.grown = True
            return True
        for group in range(len(kv.pools)):
            while (need := loop.growth(group)) > 0 and not kv.grow(group, need):
                if not make_room(group):
                    for grown in range(group):
                        kv.shrink(grown, loop.growth(grown))
                    return False
        loop.grown = True
        return True

    # Looking ahead

    def run_ahead(
        self, plan: IterationPlan, load: DecodeLoad, queued: int, crowded: bool
    ) -> Generator[simpy.Event, Any, int]:
        """Iterations of the same decodes, up to the next end, event or shortage of KV; returns how many.

        They are recorded and all but the last one's tokens are out; `loop.step` is still to come for that.
        With `crowded`, most events of the run are not this loop's: it looks past them, and `rouse` cuts it.
        """
        env, loop, backend = self.env, self.loop, self.backend
        assert backend is not None
        start_s = env.now
        steps, until_s = loop.steps_to_end(), env.peek()
        if crowded:
            steps, until_s = min(steps, AHEAD_STEPS), float("inf")
        used = self.used_blocks()
        run = backend.run_ahead(plan, start_s, until_s, steps)
        growth = self._grow_ahead(backend, run, crowded)
        ends = run.ends_s
        self.track.run(start_s, run, load.counts, queued, used, self.context_tokens(), growth)
        if len(ends) > 1:
            loop.advance(ends[:-1])
            loop.grown = True
        if crowded:
            self._ahead, self._process = run, env.active_process
        cut = False
        try:
            yield env.timeout(ends[-1] - start_s)
        except simpy.Interrupt:
            cut = True
        if cut:
            yield env.timeout(ends[-1] - env.now)
        self._ahead = None
        return len(ends)

    def _grow_ahead(self, backend: Backend, run: DecodeRun, crowded: bool) -> list[tuple[int, int]]:
        """Take the blocks of a run's further iterations, cut where they are short; returns (step, blocks) taken."""
        taken: list[tuple[int, int]] = []
        loop, kv, pools = self.loop, self.kv, self.kv.pools
        if kv.whole_request:
            return taken
        groups = range(len(pools))
        units = kv.units_per_block
        for ahead in range(1, len(run.ends_s)):
            needs = loop.needs(ahead)
            if not any(needs):
                continue
            room = [pool.free if crowded else pool.available for pool in pools]  # evicted blocks cannot come back
            if any(needs[group] * units > room[group] for group in groups):
                backend.cut(run, ahead)
                break
            for group in groups:
                kv.grow(group, needs[group])
            taken.append((ahead, sum(needs)))
        return taken

    def _cut_ahead(self, run: DecodeRun) -> None:
        """Of the iterations looked ahead to, the one that runs now is the last."""
        steps, planned = bisect_left(run.ends_s, self.env.now) + 1, len(run.ends_s)
        if steps >= planned:
            return
        loop, backend, process = self.loop, self.backend, self._process
        assert backend is not None and process is not None
        backend.cut(run, steps)
        loop.retreat(planned - steps)
        for step in range(1, planned - steps + 1):
            for group in range(0 if self.kv.whole_request else len(self.kv.pools)):
                self.kv.shrink(group, loop.growth(group, step))
        self.track.cut_run(steps)
        process.interrupt()

    # Looks

    def used_blocks(self) -> int:
        """KV that requests hold, in blocks."""
        held = 0
        for pool in self.kv.pools:
            held += pool.held
        return held // self.kv.units_per_block

    def context_tokens(self) -> int:
        """Tokens of KV that the next iteration of all decodes reads."""
        context = 0
        for batch in self.loop.batches:
            context += batch.context_tokens
        return context

    def audit(self) -> None:
        """Recount what the pools hold.

        Raises:
            AssertionError: if a pool's books do not balance.
        """
        self.kv.audit(self.loop, self.holders)
