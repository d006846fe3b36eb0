"""Equalise prefill plus decode tokens over the groups."""

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Dispatch:
    """Groups above the level take nothing; sums are exact.

    With the level L = least integer at which sum(max(0, L - decode)) >= tokens, every group below L is filled to L,
    and the excess is taken back one token each, from the groups with the fewest decodes (the largest shards) first.
    """

    def __init__(self, decode_tokens: Sequence[int]) -> None:
        self._decode = tuple(decode_tokens)
        self._sorted = sorted(self._decode)
        self._least = self._sorted[0]
        self._most = self._sorted[-1]
        self._at_least = self._sorted.count(self._least)
        self._groups = len(self._decode)
        self._total = sum(self._decode)

    def _fill(self, tokens: int) -> tuple[int, int]:
        """Least level at which `tokens` fit, and the tokens short of filling it."""
        groups = self._groups
        level = -(-(tokens + self._total) // groups)
        if level > self._most:  # every group takes some, the usual case
            return level, level * groups - tokens - self._total
        total = tokens
        for count, decode in enumerate(self._sorted):
            if count and total <= decode * count:  # filled before this group is reached
                level = -(-total // count)
                return level, level * count - total
            total += decode
        raise AssertionError("the level lies above every group, which was ruled out")

    def peak(self, tokens: int) -> tuple[int, int]:
        """Largest stacked tokens and largest prefill shard."""
        if tokens <= 0:
            return self._most, 0
        level, excess = self._fill(tokens)
        return max(level, self._most), level - self._least - (excess >= self._at_least)

    def spread(self, tokens: int) -> tuple[int, ...]:
        """Prefill tokens of each group."""
        if tokens <= 0:
            return (0,) * len(self._decode)
        level, excess = self._fill(tokens)
        shares = [level - decode if level > decode else 0 for decode in self._decode]
        if excess:
            by_load = sorted(range(len(shares)), key=self._decode.__getitem__)
            for group in by_load[:excess]:
                shares[group] -= 1
        return tuple(shares)

    def capacity(self, level: int) -> int:
        """Tokens that keep every group that takes some at `level` or below."""
        if level >= self._most:
            return level * self._groups - self._total
        return sum(max(0, level - decode) for decode in self._decode)
