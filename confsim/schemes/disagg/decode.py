"""A decode worker: it pulls finished prompts, steps their decodes, and swaps to the host where KV runs short."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from confsim.kv.pools import BlockPool
from confsim.run.record import DecodeRun
from confsim.run.request import Request, RequestState
from confsim.schemes.base import Setup
from confsim.schemes.cost import CoBatchCost
from confsim.schemes.disagg.prefill import PrefillWorker


@dataclass(frozen=True)
class DecodeLimits:
    """A batch of at most `max_batch`; prompts are pulled while those that wait hold less than `waiting_share`."""

    max_batch: int
    waiting_share: float
    awaited: bool  # the loop waits for each transfer
    swap_s: float  # seconds a token to or from the host


class DecodeWorker:
    """One TP group that only decodes."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        index: int,
        cost: CoBatchCost,
        capacity_tokens: int,
        limits: DecodeLimits,
        transfer_s: Callable[[int], float],
        complete: Callable[[Request, float], None],
    ) -> None:
        self._env = setup.env
        self._ledger = setup.ledger
        self._cost = cost
        self._limits = limits
        self._transfer_s = transfer_s
        self._complete = complete
        self.index = index
        self.pool = BlockPool(capacity_tokens // setup.kv.block_tokens)
        self._block_tokens = setup.kv.block_tokens
        self.loop = setup.ledger.new_loop(1, setup.kv.block_tokens)
        self._track = setup.ledger.new_track(name, setup.instance)
        self._noise = setup.noise(len(setup.ledger.tracks))
        self._offered: deque[tuple[Request, PrefillWorker]] = deque()  # finished prompts, not pulled yet
        self._offered_units = 0
        self._in_transfer: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()  # pulled, not in the batch yet
        self._swapped: deque[Request] = deque()
        self.swaps = 0
        self._wake: simpy.Event | None = None

    @property
    def load(self) -> int:
        """Blocks held or on their way here, for the router."""
        return self.pool.held + self._offered_units

    def offer(self, request: Request, source: PrefillWorker) -> None:
        """A prompt is done and its KV may be pulled from `source`."""
        request.group = self.index
        self._offered.append((request, source))
        self._offered_units += self._units(request)
        self._rouse()

    def preload(self, request: Request) -> bool:
        """Take a request whose KV is here, unless there is no room for it."""
        if self._units(request) > self.pool.free:
            return False
        self.pool.held += self._units(request)
        request.prefilled = request.target_tokens
        request.group = self.index
        self._land(request)
        return True

    def audit(self) -> None:
        """Recount the pool."""
        pool, loop = self.pool, self.loop
        held = sum(self._units(request) for request in (*self._waiting, *self._in_transfer.values()))
        for request in loop.batches[0].members.values():
            steps = max(1, len(loop.times) - loop.starts[request.id] + loop.grown)
            held += -(-(request.target_tokens + steps) // self._block_tokens)
        assert held == pool.held, (held, pool.held)
        assert 0 <= pool.held <= pool.capacity

    def _units(self, request: Request) -> int:
        """Blocks of the stored tokens and one more."""
        return -(-(request.target_tokens + 1) // self._block_tokens)

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The worker's loop, a SimPy process."""
        while True:
            yield from self._pull()
            yield from self._rebatch()
            if not len(self.loop):
                self._check_progress()
                self._wake = self._env.event()
                yield self._wake
                continue
            yield from self._iterate()

    def _check_progress(self) -> None:
        if (self._offered or self._waiting or self._swapped) and not self._in_transfer:
            raise RuntimeError(f"no progress on decode worker {self.index} with requests that wait and none running")

    # Pulling

    def _may_pull(self) -> bool:
        if not self._offered or (self._in_transfer and not self._limits.awaited):
            return False
        held = sum(self._units(request) for request in self._waiting)
        if held and held >= self._limits.waiting_share * self.pool.capacity:
            return False
        return self._units(self._offered[0][0]) <= self.pool.free

    def _pull(self) -> Generator[simpy.Event, Any, None]:
        """Copy prompts in the order in which they finished, one at a time."""
        while self._may_pull():
            request, source = self._offered.popleft()
            self._offered_units -= self._units(request)
            self.pool.held += self._units(request)
            self._in_transfer[request.id] = request
            copy = self._copy(request, source)
            if not self._limits.awaited:
                self._env.process(copy)
                return
            yield from copy

    def _copy(self, request: Request, source: PrefillWorker) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(self._transfer_s(request.target_tokens))
        source.pulled(request)
        del self._in_transfer[request.id]
        self._land(request)

    def _land(self, request: Request) -> None:
        request.move_to(RequestState.LANDED)
        self._waiting.append(request)
        self._rouse()

    # The batch

    def _rebatch(self) -> Generator[simpy.Event, Any, None]:
        """Blocks for the next step of every decode, the last one swapped out where they are short; then new ones."""
        loop, pool = self.loop, self.pool
        moved = 0
        while not loop.grown and (need := loop.growth(0)) > pool.free:
            moved += self._swap_out()
        if not loop.grown:
            pool.held += need
            loop.grown = True
        while len(loop) < self._limits.max_batch:
            if self._swapped and self._units(self._swapped[0]) <= pool.free:
                moved += self._swap_in()
            elif self._waiting and (not self._swapped or not len(loop)):
                request = self._waiting.popleft()
                loop.join(request, 0, self._ledger.oracle.left(request))
            else:
                break
        if moved:
            yield self._env.timeout(moved * self._limits.swap_s)

    def _swap_out(self) -> int:
        """Send the decode that joined last to the host; returns its tokens."""
        loop = self.loop
        request = next(reversed(loop.batches[0].members.values()))
        self.pool.held -= -(-loop.leave(request) // self._block_tokens)
        request.target_tokens = request.prompt_tokens + request.emitted - 1  # what is stored
        request.prefilled = request.target_tokens
        request.move_to(RequestState.SWAPPED)
        request.preemptions += 1
        self._ledger.preemptions += 1
        self.swaps += 1
        self._swapped.append(request)
        return request.target_tokens

    def _swap_in(self) -> int:
        request = self._swapped.popleft()
        self.pool.held += self._units(request)
        self.loop.join(request, 0, self._ledger.oracle.left(request))
        return request.target_tokens

    # Iterations

    def _iterate(self) -> Generator[simpy.Event, Any, None]:
        """Iterations of the same decodes up to the next end, event or shortage of KV; only those change the batch."""
        env, loop, cost = self._env, self.loop, self._cost
        start_s = env.now
        load = cost.load(loop.batches)
        run = cost.decode_run(loop.batches, load, start_s, env.peek(), loop.steps_to_end(), self._noise)
        used = self.pool.held
        growth = self._grow_ahead(run)
        ends = run.ends_s
        linear_s, head_s = cost.linear_s(load, load.peak, 0), cost.latency.head_s(load.peak)
        self._track.run(
            start_s, run, linear_s, head_s, load.counts,
            len(self._offered) + len(self._waiting), used, loop.batches[0].context_tokens, growth,
        )  # fmt: skip
        if len(ends) > 1:
            loop.advance(ends[:-1])
            loop.grown = True
        yield env.timeout(ends[-1] - start_s)
        for request in loop.step(env.now):
            self.pool.held -= -(-loop.leave(request) // self._block_tokens)
            self._complete(request, env.now)

    def _grow_ahead(self, run: DecodeRun) -> list[tuple[int, int]]:
        """Take the blocks of a run's further iterations, cut where they are short; returns (step, blocks) taken."""
        taken = []
        for ahead in range(1, len(run.ends_s)):
            need = self.loop.growth(0, ahead)
            if need > self.pool.free:
                run.cut(ahead)
                break
            self.pool.held += need
            taken.append((ahead, need))
        return taken
