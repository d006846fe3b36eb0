"""Which prompts an iteration prefills, and the KV that they get: in queue order, as much as there is room for."""

from __future__ import annotations

from confsim.kv.pools import KvStore
from confsim.policies.base import GroupLoad, Order, Placement
from confsim.run.plan import DecodeLoad, PrefillChunk
from confsim.run.request import Request, RequestState
from confsim.run.serving import Serving
from confsim.schemes.cost import CoBatchCost
from confsim.schemes.fill import Fill, Limits


class Admission:
    """Takes requests from the queue into iterations, places their decodes, and takes KV away where it is short."""

    def __init__(
        self, serving: Serving, queue: Order, cost: CoBatchCost, fill: Fill, limits: Limits, placement: Placement
    ) -> None:
        self._serving = serving
        self._kv: KvStore = serving.kv
        self._loop = serving.loop
        self._queue = queue
        self._cost = cost
        self._fill = fill
        self._limits = limits
        self._placement = placement
        self._partials: dict[int, Request] = {}  # prompts in progress
        self._aside: list[Request] = []  # taken from the queue in this pass and not planned
        self._coming = [0] * len(serving.kv.pools)  # context of requests placed on a group that do not decode yet
        self.blocked = False  # the head of the queue waits for KV
        self.no_slot = False  # as many requests run as may, and none of them is in prefill

    def chunks(self, now_s: float, load: DecodeLoad) -> tuple[PrefillChunk, ...]:
        """Prefill chunks in queue order, as much as an iteration beside these decodes has room for."""
        fill, aside, ledger = self._fill, self._aside, self._serving.ledger
        fill.begin(load)
        new = True
        self.blocked = False
        self.no_slot = not self._slot() and not self._partials
        preempted = ledger.preemptions
        while not (fill.full or self.no_slot):
            request = self._queue.pop(now_s, fill.predict_s, new and self._slot())
            if request is None:
                break
            aside.append(request)
            fresh = request.state is RequestState.QUEUED
            if fresh and not self._start(request):
                new = False
                self.blocked = True
                continue
            tokens = fill.fit(request)
            outcome = self._accept(request, tokens, fresh, now_s) if tokens else "full"
            if ledger.preemptions != preempted:
                preempted = ledger.preemptions
                fill.set_decodes(self._cost.load(self._loop.batches))
            if outcome == "accepted":
                aside.pop()
                if request.state is RequestState.PREFILL:
                    break
                continue
            if fresh:
                self._cancel(request)
            if outcome == "full":
                break
            new = False
        self.blocked = self.blocked and len(aside) == 1 and not fill.planned.chunks
        for request in aside:
            self._queue.push(request)
        aside.clear()
        return fill.spread()

    def _accept(self, request: Request, tokens: int, fresh: bool, now_s: float) -> str:
        last = tokens == request.remaining_prefill
        if fresh and not last and len(self._partials) >= self._limits.max_partial_prefills:
            return "not_now"
        if not self._kv.whole_prompt and not self._extend(request, request.prefilled + tokens):
            return "not_now"
        group = -1
        if last and self._serving.ledger.oracle.left(request) > 1:
            group = self._place(request)
            if group < 0:
                return "not_now"
        self._fill.add(request, tokens, last, group)
        if request.prefill_start_s < 0:
            request.prefill_start_s = now_s
        if last:
            self._partials.pop(request.id, None)
            request.move_to(RequestState.TRANSFER)
            request.group = group
            if group >= 0:
                self.comes(request)
        elif fresh:
            self._partials[request.id] = request
            request.move_to(RequestState.PREFILL)
        return "accepted"

    def comes(self, request: Request) -> None:
        """A request will decode on its group."""
        self._coming[request.group] += request.target_tokens + 1

    def joins(self, requests: list[Request]) -> None:
        """Requests of which `comes` was told decode from now on."""
        for request in requests:
            self._coming[request.group] -= request.target_tokens + 1

    def _slot(self) -> bool:
        """Whether a further request may run."""
        most = self._limits.max_running
        return most is None or len(self._serving.holders) < most

    # KV of a request

    def _start(self, request: Request) -> bool:
        if not self._kv.start(request):
            return False
        self._serving.holders.add(request)
        return True

    def _cancel(self, request: Request) -> None:
        self._kv.copies.cancel(request)
        self._serving.holders.remove(request)

    def _extend(self, request: Request, tokens: int) -> bool:
        """Room for `tokens` of a prompt; the oldest holder makes room."""
        while not self._kv.copies.extend(request, tokens):
            if not self._serving.holders.is_oldest(request):
                return False
            pools = self._kv.pools
            if not self.make_room(min(range(len(pools)), key=lambda group: pools[group].available)):
                return False
        return True

    def _place(self, request: Request) -> int:
        """Reserve the decode's blocks; the oldest holder makes room, others wait."""
        need = self._kv.decode_units(request)
        while True:
            group = self._placement.choose(self._group_loads(), need)
            if group >= 0 and self._kv.place(request, group):
                return group
            if not self._serving.holders.is_oldest(request):
                return -1
            victim = self._victim_anywhere(request)
            if victim is None:
                return -1
            self._preempt(victim)

    def _group_loads(self) -> list[GroupLoad]:
        return [
            GroupLoad(batch.group, batch.context_tokens + coming, pool.held, pool.available, pool.capacity)
            for batch, coming, pool in zip(self._loop.batches, self._coming, self._kv.pools, strict=True)
        ]

    # Preemption

    def make_room(self, group: int) -> bool:
        """Preempt the victim of a group, a decode or a prompt in progress; false where there is none."""
        victim = self._victim(group)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def _victim(self, group: int) -> Request | None:
        return self._serving.victim([*self._loop.batches[group].members.values(), *self._partials.values()])

    def _victim_anywhere(self, request: Request) -> Request | None:
        """A victim in the group with the most room already, so that the fewest are preempted."""
        groups = sorted(self._group_loads(), key=lambda load: (-load.available_units, load.group))
        for load in groups:
            victim = self._victim(load.group)
            if victim is not None and victim is not request:
                return victim
        return None

    def _preempt(self, request: Request) -> None:
        """Preempt a request and return it ahead of the queue."""
        if request.state is not RequestState.DECODE:
            self._partials.pop(request.id, None)
            self._queue.remove(request)
            if request in self._aside:
                self._aside.remove(request)
        self._serving.preempt(request)
        self._queue.push(request)
