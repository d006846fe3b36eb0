"""Least context while KV is plentiful, then pack, so that room for a long session stays in one piece."""

from __future__ import annotations

from collections.abc import Sequence

from confsim.policies.base import GroupLoad
from confsim.policies.placement.least_context import Placement as LeastContext


class Placement(LeastContext):
    """Once every group's KV use passes the threshold: the fullest group that still fits."""

    def choose(self, groups: Sequence[GroupLoad], need_units: int) -> int:
        """The group, or -1."""
        if any(g.used_units <= self._threshold * g.capacity_units for g in groups):
            return super().choose(groups, need_units)
        fitting = [g for g in groups if g.available_units >= need_units]
        return max(fitting, key=lambda g: (g.used_units, -g.group)).group if fitting else -1
