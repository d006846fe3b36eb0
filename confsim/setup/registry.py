"""Every kind of thing that a configuration names and a user may add: where its names come from.

Most are config groups too: a name is then a file of the group, in `conf/` or in a folder on CONFSIM_PATH
(`confsim.setup.search_path`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from traces.registry import READERS, Registry

ORDERS = Registry("policy.order", "confsim.policies.order", "Order", "confsim.orders")
DISPATCHES = Registry("policy.dispatch", "confsim.policies.dispatch", "Dispatch", "confsim.dispatches")
PLACEMENTS = Registry("policy.placement", "confsim.policies.placement", "Placement", "confsim.placements")
ROUTERS = Registry("cluster.router", "confsim.routers", "Router", "confsim.routers")

# Kinds whose names are values of a key, by the word that `confsim list` knows them by. Executor layouts and sources
# of `confsim fit` are in rooms that this one does not import; their folders are read by name.
REGISTRIES = {
    "order": ORDERS,
    "dispatch": DISPATCHES,
    "placement": PLACEMENTS,
    "router": ROUTERS,
    "format": READERS,
    "layout": Registry("executor.layout.kind", "executor.layouts", "Kind", "confsim.layouts"),
    "source": Registry("source", "analysis.calibrate.sources", "Source", "confsim.sources"),
}
KEYS = (*(registry.key for registry in REGISTRIES.values()), "scheme.router")

# Kinds whose choices are config groups, by the entry point group that adds to them.
GROUPS = {
    "scheme": "confsim.schemes",
    "latency": "confsim.latency",
    "trace": "confsim.traces",
    "arrivals": "confsim.arrivals",
}


def foreign_modules(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Modules that a resolved configuration names: of every `_target_`, and of dotted paths where a name is due."""
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from foreign_modules(value, path)
        elif isinstance(value, str) and "." in value and (key == "_target_" or path.removesuffix(".name") in KEYS):
            yield value.rpartition(".")[0]
