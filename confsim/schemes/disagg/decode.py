"""A decode worker: it pulls finished prompts, steps their decodes, and swaps to the host where KV runs short."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy
from mypy_extensions import mypyc_attr

from confsim.kv.pools import BlockPool, MigratingKv
from confsim.run.plan import IterationPlan
from confsim.run.request import Request, RequestState
from confsim.run.serving import Serving
from confsim.schemes.base import Setup
from confsim.schemes.cost import CoBatchCost
from confsim.schemes.disagg.prefill import PrefillWorker


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class DecodeLimits:
    """A batch of at most `max_batch`; prompts are pulled while those that wait hold less than `waiting_share`."""

    max_batch: int
    waiting_share: float
    awaited: bool  # the loop waits for each transfer
    swap_s: float  # seconds a token to or from the host


class PulledKv(MigratingKv):
    """One pool of decodes; their prompts' copies are on prefill workers."""

    def held_beside(self, request: Request, group: int, tokens: int) -> int:
        """All that a request holds here, whichever worker this is."""
        return self.copies.units(self.room(request, tokens))


class DecodeWorker:
    """One TP group that only decodes, the `index`-th that does; `ring` is its number among all groups."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        index: int,
        ring: int,
        cost: CoBatchCost,
        capacity_tokens: int,
        limits: DecodeLimits,
        transfer_s: Callable[[int], float],
        complete: Callable[[Request, float], None],
    ) -> None:
        self._env = setup.env
        self._cost = cost
        self._limits = limits
        self._transfer_s = transfer_s
        self._complete = complete
        self.index = index
        self._ring = ((ring,),)
        self._kv = PulledKv(1, 1, capacity_tokens, setup.kv)
        self._serving = serving = Serving(setup.env, setup.ledger, self._kv, name, setup.instance)
        noise = setup.noise(len(setup.ledger.tracks))
        self._backend = setup.backend.create(cost, noise, cost.latency.tp, cost.latency.sp, name)
        serving.backend = self._backend
        self._loop = serving.loop
        self._offered: deque[tuple[Request, PrefillWorker]] = deque()  # finished prompts, not pulled yet
        self._offered_units = 0
        self._in_transfer = 0
        self._waiting: deque[Request] = deque()  # pulled, not in the batch yet
        self._swapped: deque[Request] = deque()
        self._moved = 0  # tokens to or from the host before the next iteration
        self.swaps = 0

    @property
    def pool(self) -> BlockPool:
        """The KV pool."""
        return self._kv.pools[0]

    @property
    def load(self) -> int:
        """Blocks held or on their way here, for the router."""
        return self.pool.held + self._offered_units

    def offer(self, request: Request, source: PrefillWorker) -> None:
        """A prompt is done and its KV may be pulled from `source`."""
        request.group = self.index
        self._offered.append((request, source))
        self._offered_units += self._kv.decode_units(request)
        self._serving.rouse()

    def preload(self, request: Request) -> bool:
        """Take a request whose KV is here, unless there is no room for it."""
        if not self._hold(request):
            return False
        request.prefilled = request.target_tokens
        request.group = self.index
        self._land(request)
        return True

    def audit(self) -> None:
        """Recount the pool."""
        self._serving.audit()

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The worker's loop, a SimPy process."""
        while True:
            yield from self._pull()
            self._rebatch()
            if self._moved:
                yield self._env.timeout(self._moved * self._limits.swap_s)
                self._moved = 0
            if not len(self._loop):
                self._check_progress()
                yield self._serving.sleep()
                continue
            yield from self._iterate()

    def _check_progress(self) -> None:
        if (self._offered or self._waiting or self._swapped) and not self._in_transfer:
            raise RuntimeError(f"no progress on decode worker {self.index} with requests that wait and none running")

    # Pulling

    def _may_pull(self) -> bool:
        if not self._offered or (self._in_transfer and not self._limits.awaited):
            return False
        held = sum([self._kv.decode_units(request) for request in self._waiting])
        if held and held >= self._limits.waiting_share * self.pool.capacity:
            return False
        return self._kv.decode_units(self._offered[0][0]) <= self.pool.free

    def _pull(self) -> Generator[simpy.Event, Any, None]:
        """Copy prompts in the order in which they finished, one at a time."""
        while self._may_pull():
            request, source = self._offered.popleft()
            self._offered_units -= self._kv.decode_units(request)
            self._hold(request)
            self._in_transfer += 1
            copy = self._copy(request, source)
            if not self._limits.awaited:
                self._env.process(copy)
                return
            yield from copy

    def _copy(self, request: Request, source: PrefillWorker) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(self._transfer_s(request.target_tokens))
        source.pulled(request)
        self._in_transfer -= 1
        self._land(request)

    def _hold(self, request: Request) -> bool:
        """Blocks for what a request has stored and one more token."""
        if not self._kv.place(request, 0):
            return False
        self._serving.holders.add(request)
        return True

    def _land(self, request: Request) -> None:
        request.move_to(RequestState.LANDED)
        self._waiting.append(request)
        self._serving.rouse()

    # The batch

    def _rebatch(self) -> None:
        """Blocks for the next step of every decode, the last one swapped out where they are short; then new ones."""
        loop = self._loop
        self._serving.grow(self._swap_out)
        while len(loop) < self._limits.max_batch:
            if self._swapped and self._kv.decode_units(self._swapped[0]) <= self.pool.free:
                request = self._swapped.popleft()
                self._hold(request)
                self._moved += request.target_tokens
            elif self._waiting and (not self._swapped or not len(loop)):
                request = self._waiting.popleft()
            else:
                break
            loop.join(request, 0, self._serving.ledger.oracle.left(request))

    def _swap_out(self, group: int) -> bool:
        """Send the decode that joined last to the host."""
        request = next(reversed(self._loop.batches[group].members.values()))
        self._serving.end(request)
        request.target_tokens = request.prompt_tokens + request.emitted - 1  # what is stored
        request.prefilled = request.target_tokens
        request.move_to(RequestState.SWAPPED)
        request.preemptions += 1
        self._serving.ledger.preemptions += 1
        self.swaps += 1
        self._swapped.append(request)
        self._moved += request.target_tokens
        return True

    # Iterations

    def _iterate(self) -> Generator[simpy.Event, Any, None]:
        """Iterations of the same decodes up to the next end, event or shortage of KV; only those change the batch."""
        env, loop, serving, backend = self._env, self._loop, self._serving, self._backend
        load = self._cost.load(loop.batches)
        plan = IterationPlan((), loop.batches, serving.take_released(), load, rings=self._ring)
        queued = len(self._offered) + len(self._waiting)
        if backend.can_run_ahead:
            yield from serving.run_ahead(plan, load, queued, False)
        else:
            start_s, used, context = env.now, serving.used_blocks(), serving.context_tokens()
            backend.submit(plan)
            timing = backend.result()
            yield env.timeout(timing.duration_s)
            serving.track.iteration(start_s, env.now, timing, (0,), load.counts, queued, used, context)
        for request in loop.step(env.now):
            serving.end(request)
            self._complete(request, env.now)
