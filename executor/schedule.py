"""A small scheduler for generation and checks: first come, first served, on the simulator's own KV accounting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from confsim.kv.pools import InPlaceKv, KvStore, MigratingKv
from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from confsim.run.request import Request
from confsim.specs import KvConfig
from executor.config import Layout, ModelConfig

Split = Callable[[int, tuple[int, ...]], tuple[int, ...]]  # tokens, decodes by group -> shards


def kv_store(layout: Layout, model: ModelConfig, kv: KvConfig) -> KvStore:
    """The simulator's KV accounting for a layout."""
    assert kv.capacity_tokens is not None
    if layout.migrates:
        return MigratingKv(layout.groups, layout.units_per_block(model), kv.capacity_tokens, kv)
    return InPlaceKv(kv.capacity_tokens * layout.shards_per_block(model), kv)


def level_split(tokens: int, decodes: tuple[int, ...]) -> tuple[int, ...]:
    """Shards that level prefill plus decode tokens over the groups; groups above the level take nothing."""
    order = sorted(range(len(decodes)), key=lambda group: decodes[group])
    for count in range(len(order), 0, -1):
        low = order[:count]
        level, rest = divmod(tokens + sum(decodes[group] for group in low), count)
        if level >= decodes[low[-1]]:
            break
    shards = [0] * len(decodes)
    for place, group in enumerate(low):
        shards[group] = level - decodes[group] + (place < rest)
    return tuple(shards)


@dataclass
class Job:
    """A request, the tokens it wants, and the KV that it has room for while it decodes."""

    request: Request
    output_tokens: int
    group: int = -1
    stored: int = 0
    room: int = 0


