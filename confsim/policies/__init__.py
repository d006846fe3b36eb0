"""Queue order, dispatch over groups and decode placement."""

from confsim.policies.base import Policy as Policy

__all__ = ["Policy"]
