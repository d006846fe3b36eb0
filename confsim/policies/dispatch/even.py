"""Equal shares of prefill tokens, whatever the groups decode."""

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Dispatch:
    """Shares differ by at most one token; the first groups take the remainder."""

    def __init__(self, decode_tokens: Sequence[int]) -> None:
        self._decode = tuple(decode_tokens)
        self._groups = len(self._decode)
        self._most = max(self._decode)

    def peak(self, tokens: int) -> tuple[int, int]:
        """Largest stacked tokens and largest prefill shard."""
        share, rest = divmod(tokens, self._groups)
        if rest == 0:
            return self._most + share, share
        return max(self._most + share, max(self._decode[:rest]) + share + 1), share + 1

    def spread(self, tokens: int) -> tuple[int, ...]:
        """Prefill tokens of each group."""
        share, rest = divmod(tokens, self._groups)
        return tuple(share + (group < rest) for group in range(self._groups))

    def capacity(self, level: int) -> int:
        """Tokens that keep every group at `level` or below."""
        return max(0, level - self._most) * self._groups
