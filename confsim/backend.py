"""The protocol by which a scheme has its plans timed: by a model, or by real ranks."""

from __future__ import annotations

from typing import Protocol

from confsim.plan import IterationPlan, IterationTiming


class Backend(Protocol):
    """Times iteration plans in the order in which they are submitted."""

    def submit(self, plan: IterationPlan) -> None:
        """Start an iteration; the decode batches of `plan` may not change until `result` returns."""

    def result(self) -> IterationTiming:
        """Wait for the iteration submitted last and return its timing."""

    def close(self) -> None:
        """Release what the backend holds; harmless when repeated."""
