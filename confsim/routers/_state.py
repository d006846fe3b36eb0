"""What a router knows by itself: it sees every request go out and every first token come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from confsim.run.request import Request, RequestState

LOOK = 8  # requests behind the oldest one whose first token is looked for at each arrival
MEMORY = 1 << 20  # prefix blocks that a router remembers
FORGET = 0.05  # share of what was learned of a target's speed that each new first token replaces


class Backlog:
    """Prompts on their way to a first token at one target, in new tokens (cached prefixes are not computed).

    Those that have it are dropped when they are met: from the oldest on, and a few further on, since a policy may
    serve out of order. So an arrival costs the same however long the queue is.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._learned = (0.0, 0.0)  # tokens, own and ahead, and the seconds until their first tokens, recent ones first
        self._waiting: deque[tuple[Request, int, int]] = deque()  # with its own new tokens, and those ahead of it

    def add(self, request: Request, new_tokens: int) -> None:
        """A request was sent."""
        self._waiting.append((request, new_tokens, self.tokens))
        self.tokens += new_tokens

    def settle(self) -> None:
        """Drop requests that have their first token."""
        waiting = self._waiting
        while waiting and _is_over(waiting[0][0]):
            self._drop(waiting.popleft())
        if len(waiting) < 2:
            return
        oldest = waiting.popleft()
        for _ in range(min(LOOK, len(waiting))):
            entry = waiting.popleft()
            if _is_over(entry[0]):
                self._drop(entry)
            else:
                waiting.append(entry)
        waiting.appendleft(oldest)

    def _drop(self, entry: tuple[Request, int, int]) -> None:
        request, own, ahead = entry
        self.tokens -= own
        if request.first_token_s >= 0:
            tokens, seconds = self._learned
            keep = 1.0 - FORGET
            self._learned = (
                keep * tokens + own + ahead,
                keep * seconds + request.first_token_s - request.arrival_s,
            )

    @property
    def pace_s(self) -> float | None:
        """Seconds to a first token for each new token ahead of it, waiting included; None before one has come."""
        tokens, seconds = self._learned
        return seconds / tokens if tokens > 0 else None


def _is_over(request: Request) -> bool:
    return request.first_token_s >= 0 or request.state is RequestState.REJECTED


class PrefixMemory:
    """Which prefix blocks were sent to which targets; their evictions are not seen, as by routers without events."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # block -> bit set of targets

    def cached_tokens(self, request: Request, targets: int) -> list[int]:
        """Leading prompt tokens that each target has seen before; the last token is always computed."""
        blocks = request.block_ids
        depth = [0] * targets
        if not blocks:
            return depth
        holders = self._holders
        left = (1 << targets) - 1
        for index, block in enumerate(blocks):
            stay = holders.get(block, 0) & left
            gone = left ^ stay
            while gone:
                bit = gone & -gone
                depth[bit.bit_length() - 1] = index
                gone ^= bit
            left = stay
            if not left:
                break
        for target in range(targets):
            if left >> target & 1:
                depth[target] = len(blocks)
        size = -(-request.prompt_tokens // len(blocks))
        return [min(count * size, request.prompt_tokens - 1) for count in depth]

    def sent(self, request: Request, target: int) -> None:
        """A request went to a target."""
        if len(self._holders) > MEMORY:
            self._holders.clear()
        bit = 1 << target
        holders = self._holders
        for block in request.block_ids:
            holders[block] = holders.get(block, 0) | bit


class View:
    """Backlogs and prefixes of all targets."""

    def __init__(self) -> None:
        self.backlogs: list[Backlog] = []
        self._prefixes = PrefixMemory()

    def new_tokens(self, request: Request, targets: Sequence[object]) -> list[int]:
        """Prompt tokens that each target would have to compute, with the backlogs brought up to date."""
        while len(self.backlogs) < len(targets):
            self.backlogs.append(Backlog())
        for backlog in self.backlogs:
            backlog.settle()
        cached = self._prefixes.cached_tokens(request, len(targets))
        return [request.prompt_tokens - tokens for tokens in cached]

    def expected_s(self, new_tokens: Sequence[int]) -> list[float]:
        """Seconds until each target would emit the first token; 0 everywhere before any has emitted one.

        A target that has not emitted any yet is taken to be as fast as the others are on average.
        """
        paces = [backlog.pace_s for backlog in self.backlogs]
        known = [pace for pace in paces if pace is not None]
        usual = sum(known) / len(known) if known else 0.0
        return [
            (backlog.tokens + own) * (usual if pace is None else pace)
            for backlog, own, pace in zip(self.backlogs, new_tokens, paces, strict=True)
        ]

    def send(self, request: Request, target: int, new_tokens: int) -> int:
        """Note where a request goes; returns the target."""
        self.backlogs[target].add(request, new_tokens)
        self._prefixes.sent(request, target)
        return target
