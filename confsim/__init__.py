"""confsim: trace-driven simulation of LLM serving.

cfg = confsim.compose(["scheme=conflux", "rate=3"])
result = confsim.simulate(cfg)
result.requests.to_pandas()
frame = confsim.sweep(["scheme=conflux"], {"rate": [1, 2, 3], "seed": [0, 1]})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from confsim.setup import native, search_path

if TYPE_CHECKING:
    from confsim.api import Result as Result
    from confsim.api import build as build
    from confsim.api import compose as compose
    from confsim.api import load_trace as load_trace
    from confsim.api import simulate as simulate

    sweep: Any  # analysis.sweep.api.sweep(base, axes, ...) -> pandas.DataFrame

native.activate()
search_path.activate()

MODULES = {
    "Result": "confsim.api",
    "build": "confsim.api",
    "compose": "confsim.api",
    "load_trace": "confsim.api",
    "simulate": "confsim.api",
    "sweep": "analysis.sweep.api",
}
__all__ = ["Result", "build", "compose", "load_trace", "simulate", "sweep"]


def __dir__() -> list[str]:
    return sorted([*globals(), *MODULES])


def __getattr__(name: str) -> Any:
    """Load the library on first use, so that importing a part of it stays quick."""
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    raise AttributeError(f"module 'confsim' has no attribute {name!r}")
