"""A profile on one layout, compiled to lists and plain arithmetic: what schemes call in their inner loops."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from confsim.latency.base import DecodeLine
from confsim.latency.mixed import MixedAttention


@dataclass(slots=True, repr=False)
class Dense:
    """Seconds at 0, 1, 2, ... units of work, and the slope beyond the list."""

    values: list[float]
    slope: float

    @property
    def last(self) -> int:
        """The largest work that the list covers."""
        return len(self.values) - 1

    def beyond(self, work: int) -> float:
        """Seconds past the end of the list, along the last slope."""
        return self.values[-1] + self.slope * (work - self.last)


@dataclass(slots=True, repr=False)
class DecodeRow:
    """Decode attention for one number of sequences: a line from each knot on."""

    knots: list[int]  # total context where a piece starts; the first is 0
    value: list[float]  # seconds at the knot
    slope: list[float]
    limit: float  # total context that measurements cover


@dataclass(slots=True, repr=False)
class CompiledLatency:
    """Implements `confsim.latency.base.LatencyModel` on tables of seconds for all layers of the model.

    The lists are public so that a scheduler can index or bisect them directly: `linear.values[tokens]`,
    `exchange.values[shard]`, and prefill attention, which is `prefill_own.values[n] + c * prefill_cached.values[n]` for
    `n` tokens behind `c` cached ones. Reading them directly bypasses the count of `extrapolations`.
    """

    tp: int
    sp: int
    prefill_slowdown: float
    decode_slowdown: float
    linear: Dense
    prefill_own: Dense
    prefill_cached: Dense
    exchange: Dense
    head: Dense
    transfer: Dense
    iteration_overhead_s: float
    sequence_overhead_s: float
    decode_row: Callable[[int], DecodeRow]
    decode_limit: int  # sequences that measurements cover
    prefill_square: float  # beyond the list: seconds a squared token (own attention keeps its last efficiency)
    prefill_limit: int  # tokens of a chunk that measurements cover
    linear_limit: int
    exchange_limit: int
    head_limit: int
    transfer_limit: int
    transfer_step: int  # tokens a step of `transfer`
    mixed_overhead_s: float = 0.0
    mixed: MixedAttention | None = None
    collective: Dense = field(default_factory=lambda: Dense([0.0], 0.0))  # all-reduces within `linear`
    extrapolations: int = 0
    rows: list[DecodeRow | None] = field(default_factory=list)

    def linear_s(self, tokens: int) -> float:
        """One look-up."""
        if tokens > self.linear_limit:
            self.extrapolations += 1
        try:
            return self.linear.values[tokens]
        except IndexError:
            return self.linear.beyond(tokens)

    def collective_s(self, tokens: int) -> float:
        """One look-up."""
        try:
            return self.collective.values[tokens]
        except IndexError:
            return self.collective.beyond(tokens)

    def _row(self, sequences: int) -> DecodeRow:
        rows = self.rows
        if sequences >= len(rows):
            rows.extend([None] * (sequences + 1 - len(rows)))
        row = rows[sequences]
        if row is None:
            row = rows[sequences] = self.decode_row(sequences)
        return row

    def decode_attention_s(self, sequences: int, context_tokens: int) -> float:
        """The piece of the row of `sequences` that holds the context."""
        if sequences <= 0:
            return 0.0
        try:
            row = self.rows[sequences]
        except IndexError:
            row = None
        if row is None:
            row = self._row(sequences)
        if context_tokens > row.limit or sequences > self.decode_limit:
            self.extrapolations += 1
        piece = bisect_right(row.knots, context_tokens) - 1
        return row.value[piece] + row.slope[piece] * (context_tokens - row.knots[piece])

    def decode_attention_line(self, sequences: int, context_tokens: int) -> DecodeLine:
        """The piece itself; `valid_until` is the first token of the next one, where both agree."""
        if sequences <= 0:
            return DecodeLine(0.0, 0.0, float("inf"))
        row = self._row(sequences)
        if context_tokens > row.limit or sequences > self.decode_limit:
            self.extrapolations += 1
        piece = bisect_right(row.knots, context_tokens) - 1
        slope = row.slope[piece]
        end = float(row.knots[piece + 1]) if piece + 1 < len(row.knots) else float("inf")
        return DecodeLine(row.value[piece] + slope * (context_tokens - row.knots[piece]), slope, end)

    def prefill_attention_s(self, tokens: int, cached_tokens: int) -> float:
        """Own attention of the chunk plus the cached tokens at a cost each that depends on the chunk."""
        if tokens <= self.prefill_limit:
            return self.prefill_own.values[tokens] + cached_tokens * self.prefill_cached.values[tokens]
        self.extrapolations += 1
        own, cached = self.prefill_own, self.prefill_cached
        if tokens <= own.last:
            return own.values[tokens] + cached_tokens * cached.values[tokens]
        square = self.prefill_square * (float(tokens) * tokens - float(own.last) * own.last)
        return own.values[-1] + square + cached_tokens * cached.beyond(tokens)

    def all_to_all_s(self, shard_tokens: int) -> float:
        """One look-up; nothing is exchanged by one group."""
        if shard_tokens > self.exchange_limit:
            self.extrapolations += 1
        try:
            return self.exchange.values[shard_tokens]
        except IndexError:
            return self.exchange.beyond(shard_tokens)

    def head_s(self, tokens: int) -> float:
        """One look-up."""
        if tokens > self.head_limit:
            self.extrapolations += 1
        try:
            return self.head.values[tokens]
        except IndexError:
            return self.head.beyond(tokens)

    def overhead_s(self, sequences: int) -> float:
        """A constant an iteration and one a sequence."""
        return self.iteration_overhead_s + self.sequence_overhead_s * sequences if sequences else 0.0

    def kv_transfer_s(self, tokens: int) -> float:
        """Linear between steps of `transfer_step` tokens."""
        if tokens > self.transfer_limit:
            self.extrapolations += 1
        step, rest = divmod(tokens, self.transfer_step)
        values = self.transfer.values
        if step + 1 < len(values):
            return values[step] + (values[step + 1] - values[step]) * rest / self.transfer_step
        return values[-1] + self.transfer.slope * (tokens - self.transfer.last * self.transfer_step)
