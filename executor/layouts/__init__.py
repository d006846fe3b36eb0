"""How an iteration runs on each arrangement of ranks; all of them are made of the same parts.

A layout is a file with the class `Kind`; its name is the value of `executor.layout.kind`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from confsim.errors import InputError
from executor.layouts.base import LayoutKind

PREFERRED = ("xp", "tp", "sp", "mux")  # the order in which they are listed


@cache
def names() -> list[str]:
    """Every layout."""
    found = {module.name for module in pkgutil.iter_modules(__path__)} - {"base"}
    return sorted(found, key=lambda name: (PREFERRED.index(name) if name in PREFERRED else len(PREFERRED), name))


@cache
def layout_kind(name: str) -> LayoutKind:
    """The layout of that name.

    Raises:
        InputError: for an unknown name; the message lists the known ones.
    """
    if name not in names():
        raise InputError(f"executor.layout.kind={name}: unknown, use one of {', '.join(names())}")
    kind: LayoutKind = importlib.import_module(f"{__name__}.{name}").Kind()
    return kind


def live_kinds() -> dict[str, str]:
    """The layout that runs a scheme under `backend=live`, by scheme."""
    return {scheme: name for name in names() for scheme in layout_kind(name).live_schemes}
