"""Real ranks that execute iteration plans on real tensors.

Importing this package loads no torch: the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.backend import LiveBackend as LiveBackend
    from executor.config import Device as Device
    from executor.config import ExecutorConfig as ExecutorConfig
    from executor.config import Layout as Layout
    from executor.config import ModelConfig as ModelConfig
    from executor.config import Sampling as Sampling
    from executor.config import read_model as read_model
    from executor.errors import RankError as RankError
    from executor.runtime import ExecutedIteration as ExecutedIteration
    from executor.runtime import Runtime as Runtime

HOMES = {
    "Device": "config",
    "ExecutedIteration": "runtime",
    "ExecutorConfig": "config",
    "Layout": "config",
    "LiveBackend": "backend",
    "ModelConfig": "config",
    "RankError": "errors",
    "Runtime": "runtime",
    "Sampling": "config",
    "read_model": "config",
}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'executor' has no attribute {name!r}")
    return getattr(importlib.import_module(f"executor.{HOMES[name]}"), name)
