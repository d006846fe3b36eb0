"""The prefill side of MuxWise: batches of whole prompts, launched group of layers by group of layers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import simpy
from mypy_extensions import mypyc_attr

from confsim.outcome.slo import TOLERANCE
from confsim.policies.base import Order
from confsim.run.backend import Backend
from confsim.run.plan import WHOLE_GPU, IterationPlan, IterationTiming, PrefillChunk
from confsim.run.record import Track
from confsim.run.request import Request, RequestState
from confsim.run.serving import Serving
from confsim.schemes.mux_cost import MuxCost

IDLE = -2  # decode does not run, in place of a split
ROUNDING = 1e-9  # of a layer


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class MuxLimits:
    """`max_batched_tokens`: of prompts prefilled together (a longer one goes alone); `longest_prompt_tokens` has room
    for its activations; `preempt` lets a short prompt go before a long one at a layer boundary.

    `layer_tokens`: prefill is launched by decode's loop, `max(1, layer_tokens // prompt tokens)` layers with every
    decode iteration, and its end is noticed at the end of one. None: it launches itself, as many layers as cover a
    decode iteration, and its end is noticed at once.
    """

    max_batched_tokens: int
    longest_prompt_tokens: int
    preempt: bool
    layer_tokens: int | None = None


class DecodeSide:
    """What prefill sees of the decode iteration that runs."""

    def __init__(self) -> None:
        self.split = IDLE
        self.attention_s = 0.0  # alone on the whole GPU


class PrefillBatch:
    """Prompts that go through the layers together; parts add up from group to group until they are recorded."""

    def __init__(self, chunks: tuple[PrefillChunk, ...]) -> None:
        self.chunks = chunks
        self.layers_done = 0
        self.layers_queued = 0  # of all, that decode's loop has launched
        self.split = WHOLE_GPU  # on which these run
        self.start()

    def start(self) -> None:
        """Nothing has been recorded that is still to be."""
        self.began_s = -1.0
        self.total_s = self.linear_s = self.attention_s = self.head_s = self.overhead_s = 0.0

    def add(self, timing: IterationTiming) -> None:
        """A group of layers has run."""
        self.total_s += timing.predicted_s
        self.linear_s += timing.linear_s
        self.attention_s += timing.prefill_attention_s
        self.head_s += timing.head_s
        self.overhead_s += timing.overhead_s

    def holds(self, request: Request) -> bool:
        """Whether a request is among its prompts."""
        return any(chunk.request is request for chunk in self.chunks)


class MuxPrefill:
    """The queue, the batch that is prefilled, and one that it preempted."""

    def __init__(
        self,
        serving: Serving,
        queue: Order,
        cost: MuxCost,
        backend: Backend,
        track: Track,
        limits: MuxLimits,
        decode: DecodeSide,
        land: Callable[[Request], None],
    ) -> None:
        self._serving = serving
        self._env = serving.env
        self._queue = queue
        self._cost = cost
        self._backend = backend
        self._track = track
        self._limits = limits
        self._decode = decode
        self._land = land  # takes requests whose first token is out
        self.batch: PrefillBatch | None = None
        self._paused: PrefillBatch | None = None  # preempted by that one
        self._in_flight = False  # layers of the batch are running
        self.blocked = False  # the head of the queue waits for KV
        self.preemptions = 0  # of long prefills by short ones

    # Batches

    def next_batch(self) -> bool:
        """Admit prompts in queue order, as many as fit into one prefill and into KV."""
        chunks: list[PrefillChunk] = []
        aside: Request | None = None
        tokens = 0
        most = self._limits.max_batched_tokens
        self.blocked = False
        while tokens < most:
            request = self._queue.pop(self._env.now, self._predict_s)
            if request is None:
                break
            full = bool(chunks) and tokens + request.remaining_prefill > most
            if full or not self._start(request):
                aside = request
                self.blocked = not full
                break
            chunks.append(self._chunk(request))
            tokens += request.remaining_prefill
        if aside is not None:
            self._queue.push(aside)
        if chunks:
            self.batch = PrefillBatch(tuple(chunks))
        return bool(chunks)

    def queue_layers(self, split: int) -> None:
        """Put the next layers into prefill's stream, in which they wait for those before them."""
        batch, layer_tokens = self.batch, self._limits.layer_tokens
        assert batch is not None and layer_tokens is not None
        tokens = sum([chunk.tokens for chunk in batch.chunks])
        batch.layers_queued = min(self._cost.layers, batch.layers_queued + max(1, layer_tokens // tokens))
        batch.split = split

    def queued(self) -> bool:
        """Whether layers wait in prefill's stream that do not run yet."""
        return self.batch is not None and self.batch.layers_done < self.batch.layers_queued

    def notice(self) -> None:
        """Take the first tokens of a batch whose layers have all run."""
        batch = self.batch
        if batch is not None and batch.layers_done == self._cost.layers:
            self._emit(batch)

    def _start(self, request: Request) -> bool:
        """Reserve the whole prompt and the first decoded token's block, or nothing."""
        kv = self._serving.kv
        if not kv.start(request):
            return False
        decodes = self._serving.ledger.oracle.left(request) > 1
        if not (kv.place(request, 0) if decodes else kv.copies.extend(request, request.target_tokens)):
            kv.copies.cancel(request)
            return False
        request.move_to(RequestState.PREFILL)
        self._serving.holders.add(request)
        return True

    def _chunk(self, request: Request) -> PrefillChunk:
        """The rest of a prompt."""
        group = 0 if self._serving.ledger.oracle.left(request) > 1 else -1
        return PrefillChunk(request, request.prefilled, (request.remaining_prefill,), True, group)

    def _predict_s(self, request: Request) -> float:
        """Prefilling a request alone beside the present decodes."""
        return self._cost.prefill_s((self._chunk(request),), self._split()).total_s

    def _split(self) -> int:
        decode = self._decode
        if decode.split != WHOLE_GPU:
            return WHOLE_GPU if decode.split == IDLE else decode.split
        return self._cost.choose(self._serving.loop.batches[0].count, decode.attention_s)

    # Layers

    def launch(self) -> Generator[simpy.Event, Any, None]:
        """Run the next group of layers beside the decode iteration."""
        batch, now_s = self.batch, self._env.now
        assert batch is not None
        if batch.layers_done < batch.layers_queued:
            split, end = batch.split, batch.layers_queued
        else:
            split = WHOLE_GPU if self._decode.split == IDLE else self._decode.split
            end = batch.layers_done + self._group(batch, split)
        if batch.began_s < 0:
            batch.began_s = now_s
            for chunk in batch.chunks:
                if chunk.request.prefill_start_s < 0:
                    chunk.request.prefill_start_s = now_s
        layers = batch.layers_done, end
        plan = IterationPlan(batch.chunks, (), self._serving.take_released(), layers=layers, split=split)
        self._backend.submit(plan)
        timing = self._backend.result()
        self._in_flight = True
        yield self._env.timeout(timing.duration_s)
        self._in_flight = False
        batch.add(timing)
        batch.layers_done = end
        if end == self._cost.layers:
            self._record(batch, sum([chunk.tokens for chunk in batch.chunks]))
            if self._limits.layer_tokens is None or self._decode.split == IDLE:
                self._emit(batch)
        elif self._limits.preempt and self._paused is None:
            self._give_way(batch)

    def _group(self, batch: PrefillBatch, split: int) -> int:
        """Layers to launch: about one decode iteration, or all that are left where nothing decodes."""
        left = self._cost.layers - batch.layers_done
        layer_s = self._cost.batch_s(batch.chunks, split).total_s / self._cost.layers
        if split != WHOLE_GPU:
            decodes = self._serving.loop.batches[0].count
            cover_s = self._cost.guarded_s(split, decodes, self._decode.attention_s)
        elif self._limits.preempt:
            cover_s = self._cost.options.target_s  # so that a short prompt can go first
        else:
            return left
        return min(left, max(1, ceil(cover_s / layer_s - ROUNDING)))

    def _emit(self, batch: PrefillBatch) -> None:
        """Its prompts' first tokens are out."""
        self.batch, self._paused = self._paused, None
        for chunk in batch.chunks:
            request = chunk.request
            request.prefilled = request.target_tokens
            self._serving.kv.copies.written(request)
            self._serving.ledger.emit(request, self._env.now)
            self._land(request)

    def _record(self, batch: PrefillBatch, tokens: int) -> None:
        total_s = batch.total_s
        timing = IterationTiming(
            total_s, batch.linear_s, batch.attention_s, 0.0, 0.0, batch.head_s, batch.overhead_s, 0.0, total_s
        )
        self._track.iteration(
            batch.began_s, self._env.now, timing, (tokens,), (0,), len(self._queue), self._serving.used_blocks(), 0
        )
        batch.start()

    # Preemption

    def _give_way(self, batch: PrefillBatch) -> None:
        """Let the next prompt go first if it is shorter than what is left here and all still meet their TTFT."""
        request = self._queue.pop(self._env.now, self._predict_s)
        if request is None:
            return
        cost = self._cost
        first_s = self._predict_s(request)
        left = cost.layers - batch.layers_done
        left_s = cost.batch_s(batch.chunks, self._split()).total_s * left / cost.layers
        done_s = self._env.now + first_s + left_s
        in_time = all(
            chunk.request.first_token_s >= 0
            or done_s - chunk.request.arrival_s <= chunk.request.ttft_limit_s * TOLERANCE
            for chunk in batch.chunks
        )
        if first_s >= left_s or not in_time or not self._start(request):
            self._queue.push(request)
            return
        self._record(batch, 0)
        self._paused, self.batch = batch, PrefillBatch((self._chunk(request),))
        self.preemptions += 1

    @property
    def in_flight(self) -> bool:
        """Whether layers run."""
        return self._in_flight

    def runs(self, request: Request) -> bool:
        """Whether layers of a request are in flight, so that its KV cannot be taken away."""
        return self._in_flight and self.batch is not None and self.batch.holds(request)

    def held(self) -> Sequence[Request]:
        """Requests that hold KV for their prefill."""
        batches = [batch for batch in (self.batch, self._paused) if batch is not None]
        return [chunk.request for batch in batches for chunk in batch.chunks]

    def preempt(self, request: Request) -> None:
        """Preempt a decode or a prompt of a batch, whose others go on, and return it ahead of the queue."""
        for batch in (self.batch, self._paused):
            if batch is not None and batch.holds(request):
                batch.chunks = tuple([chunk for chunk in batch.chunks if chunk.request is not request])
        if self._paused is not None and not self._paused.chunks:
            self._paused = None
        if self.batch is not None and not self.batch.chunks:
            self.batch, self._paused = self._paused, None
        self._serving.preempt(request)
        self._queue.push(request)
