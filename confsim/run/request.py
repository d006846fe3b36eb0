"""A request as the schedulers see it: its progress, never its output length."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class RequestState(StrEnum):
    """Where a request is between its arrival and its end."""

    QUEUED = "queued"  # waits for its first chunk, or again after a preemption
    PREFILL = "prefill"  # has KV for its prompt and tokens of it to compute
    TRANSFER = "transfer"  # its last chunk runs, or its KV is on the way to where it decodes
    LANDED = "landed"  # its KV is where it decodes, from the next iteration on
    DECODE = "decode"  # gets a token from every iteration
    PAUSED = "paused"  # keeps its KV and steps in no loop
    SWAPPED = "swapped"  # its KV waits in host memory
    COMPLETED = "completed"
    REJECTED = "rejected"


NEXT_STATES: dict[RequestState, frozenset[RequestState]] = {
    # LANDED and PAUSED: requests whose prompt's KV exists when they come, as in scenarios
    RequestState.QUEUED: frozenset(
        {
            RequestState.PREFILL,
            RequestState.TRANSFER,
            RequestState.LANDED,
            RequestState.PAUSED,
            RequestState.REJECTED,
        }
    ),
    # LANDED, PAUSED, COMPLETED: where no KV moves, at the end of the last chunk; QUEUED: preempted
    RequestState.PREFILL: frozenset(
        {
            RequestState.QUEUED,
            RequestState.TRANSFER,
            RequestState.LANDED,
            RequestState.PAUSED,
            RequestState.COMPLETED,
        }
    ),
    RequestState.TRANSFER: frozenset({RequestState.LANDED, RequestState.COMPLETED}),
    RequestState.LANDED: frozenset({RequestState.DECODE}),
    RequestState.DECODE: frozenset(
        {RequestState.QUEUED, RequestState.PAUSED, RequestState.SWAPPED, RequestState.COMPLETED}
    ),
    RequestState.PAUSED: frozenset({RequestState.DECODE}),
    RequestState.SWAPPED: frozenset({RequestState.DECODE}),
    RequestState.COMPLETED: frozenset(),
    RequestState.REJECTED: frozenset(),
}


class Slice(NamedTuple):
    """Token times `timelines[timeline][start:stop]`, one token an iteration end."""

    timeline: int
    start: int
    stop: int


class Request:
    """Progress of one request. How many tokens it will emit is known to the engine's `Oracle` alone."""

    __slots__ = (
        "arrival_s",
        "block_ids",
        "cached",
        "emitted",
        "first_token_s",
        "found",
        "group",
        "id",
        "instance",
        "preemptions",
        "prefill_done_s",
        "prefill_start_s",
        "prefilled",
        "prompt_tokens",
        "reached",
        "reason",
        "recomputed_before",
        "slices",
        "state",
        "target_tokens",
        "ttft_limit_s",
    )

    def __init__(
        self,
        id: int,
        arrival_s: float,
        prompt_tokens: int,
        ttft_limit_s: float = float("inf"),
        block_ids: tuple[int, ...] = (),
    ) -> None:
        self.id = id  # row of the load
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.ttft_limit_s = ttft_limit_s
        self.block_ids = block_ids  # prefix block ids, in kv blocks of the simulation
        self.target_tokens = prompt_tokens  # tokens to prefill; prompt + emitted after a preemption
        self.prefilled = 0  # of target_tokens, cached prefix included
        self.cached = 0  # prompt tokens found in the prefix cache instead of being computed, each at most once
        self.found = 0  # tokens of KV that were there already when it was admitted last
        self.reached = 0  # tokens whose KV it has had before it was preempted
        self.recomputed_before = 0  # tokens computed again up to the last preemption
        self.emitted = 0  # tokens out, as of the last join or leave
        self.group = -1  # decode group
        self.instance = 0
        self.preemptions = 0
        self.state = RequestState.QUEUED
        self.reason = ""  # why it was rejected
        self.prefill_start_s = -1.0  # start of the iteration of its first chunk
        self.prefill_done_s = -1.0
        self.first_token_s = -1.0
        self.slices: list[Slice | float] = []  # token times in order: slices of timelines and single times

    @property
    def deadline_s(self) -> float:
        """When the first token is due."""
        return self.arrival_s + self.ttft_limit_s

    @property
    def remaining_prefill(self) -> int:
        """Tokens still to prefill."""
        return self.target_tokens - self.prefilled

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again because preemption took their KV away."""
        return self.recomputed_before + max(0, min(self.prefilled, self.reached) - self.found)

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV is complete, while it is in prefill or decode: all but the last emitted one."""
        decodes = self.state is RequestState.DECODE
        return self.prompt_tokens + self.emitted - 1 if decodes else self.prefilled

    def find(self, tokens: int) -> None:
        """Admitted with KV of its first `tokens` there; those of the prompt that it never had are hits."""
        self.found = self.prefilled = tokens
        self.cached += self._first_hits(tokens)

    def lose(self) -> None:
        """Undo `find`: the admission came to nothing."""
        self.cached -= self._first_hits(self.found)
        self.found = self.prefilled = 0

    def _first_hits(self, tokens: int) -> int:
        return max(0, min(tokens, self.prompt_tokens) - self.reached)

    def move_to(self, state: RequestState) -> None:
        """Enter another state.

        Raises:
            RuntimeError: for a transition that `NEXT_STATES` does not have.
        """
        if state not in NEXT_STATES[self.state]:
            raise RuntimeError(f"request {self.id} cannot go from {self.state} to {state}")
        self.state = state

    def requeue(self) -> None:
        """Preempted: prompt and emitted tokens will be computed anew, as far as their KV is no longer there."""
        self.recomputed_before = self.recomputed_tokens
        self.reached = max(self.reached, self.stored_tokens)
        self.move_to(RequestState.QUEUED)
        self.found = self.prefilled = 0
        self.group = -1
        self.target_tokens = self.prompt_tokens + self.emitted
        self.preemptions += 1

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state}, prefilled {self.prefilled}/{self.target_tokens})"
