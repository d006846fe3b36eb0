"""Decode where the total context is smallest."""

from __future__ import annotations

from collections.abc import Sequence

from confsim.policies.base import GroupLoad


class Placement:
    """The group with the smallest total decode context among those with room; ties to the lower group."""

    def __init__(self, threshold: float = 1.0) -> None:
        self._threshold = threshold  # unused by this rule; placements are built alike

    def choose(self, groups: Sequence[GroupLoad], need_units: int) -> int:
        """The group, or -1."""
        fitting = [g for g in groups if g.available_units >= need_units]
        return min(fitting, key=lambda g: (g.context_tokens, g.group)).group if fitting else -1
