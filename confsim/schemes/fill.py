"""Filling an iteration with prefill: the largest budget that meets the target, in queue order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confsim.errors import InputError
from confsim.outcome.slo import TOLERANCE
from confsim.policies.base import Dispatch
from confsim.run.plan import DecodeLoad, PrefillChunk
from confsim.run.request import Request
from confsim.schemes.cost import CoBatchCost, Planned


@dataclass(frozen=True)
class Limits:
    """What bounds an iteration.

    `chunk_tokens` is a static total, decodes included (None: the largest budget that meets `target_s`);
    `max_batched_tokens` caps the tokens stacked on a group; at most `max_partial_prefills` prompts are in progress and
    `max_running` requests have KV (None: no such limit).
    With `prefill_first` an iteration with prefill has no decodes: they pause until the queue is empty.
    """

    target_s: float
    chunk_tokens: int | None = None
    max_batched_tokens: int = 8192
    max_partial_prefills: int = 4
    prefill_first: bool = False
    max_running: int | None = None

    def __post_init__(self) -> None:
        if self.max_running is not None and self.max_running < 1:
            raise InputError(f"scheme.max_running={self.max_running}: use 1 or more, or null for no limit")
        for key in ("max_batched_tokens", "max_partial_prefills"):
            if getattr(self, key) < 1:
                raise InputError(f"scheme.{key}={getattr(self, key)}: use 1 or more")


NOTHING = Planned()
NO_DECODES = DecodeLoad((0,), 0, 0, 0.0)


class Fill:
    """The prefill side of an iteration while it is filled in queue order; used again for every iteration."""

    def __init__(
        self, cost: CoBatchCost, new_dispatch: Callable[[Sequence[int]], Dispatch], limits: Limits, block_tokens: int
    ) -> None:
        self._cost = cost
        self._new_dispatch = new_dispatch
        self._target_s = limits.target_s * TOLERANCE
        self._block_tokens = block_tokens
        self._guess = Guess()
        self._limits = limits
        self.begin(NO_DECODES)

    def begin(self, load: DecodeLoad) -> None:
        """The next iteration, beside these decodes."""
        self.planned = NOTHING
        self._chunks: list[tuple[Request, int, int, bool, int]] = []  # request, start, tokens, last, group
        self._load = load
        self._dispatch: Dispatch | None = None  # where nothing is asked for, nothing is prepared

    @property
    def full(self) -> bool:
        """Whether the iteration has room for no more tokens."""
        return self._dispatch is not None and self._room <= 0

    def set_decodes(self, load: DecodeLoad) -> Dispatch:
        """Fill beside these decodes; asked again when some were preempted meanwhile."""
        limits = self._limits
        self._load = load
        self._dispatch = dispatch = self._new_dispatch(load.counts)
        self._static = limits.chunk_tokens is not None
        whole = dispatch.capacity(limits.max_batched_tokens)
        if limits.chunk_tokens is not None:
            whole = min(whole, limits.chunk_tokens - load.total)
        if whole <= 0 or (not self._static and self._cost.decodes_s(load) > self._target_s):
            whole = self._block_tokens  # the oldest prefill progresses
            self._static = True
        self._whole_room = whole
        self._room = whole - self.planned.tokens
        return dispatch

    def predict_s(self, request: Request) -> float:
        """Prefilling the rest of a request alone, at the present decodes and depth."""
        dispatch = self._dispatch or self.set_decodes(self._load)
        rest = request.remaining_prefill
        seconds = self._cost.predictor(self._load, dispatch, request, NOTHING)
        tokens = min(rest, self._whole_room)
        if not self._static:
            tokens = most(seconds, self._target_s, tokens, self._guess, 0) or min(rest, self._block_tokens)
        return seconds(tokens) * max(1.0, rest / tokens)

    def fit(self, request: Request) -> int:
        """The most tokens of a request that the iteration has room for behind what it holds."""
        dispatch = self._dispatch or self.set_decodes(self._load)
        want = request.target_tokens - request.prefilled
        if want > self._room:
            want = self._room
        if self._static:
            return want
        seconds = self._cost.predictor(self._load, dispatch, request, self.planned)
        tokens = most(seconds, self._target_s, want, self._guess, self.planned.tokens)
        if not tokens and not self._chunks and not self._load.total:
            return min(want, self._block_tokens)  # no chunk meets the target at this depth, and nothing else runs
        return tokens

    def add(self, request: Request, tokens: int, last: bool, group: int) -> None:
        """Take a chunk in."""
        self._chunks.append((request, request.prefilled, tokens, last, group))
        before = self.planned
        self.planned = Planned(
            before.tokens + tokens,
            before.attention_s + self._cost.latency.prefill_attention_s(tokens, request.prefilled),
            before.firsts + last,
            before.chunks + 1,
            max(before.transfer_s, self._cost.latency.kv_transfer_s(request.target_tokens))
            if last and not self._cost.overlap_transfer
            else before.transfer_s,
            before.behind + tokens * request.prefilled,
        )
        self._room -= tokens

    def spread(self) -> tuple[PrefillChunk, ...]:
        """The chunks with their tokens dealt over the groups."""
        if not self._chunks:
            return ()
        assert self._dispatch is not None
        whole = self._dispatch.spread(self.planned.tokens)
        if len(self._chunks) == 1:
            request, start, _, last, group = self._chunks[0]
            return (PrefillChunk(request, start, whole, last, group),)
        left = list(whole)
        return tuple(
            [
                PrefillChunk(request, start, _deal(tokens, left), last, group)
                for request, start, tokens, last, group in self._chunks
            ]
        )


def _deal(tokens: int, left: list[int]) -> tuple[int, ...]:
    """A chunk's shards in proportion to what is `left` of every group's share; the last chunk takes the rest."""
    total = sum(left)
    shards = [share * tokens // total for share in left]
    missing = tokens - sum(shards)
    for group, share in enumerate(left):
        if missing:
            more = min(missing, share - shards[group])
            shards[group] += more
            missing -= more
        left[group] = share - shards[group]
    return tuple(shards)


@dataclass(slots=True)
class Guess:
    """Where the last budget search ended: the next one starts there."""

    tokens: int = 0  # of the whole iteration
    slope_s: float = 0.0  # seconds a token


MAX_SECANTS = 12  # then halve the bracket, whatever the function looks like


def most(seconds: Callable[[int], float], target_s: float, want: int, guess: Guess, before: int) -> int:
    """Largest n in [0, want] with seconds(n) <= target_s (0 counts as such), for a monotone function.

    Secant steps inside a bracket, from the last search's result; near its root the function is a line, so that a
    handful of evaluations suffice.
    """
    low, high = 0, want + 1
    at = guess.tokens - before  # `before` tokens are in the iteration already
    if not 0 < at < want:
        at = want
    slope_s = guess.slope_s
    last_at, last_over_s = at, 0.0
    rounds = 0
    while True:
        over_s = seconds(at) - target_s
        if over_s <= 0.0:
            if at == want:
                return want
            low = at
        else:
            high = at
        if high - low == 1:
            guess.tokens, guess.slope_s = before + low, slope_s
            return low
        if rounds and at != last_at and over_s != last_over_s:
            slope_s = (over_s - last_over_s) / (at - last_at)
        last_at, last_over_s = at, over_s
        rounds += 1
        root = at - over_s / slope_s if slope_s > 0.0 and rounds < MAX_SECANTS else (low + high) / 2
        at = int(min(max(root, low + 1), high - 1))
