"""How an iteration runs on each arrangement of ranks; all of them are made of the same parts.

A layout is a file with the class `Kind`, here or a user's own; its name is the value of `executor.layout.kind`.
"""

from __future__ import annotations

from functools import cache

from confsim.setup.registry import REGISTRIES
from executor.layouts.base import LayoutKind

LAYOUTS = REGISTRIES["layout"]


@cache
def layout_kind(name: str) -> LayoutKind:
    """The layout of that name.

    Raises:
        InputError: for an unknown name; the message lists the known ones.
    """
    kind: LayoutKind = LAYOUTS.make(name)
    return kind


def live_kinds() -> dict[str, str]:
    """The layout that runs a scheme under `backend=live`, by scheme."""
    return {scheme: name for name in LAYOUTS.names() for scheme in layout_kind(name).live_schemes}
