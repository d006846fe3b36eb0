"""Running decodes that step together.

Every running decode of a loop gets one token an iteration, at its end. So the loop keeps one append-only timeline of
end times; a request's token times are a slice of it. Per iteration: one time appended, `count` added to the total
context, new KV blocks counted per position inside a block, and requests whose last step has come popped from a heap.
Nothing is done per running request.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from heapq import heappop, heappush

from confsim.run.plan import DecodeBatch
from confsim.run.request import Request, RequestState, Slice


class DecodeLoop:
    """The decode batches of `groups` groups that share one clock, writing to timeline `index`."""

    def __init__(self, index: int, times: array[float], groups: int, block_tokens: int) -> None:
        self.index = index
        self.times = times
        self.block_tokens = block_tokens
        self.batches = tuple(DecodeBatch(group) for group in range(groups))
        self.starts: dict[int, int] = {}  # request -> step of its first token here
        self._ends: list[tuple[int, int, int]] = []  # (steps when it ends, request, start)
        self._running: dict[int, Request] = {}
        self._residues = [[0] * groups for _ in range(block_tokens)]  # decodes by the step that needs a block, by group
        self._prepaid = [0] * groups  # joined since the last step with that block reserved already
        self.grown = False  # blocks for the next step are taken

    def __len__(self) -> int:
        return len(self.starts)

    def join(self, request: Request, group: int, tokens_left: int) -> None:
        """Start decoding: `tokens_left` more tokens, the first at the end of the next iteration."""
        step = len(self.times)
        stored = request.target_tokens
        batch = self.batches[group]
        batch.count += 1
        batch.context_tokens += stored + 1
        batch.members[request.id] = request
        self.starts[request.id] = step
        self._running[request.id] = request
        self._residues[(step - stored) % self.block_tokens][group] += 1
        if stored % self.block_tokens == 0:
            self._prepaid[group] += 1
        heappush(self._ends, (step + tokens_left, request.id, step))
        request.move_to(RequestState.DECODE)
        request.group = group

    def leave(self, request: Request) -> int:
        """Stop decoding, at the end of an iteration; returns the tokens that its KV has room for."""
        start = self.starts.pop(request.id)
        del self._running[request.id]
        steps = len(self.times) - start
        stored = request.target_tokens
        batch = self.batches[request.group]
        batch.count -= 1
        batch.context_tokens -= stored + 1 + steps
        del batch.members[request.id]
        self._residues[(start - stored) % self.block_tokens][request.group] -= 1
        if steps == 0 and stored % self.block_tokens == 0:
            self._prepaid[request.group] -= 1
        if steps:
            request.slices.append(Slice(self.index, start, start + steps))
            request.emitted += steps
        return stored + max(1, steps + self.grown)

    def room(self, request: Request) -> int:
        """Tokens that the KV of a request has room for: what is stored and one more, or what it has grown to here."""
        if request.state is not RequestState.DECODE:
            return request.target_tokens + 1
        return request.target_tokens + max(1, len(self.times) - self.starts[request.id] + self.grown)

    def growth(self, group: int, ahead: int = 0) -> int:
        """Blocks that the group's decodes need for the step `ahead` steps from the next one."""
        need = self._residues[(len(self.times) + ahead) % self.block_tokens][group]
        return need if ahead else need - self._prepaid[group]

    def needs(self, ahead: int) -> list[int]:
        """Blocks that each group's decodes need for the step `ahead` (1 or more) steps from the next; not a copy."""
        return self._residues[(len(self.times) + ahead) % self.block_tokens]

    def grows(self) -> bool:
        """Whether any decode needs a block for the next step."""
        return self._residues[len(self.times) % self.block_tokens] != self._prepaid

    def steps_to_end(self) -> int:
        """Steps until the next decode ends; the ends of preempted requests count as such."""
        ends = self._ends
        while ends:
            at, request_id, start = ends[0]
            if self.starts.get(request_id) == start:
                return at - len(self.times)
            heappop(ends)
        return 0

    def running(self) -> list[Request]:
        """The requests that decode, in the order in which they joined."""
        return list(self._running.values())

    def cut(self, now_s: float) -> None:
        """The run ends at `now_s`: what of the running requests is out by then becomes a slice of theirs."""
        steps = bisect_right(self.times, now_s)
        for request_id, request in self._running.items():
            start = self.starts[request_id]
            if steps > start:
                request.slices.append(Slice(self.index, start, steps))
                request.emitted += steps - start

    def advance(self, end_times_s: list[float]) -> None:
        """Append iterations in which nobody ends."""
        steps = len(end_times_s)
        self.times.extend(end_times_s)
        for batch in self.batches:
            batch.context_tokens += batch.count * steps
        self._prepaid = [0] * len(self.batches)
        self.grown = False

    def retreat(self, steps: int) -> None:
        """Take back the last iterations that `advance` appended."""
        del self.times[len(self.times) - steps :]
        for batch in self.batches:
            batch.context_tokens -= batch.count * steps

    def step(self, end_s: float) -> list[Request]:
        """End an iteration; returns the requests whose last token it was, still in the loop."""
        times = self.times
        times.append(end_s)
        for batch in self.batches:
            batch.context_tokens += batch.count
        self._prepaid = [0] * len(self.batches)
        self.grown = False
        done = []
        ends = self._ends
        now = len(times)
        while ends and ends[0][0] <= now:
            _, request_id, start = heappop(ends)
            if self.starts.get(request_id) == start:
                done.append(self._running[request_id])
        return done