class Schedule:
    """Plans iterations until every job has its tokens; `plan`, then `finish` with what came out."""

    def __init__(
        self,
        layout: Layout,
        model: ModelConfig,
        kv: KvConfig,
        chunk_tokens: int = 512,
        split: Split = level_split,
        max_partial_prefills: int = 2,
    ) -> None:
        self.layout = layout
        self.model = model
        self.kv = kv_store(layout, model, kv)
        self.step_admission = kv.admission == "step"
        self.chunk_tokens = chunk_tokens
        self.split = split
        self.max_partial_prefills = max_partial_prefills
        self.jobs: dict[int, Job] = {}
        self.queue: deque[Job] = deque()
        self.partial: list[Job] = []
        self.batches = tuple(DecodeBatch(group) for group in range(layout.groups))
        self.preemptions = 0
        self._released: list[int] = []
        self._plan = IterationPlan((), self.batches)

    def add(self, request: int, prompt_tokens: int, output_tokens: int) -> str:
        """Queue a request; the reason if it can never run here, by the simulator's rules, else nothing."""
        limit = self.model.max_context_tokens
        if limit is not None and prompt_tokens + output_tokens > limit:
            return "context_limit"
        reason = self.kv.refusal(prompt_tokens, output_tokens)
        if not reason:
            job = Job(Request(request, 0.0, prompt_tokens), output_tokens)
            self.jobs[request] = job
            self.queue.append(job)
        return reason

    @property
    def done(self) -> bool:
        """Whether every job has its tokens."""
        return not self.jobs

    def plan(self) -> IterationPlan:
        """The next iteration."""
        self._grow()
        chunks = self._chunks()
        while not chunks and self.jobs and not any(batch.members for batch in self.batches):
            self._preempt(-1)  # prompts in progress hold what each of them still needs
            chunks = self._chunks()
        self._plan = IterationPlan(tuple(chunks), self.batches, tuple(self._released))
        self._released = []
        return self._plan

    def finish(self) -> None:
        """Take note that the planned iteration has run."""
        for batch in self.batches:
            for request in list(batch.members):
                self._step(self.jobs[request])
        for chunk in self._plan.prefill:
            self._advance(chunk)

    def _step(self, job: Job) -> None:
        job.request.emitted += 1
        job.stored += 1
        self.batches[job.group].context_tokens += 1
        if job.request.emitted == job.output_tokens:
            self._leave(job)
            self._end(job)

    def _advance(self, chunk: PrefillChunk) -> None:
        job = self.jobs[chunk.request.id]
        job.request.prefilled += chunk.tokens
        if not chunk.last:
            return
        self.partial.remove(job)
        job.request.emitted += 1
        if chunk.group < 0:
            self.kv.release(job.request, -1, 0)
            self._end(job)
            return
        self.kv.settle(job.request)
        job.stored = job.request.target_tokens
        batch = self.batches[job.group]
        batch.members[job.request.id] = job.request
        batch.count += 1
        batch.context_tokens += job.stored + 1

    def _end(self, job: Job) -> None:
        del self.jobs[job.request.id]
        self._released.append(job.request.id)

    def _leave(self, job: Job) -> None:
        batch = self.batches[job.group]
        del batch.members[job.request.id]
        batch.count -= 1
        batch.context_tokens -= job.stored + 1
        self.kv.release(job.request, job.group, job.room)

    def _grow(self) -> None:
        """Room for every decode's next token; the latest holder gives way where there is none."""
        for batch in self.batches:
            for request in list(batch.members):
                if request in batch.members:
                    self._grow_one(self.jobs[request])

    def _grow_one(self, job: Job) -> None:
        block = self.kv.block_tokens
        while job.group >= 0 and -(-(job.stored + 1) // block) > -(-job.room // block):
            if self.kv.grow(job.group if self.layout.migrates else 0, 1):
                break
            self._preempt(job.group)
        if job.group >= 0:
            job.room = max(job.room, job.stored + 1)

    def _preempt(self, group: int) -> None:
        holders = [job for job in self.jobs.values() if job in self.partial or job.group >= 0]
        victims = [job for job in holders if group < 0 or not self.layout.migrates or job.group in (-1, group)]
        job = max(victims, key=lambda item: item.request.id)
        self.preemptions += 1
        if job in self.partial:
            self.partial.remove(job)
            self.kv.release(job.request, -1, 0)
        else:
            self._leave(job)
            job.request.target_tokens = job.request.prompt_tokens + job.request.emitted
        job.group, job.room = -1, 0
        job.request.prefilled = 0
        self._released.append(job.request.id)
        self.queue.appendleft(job)

    def _chunks(self) -> list[PrefillChunk]:
        budget = self.chunk_tokens
        chunks: list[PrefillChunk] = []
        load = tuple(batch.count for batch in self.batches)
        for job in [*self.partial, *self._starters()]:
            if budget <= 0:
                break
            starts = job not in self.partial
            if starts and not self._start(job):
                break
            chunk = self._chunk(job, budget, load)
            if chunk is None and starts:
                self._cancel(job)
                break
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.tokens
                load = tuple(have + shard for have, shard in zip(load, chunk.shards, strict=True))
        return chunks

    def _starters(self) -> list[Job]:
        return list(self.queue)[: max(0, self.max_partial_prefills - len(self.partial))]

    def _start(self, job: Job) -> bool:
        if not self.kv.start(job.request):
            return False
        self.queue.remove(job)
        self.partial.append(job)
        return True

    def _cancel(self, job: Job) -> None:
        """A prompt whose first chunk cannot run holds nothing."""
        self.kv.copies.cancel(job.request)
        self.partial.remove(job)
        self.queue.appendleft(job)

    def _chunk(self, job: Job, budget: int, load: tuple[int, ...]) -> PrefillChunk | None:
        request = job.request
        tokens = min(budget, request.remaining_prefill)
        if self.step_admission and not self.kv.copies.extend(request, request.prefilled + tokens):
            return None
        last = tokens == request.remaining_prefill
        is_final = request.emitted + 1 == job.output_tokens
        if last and not is_final and not self._place(job):
            return None  # the last chunk waits for room where it will decode
        shards = self.split(tokens, load)
        return PrefillChunk(request, request.prefilled, shards, last, job.group if last else -1)

    def _place(self, job: Job) -> bool:
        for batch in sorted(self.batches, key=lambda item: (item.context_tokens, item.group)):
            if self.kv.place(job.request, batch.group):
                job.group = batch.group
                job.room = job.request.target_tokens + 1
                return True
        return False
