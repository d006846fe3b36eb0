"""Failures of ranks."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank failed: one line with rank, iteration and cause; `details` holds the rank's traceback if there is one."""

    def __init__(self, message: str, rank: int, cause: str, details: str = "") -> None:
        super().__init__(message, rank, cause, details)  # all of them: an event loop raises a copy made of `args`
        self.rank = rank
        self.cause = cause
        self.details = details

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLostError(RuntimeError):
    """A collective broke because another rank failed; never the root cause."""
