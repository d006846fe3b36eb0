"""A naive scheduler, written from the description of the system and not from the engine.

Every iteration it looks at every request and every token: queues are scanned, keys computed anew, KV recounted from
what each request holds, the budget found by trying one token more. It shares with the engine only the affine law's
coefficients and the case to run. Slow, and meant to be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator_harness import Case, Planned, PlannedChunk

TOLERANCE = 1 + 1e-9
LATE = 10_000  # iterations after which a run counts as a livelock


@dataclass
class Req:
    """A request and all that has happened to it."""

    id: int
    arrival_s: float
    prompt: int
    output: int
    limit_s: float
    blocks: tuple[int, ...] = ()
    status: str = "queued"  # queued, prefill, transfer, decode, completed, rejected
    target: int = 0
    prefilled: int = 0
    reserved: int = 0  # tokens of the target for which KV is reserved
    kept: list[int] = field(default_factory=list)  # prefix blocks that it shares
    group: int = -1
    stored: int = 0  # tokens whose KV the decode needs in its next iteration
    token_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    hits: int = 0
    known: int = 0  # tokens of which it has had the KV before
    recomputed: int = 0
    left: int = 0  # full blocks of its own, counted from its start, that it left in the cache when it was preempted
    left_from: int = 0  # the first of them
    left_used: int = 0  # when
    late: bool = False
    lands_s: float = 0.0
    sent: int = 0  # place in the order of transfers
    prefill_start_s: float = -1.0

    @property
    def rest(self) -> int:
        return self.target - self.prefilled

    @property
    def unsent(self) -> int:
        return self.output - len(self.token_s)

    @property
    def own_left(self) -> int:
        """Blocks of its own in the cache."""
        return max(0, self.left - self.left_from)

    @property
    def age(self) -> tuple[float, int]:
        return self.arrival_s, self.id


@dataclass
class Iteration:
    """What ran, and when."""

    plan: Planned
    prefill: tuple[int, ...]
    start_s: float
    end_s: float


class Reference:
    """Runs a case. `iterations` and `requests` are what came out."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.law = case.latency
        self.groups = case.groups
        self.moves = case.groups > 1
        heads = case.kv_heads
        gpus_per_group = case.tp if case.scheme == "conflux" else case.gpus
        of_group = max(1, heads // gpus_per_group)
        of_shard = max(1, heads // (gpus_per_group * self.groups))
        self.unit = of_group // of_shard if self.moves else 1  # a decode block in units of a prompt's block on a group
        assert case.capacity_tokens is not None
        capacity = case.capacity_tokens * gpus_per_group // case.tp
        self.capacity = capacity // case.block_tokens * self.unit
        self.entry = case.trace_block_tokens if case.prefix_cache else 0
        self.cache: dict[int, int] = {}  # prefix block -> when it was used last
        self.clock = 0
        self.now = 0.0
        self.seen_s = 0.0  # what arrived until then is in the next plan
        self.requests = [
            Req(i, float(r[0]), r[1], r[2], case.slo.ttft_limit_s(r[1]), tuple(r[3]) if len(r) > 3 else ())
            for i, r in enumerate(case.rows)
        ]
        self.iterations: list[Iteration] = []

    # --- KV, recounted from scratch ---

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.case.block_tokens)

    def entry_blocks(self) -> int:
        return self.entry // self.case.block_tokens

    def holds(self, r: Req, group: int) -> int:
        """Units that a request alone holds on a group."""
        own = 0
        if r.status in ("prefill", "transfer", "starting") or (r.status == "decode" and not self.moves):
            tokens = r.reserved if r.status != "decode" else self.room(r)
            own = max(0, self.blocks(tokens) - len(r.kept) * self.entry_blocks())
        if self.moves and r.group == group and r.status in ("transfer", "decode"):
            own += self.unit * self.blocks(self.room(r))
        return own

    def room(self, r: Req) -> int:
        """Tokens that a decode has room for: what it stores next, or all that it will ever store."""
        return r.prompt + r.output - 1 if self.case.admission == "prompt_output" else r.stored

    def held(self, group: int) -> int:
        """Units in use on a group; a shared prefix block counts once."""
        shared = {block for r in self.requests for block in r.kept}
        return sum(self.holds(r, group) for r in self.requests) + len(shared) * self.entry_blocks()

    def available(self, group: int) -> int:
        return self.capacity - self.held(group)

    def holders(self) -> list[Req]:
        return [r for r in self.requests if r.status in ("prefill", "transfer", "decode", "starting")]

    def oldest(self) -> Req:
        return min(self.holders(), key=lambda r: r.age)

    def touch(self, blocks: list[int]) -> None:
        """Blocks are used now; of one prompt the end is the first to go."""
        for block in reversed(blocks):
            self.clock += 1
            self.cache[block] = self.clock

    def evict(self, groups: int | None = None) -> None:
        """Drop the least recently used idle blocks that no longer fit on the first `groups` groups (None: all)."""
        for group in range(self.groups if groups is None else groups):
            while self.held(group) + self.idle() * self.entry_blocks() + self.idle_own() > self.capacity:
                shared = {block for r in self.requests for block in r.kept}
                used = {block: when for block, when in self.cache.items() if block not in shared}
                owner = min((r for r in self.requests if r.own_left), key=lambda r: r.left_used, default=None)
                if owner is not None and owner.left_used < min(used.values(), default=self.clock + 1):
                    owner.left -= 1
                else:
                    del self.cache[min(used, key=used.__getitem__)]

    def idle_own(self) -> int:
        """Blocks that preempted requests left behind."""
        return sum(r.own_left for r in self.requests)

    def leave(self, r: Req, tokens: int) -> None:
        """Its full blocks of `tokens` stay cached for it, behind the prefix blocks that it shares."""
        if not self.case.prefix_cache:
            return
        r.left_from = len(r.kept) * self.entry_blocks()
        r.left = max(r.left_from, tokens // self.case.block_tokens)
        self.clock += 1
        r.left_used = self.clock

    def idle(self) -> int:
        shared = {block for r in self.requests for block in r.kept}
        return sum(block not in shared for block in self.cache)

    def reserve(self, r: Req, tokens: int) -> bool:
        """Room for the first `tokens` of a prompt on every group."""
        before = r.reserved
        r.reserved = max(r.reserved, tokens)
        if any(self.available(group) < 0 for group in range(self.groups)):
            r.reserved = before
            return False
        self.evict()
        return True

    def unservable(self, prompt: int, output: int) -> bool:
        """It could never be served, however empty the pools are.

        Its longest form must fit: with a moving copy the shards and the decode's blocks on one group together.
        """
        blocks = self.blocks(prompt + output - 1)
        if not self.moves or output == 1:
            return blocks > self.capacity
        return blocks * (1 + self.unit) > self.capacity

    # --- time ---

    def iteration_s(self, prefill: list[tuple[int, int]], shards: tuple[int, ...], firsts: int) -> float:
        """Seconds of an iteration: chunks as (start, tokens), their tokens by group, prompts that end."""
        law, case = self.law, self.case
        batches = [self.batch(group) for group in range(self.groups)]
        counts = [len(batch) for batch in batches]
        stacked = max(a + b for a, b in zip(shards, counts, strict=True))
        linear_s = law.linear_base_s + law.linear_token_s * stacked
        width = case.gpus if case.scheme == "chunked_prefill" else case.tp * self.groups
        attention_s = 0.0
        for start, tokens in prefill:
            attention_s += law.prefill_base_s
            attention_s += law.prefill_pair_s * (tokens * start + tokens * tokens / 2) / width
        exchange_s = 0.0
        if self.moves and prefill:
            exchange_s = law.all_to_all_base_s + law.all_to_all_token_s * max(shards)
        decode_s = 0.0
        for batch in batches:
            if batch:
                context = sum(r.stored for r in batch)
                seconds = law.decode_base_s + law.decode_sequence_s * len(batch) + law.decode_token_s * context
                decode_s = max(decode_s, seconds)
        stage_s = self.stage_s(exchange_s, attention_s, decode_s)
        logits = max(counts) + firsts
        head_s = law.head_base_s + law.head_token_s * logits if logits else 0.0
        gpu_s = linear_s + stage_s + head_s
        host_s = law.iteration_overhead_s + law.sequence_overhead_s * (sum(counts) + len(prefill))
        if sum(counts) and prefill:
            host_s += law.mixed_overhead_s
        exposed_s = max(0.0, host_s - gpu_s) if case.async_schedule else host_s
        return gpu_s + exposed_s

    def stage_s(self, exchange_s: float, prefill_s: float, decode_s: float) -> float:
        """Attention: in turn, or max(comm + g_p * prefill, g_d * decode) where that is shorter."""
        turn_s = exchange_s + prefill_s + decode_s
        if self.case.scheme == "chunked_prefill" or decode_s == 0 or exchange_s + prefill_s == 0:
            return turn_s
        path_s = exchange_s + self.law.prefill_slowdown * prefill_s
        return min(turn_s, max(path_s, self.law.decode_slowdown * decode_s))

    def batch(self, group: int) -> list[Req]:
        return [r for r in self.requests if r.status == "decode" and r.group == group]

    def spread(self, tokens: int) -> tuple[int, ...]:
        """Waterfill, one token at a time.

        Each token goes to the group with the fewest so far; ties to the one that started fullest, then to the
        later one, so that the largest shard stays smallest.
        """
        base = [len(self.batch(group)) for group in range(self.groups)]
        level = list(base)
        for _ in range(tokens):
            group = min(range(self.groups), key=lambda g: (level[g], -base[g], -g))
            level[group] += 1
        return tuple(a - b for a, b in zip(level, base, strict=True))

    # --- one scheduling pass ---

    def capacity_tokens(self) -> int:
        """Tokens that keep every group that takes some at the cap or below."""
        cap = self.case.max_batched_tokens
        if self.case.scheme == "chunked_prefill":
            cap *= self.case.gpus // self.case.tp
        room = sum(max(0, cap - len(self.batch(group))) for group in range(self.groups))
        if isinstance(self.case.chunk_tokens, int) and self.case.scheme == "chunked_prefill":
            room = min(room, self.case.chunk_tokens - sum(len(self.batch(g)) for g in range(self.groups)))
        return room

    def rule(self) -> tuple[int, bool]:
        """Tokens that the iteration may take, and whether that number alone decides."""
        target_s = self.case.slo.target_s * TOLERANCE
        running = any(r.status == "decode" for r in self.requests)
        alone_s = self.iteration_s([], (0,) * self.groups, 0) if running else 0.0
        room = self.capacity_tokens()
        fixed = isinstance(self.case.chunk_tokens, int) and self.case.scheme == "chunked_prefill"
        if room <= 0 or (alone_s > target_s and not fixed):
            return self.case.block_tokens, True
        return room, fixed

    def most(self, r: Req, want: int, before: list[PlannedChunk]) -> int:
        """The most tokens of a request behind what is planned, by trying one more each time."""
        chunks = [(c.start, c.tokens) for c in before]
        planned = sum(c.tokens for c in before)
        firsts = sum(c.last for c in before)
        fits = 0
        for n in range(1, want + 1):
            seconds = self.iteration_s([*chunks, (r.prefilled, n)], self.spread(planned + n), firsts + (n == r.rest))
            if seconds > self.case.slo.target_s * TOLERANCE:
                break
            fits = n
        return fits

    def predicted_rest_s(self, r: Req) -> float:
        """The rest of its prefill alone, at the present decodes, budget and depth."""
        room, fixed = self.rule()
        n = min(r.rest, room)
        if not fixed:
            n = self.most(r, n, []) or min(r.rest, self.case.block_tokens)
        seconds = self.iteration_s([(r.prefilled, n)], self.spread(n), n == r.rest)
        return seconds * max(1.0, r.rest / n)

    def choose(self, tried: set[int], new: bool) -> Req | None:
        """The next request of the queue, among those not tried in this pass."""
        while True:
            queue = [
                r
                for r in self.requests
                if r.status in (("queued", "prefill") if new else ("prefill",)) and r.id not in tried
                if r.arrival_s <= self.seen_s or r.status == "prefill" or r.preemptions
            ]
            if not queue:
                return None
            r = min(queue, key=self.key)
            if self.case.order != "deadline" or r.late or r.token_s:
                return r
            if self.now + self.predicted_rest_s(r) - r.arrival_s <= r.limit_s * TOLERANCE:
                return r
            r.late = True

    def key(self, r: Req) -> tuple[bool, bool, float, int]:
        """Preempted requests come first, then by the order."""
        if self.case.order == "fcfs":
            return r.preemptions == 0, False, r.arrival_s, r.id
        if self.case.order == "srpf" or r.late:
            return r.preemptions == 0, r.late, r.rest, r.id
        return r.preemptions == 0, False, r.arrival_s + r.limit_s, r.id

    def grow(self) -> bool:
        """Room for the next token of every decode, or preemption; false: a transfer must end first."""
        for group in range(self.groups):
            while self.available(group) < 0:
                victim = self.victim(group)
                if victim is None:
                    return False
                self.preempt(victim)
            self.evict(group + 1)
        return True

    def victim(self, group: int) -> Req | None:
        """The latest holder of KV in a group, neither the oldest nor in transfer."""
        able = [
            r
            for r in self.holders()
            if r is not self.oldest() and (r.status == "prefill" or (r.status == "decode" and r.group == group))
        ]
        return max(able, key=lambda r: r.age, default=None)

    def preempt(self, r: Req) -> None:
        """Back to the queue, to recompute the prompt and what was emitted."""
        has = r.stored - 1 if r.status == "decode" else r.prefilled
        if r.status == "prefill" or not self.moves:
            self.leave(r, has)
        r.known = max(r.known, has)
        self.touch_released(r)
        r.status, r.prefilled, r.reserved, r.group, r.stored = "queued", 0, 0, -1, 0
        r.target = r.prompt + len(r.token_s)
        r.preemptions += 1

    def touch_released(self, r: Req) -> None:
        """Shared blocks that nobody else uses were used last now."""
        kept, r.kept = r.kept, []
        others = {block for o in self.requests for block in o.kept}
        self.touch([block for block in kept if block not in others])

    def plan(self) -> list[PlannedChunk]:
        """Chunks in queue order, as much as there is room for."""
        chunks: list[PlannedChunk] = []
        tried: set[int] = set()
        new = True
        while True:
            room, fixed = self.rule()  # anew, since a preemption changes the decodes
            room -= sum(chunk.tokens for chunk in chunks)
            if room <= 0:
                break
            most = self.case.max_running
            r = self.choose(tried, new and (most is None or len(self.holders()) < most))
            if r is None:
                break
            tried.add(r.id)
            fresh = r.status == "queued"
            if fresh and not self.start(r):
                new = False
                continue
            want = min(r.rest, room)
            n = want if fixed else self.most(r, want, chunks)
            running = any(o.status == "decode" for o in self.requests)
            if not n and not chunks and not running:
                n = min(want, self.case.block_tokens)  # nothing else runs, and not even a token meets the target
            if not n:
                if fresh:
                    self.cancel(r)
                break
            if not self.accept(r, n, fresh, chunks):
                if fresh:
                    self.cancel(r)
                new = False
                continue
            if not chunks[-1].last:
                break
        return chunks

    def start(self, r: Req) -> bool:
        """Reserve what a prompt needs to start, behind the prefix that is cached."""
        hits = 0
        if self.entry:
            limit = min(len(r.blocks), (r.prompt - 1) // self.entry)
            while hits < limit and r.blocks[hits] in self.cache:
                hits += 1
        r.kept = list(r.blocks[:hits])
        r.status = "starting"
        shared = hits * self.entry_blocks()
        reused = 0
        if r.left_from <= shared:
            reused = max(0, min(r.left, (r.target - 1) // self.case.block_tokens) - shared)
        r.left = r.left_from = 0
        block = self.case.block_tokens
        tokens = {"prompt": r.target, "step": 0, "prompt_output": max(r.target, r.prompt + r.output - 1)}
        if not self.reserve(r, max(tokens[self.case.admission], (shared + reused) * block if reused else 0)):
            if reused:
                self.leave(r, (shared + reused) * block)
            self.touch_released(r)
            r.status = "queued"
            return False
        r.prefilled = (shared + reused) * block
        r.hits += max(0, min(r.prefilled, r.prompt) - r.known)
        return True

    def cancel(self, r: Req) -> None:
        """Undo a start of which nothing came."""
        r.hits -= max(0, min(r.prefilled, r.prompt) - r.known)
        if r.prefilled > len(r.kept) * self.entry:
            self.leave(r, r.prefilled)
        self.touch_released(r)
        r.status, r.prefilled, r.reserved = "queued", 0, 0

    def accept(self, r: Req, n: int, fresh: bool, chunks: list[PlannedChunk]) -> bool:
        """Plan a chunk if its KV can be had."""
        last = n == r.rest
        partials = sum(o.status == "prefill" for o in self.requests)
        if fresh and not last and partials >= self.case.max_partial_prefills:
            return False
        if self.case.admission == "step" and not self.extend(r, r.prefilled + n):
            return False
        group = -1
        if last and r.unsent > 1:
            group = self.place(r)
            if group < 0:
                return False
        chunks.append(PlannedChunk(r.id, r.prefilled, n, last, group))
        if r.prefill_start_s < 0:
            r.prefill_start_s = self.now
        r.status = "transfer" if last else "prefill"
        return True

    def extend(self, r: Req, tokens: int) -> bool:
        """KV for a prompt as it proceeds; the oldest holder makes room in the group that is shortest."""
        while not self.reserve(r, tokens):
            if r is not self.oldest():
                return False
            short = min(range(self.groups), key=self.available)
            victim = self.victim(short)
            if victim is None or victim is r:
                return False
            self.preempt(victim)
        return True

    def place(self, r: Req) -> int:
        """The group in which it will decode, with its blocks reserved; the oldest holder makes room."""
        while True:
            fitting = [group for group in range(self.groups) if self.fits(r, group)]
            if fitting:
                group = self.preferred(fitting)
                r.stored = r.target + 1
                if self.moves:
                    r.group = group
                else:
                    r.reserved = max(r.reserved, self.room(r))
                self.status_placed(r)
                return group
            if r is not self.oldest():
                return -1
            groups = sorted(range(self.groups), key=lambda g: (-self.available(g), g))
            victims = [v for v in (self.victim(g) for g in groups) if v is not None and v is not r]
            if not victims:
                return -1
            self.preempt(victims[0])

    def status_placed(self, r: Req) -> None:
        r.status = "transfer"
        self.evict()

    def fits(self, r: Req, group: int) -> bool:
        whole = r.prompt + r.output - 1 if self.case.admission == "prompt_output" else r.target + 1
        if self.moves:
            return self.unit * self.blocks(whole) <= self.available(group)
        kept = len(r.kept) * self.entry_blocks()
        before = max(0, self.blocks(r.reserved) - kept)
        after = max(0, self.blocks(whole) - kept)
        return after - before <= self.available(group)

    def preferred(self, fitting: list[int]) -> int:
        """Least context; once every group is past the threshold, the fullest."""
        limit = self.case.placement_threshold * self.capacity
        if self.case.scheme == "conflux" and all(self.held(group) > limit for group in range(self.groups)):
            return max(fitting, key=lambda g: (self.held(g), -g))
        return min(fitting, key=lambda g: (self.context(g), g))

    def context(self, group: int) -> int:
        """Decode context of a group, of requests on their way to it too."""
        return sum(r.stored for r in self.requests if r.group == group and r.status in ("decode", "transfer"))

    # --- the run ---

    def run(self) -> None:
        """To the end."""
        pending = sorted(self.requests, key=lambda r: r.age)
        for r in self.requests:
            r.status = "future"
        while True:
            for r in [r for r in pending if r.arrival_s <= self.now]:
                pending.remove(r)
                self.arrive(r)
            self.land_due()
            plan = self.step_plan()
            if plan is None and self.seen_s < self.now:
                self.seen_s = self.now  # nothing runs, so that plans are made at once
                continue
            if plan is None:
                events = [r.arrival_s for r in pending[:1]]
                events += [r.lands_s for r in self.requests if r.status == "transfer"]
                if not events:
                    break
                self.now = self.seen_s = min(events)
                continue
            assert len(self.iterations) < LATE, "livelock"
            self.execute(plan)

    def arrive(self, r: Req) -> None:
        limit = self.case.max_context_tokens
        too_long = limit is not None and r.prompt + r.output > limit
        r.target = r.prompt
        r.status = "rejected" if too_long or self.unservable(r.prompt, r.output) else "queued"

    def land_due(self) -> None:
        """Transfers that have ended."""
        waiting = [r for r in self.requests if r.status == "transfer" and 0 < r.lands_s <= self.now]
        for r in sorted(waiting, key=lambda r: (r.lands_s, r.sent)):
            self.land(r)

    def land(self, r: Req) -> None:
        """Its KV is where it decodes, and the prompt's shards are given up."""
        if self.moves:
            self.leave(r, r.target)
            self.touch_released(r)
            r.reserved = 0
        r.status, r.group, r.stored, r.lands_s = "decode", max(r.group, 0), r.target + 1, 0.0

    def step_plan(self) -> list[PlannedChunk] | None:
        if not self.grow():
            return None
        chunks = self.plan()
        if not chunks and not any(r.status == "decode" for r in self.requests):
            return None
        return chunks

    def execute(self, chunks: list[PlannedChunk]) -> None:
        """Run an iteration and apply it."""
        decode = tuple(tuple(r.id for r in self.batch(group)) for group in range(self.groups))
        context = tuple(sum(r.stored for r in self.batch(group)) for group in range(self.groups))
        tokens = self.spread(sum(c.tokens for c in chunks))
        ends = sum(c.last for c in chunks)
        seconds = self.iteration_s([(c.start, c.tokens) for c in chunks], tokens, ends)
        start_s, self.now = self.now, self.now + seconds
        self.seen_s = start_s if self.case.async_schedule else self.now
        self.iterations.append(Iteration(Planned(tuple(chunks), decode, context), tokens, start_s, self.now))
        self.land_due()
        for group in decode:
            for id in group:
                self.decoded(self.requests[id])
        transfer_s = self.transfer_s(chunks)
        for chunk in chunks:
            r = self.requests[chunk.request]
            r.recomputed += max(0, min(r.prefilled + chunk.tokens, r.known) - r.prefilled)
            r.prefilled += chunk.tokens
            self.written(r)
            if not chunk.last:
                continue
            r.token_s.append(self.now)
            if r.unsent == 0:
                self.end(r)
            elif transfer_s > seconds:
                r.lands_s = self.now + (transfer_s - seconds)
                r.sent = 1 + max(other.sent for other in self.requests)
            else:
                self.land(r)

    def written(self, r: Req) -> None:
        """Full prompt blocks can be found by others from now on."""
        if not self.entry:
            return
        done = min(r.prefilled, r.prompt) // self.entry
        for block in r.blocks[len(r.kept) : done]:
            r.kept.append(block)
            self.cache.setdefault(block, 0)

    def decoded(self, r: Req) -> None:
        r.token_s.append(self.now)
        r.stored += 1
        if r.unsent == 0:
            r.stored -= 1
            self.end(r)

    def end(self, r: Req) -> None:
        self.touch_released(r)
        r.status, r.reserved, r.stored, r.left, r.left_from = "completed", 0, 0, 0, 0

    def transfer_s(self, chunks: list[PlannedChunk]) -> float:
        """All prompts that end in an iteration share it; those for one group share its link."""
        if not self.moves:
            return 0.0
        times = [0.0]
        for group in range(self.groups):
            moved = sum(self.requests[c.request].target for c in chunks if c.last and c.group == group)
            if moved:
                times.append(self.law.transfer_base_s + self.law.transfer_token_s * moved)
        return max(times)
