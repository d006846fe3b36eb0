"""`confsim validate`: the module of the chosen source does the work."""

from __future__ import annotations

from importlib import import_module

from omegaconf import DictConfig

from confsim.errors import InputError

SOURCES = {"silicon": "analysis.validate.silicon", "executor": "analysis.validate.executor"}


def command(cfg: DictConfig) -> int | None:
    """Validate against `cfg.source`; without one, against our own executor where `executor=...` is given.

    Raises:
        InputError: for a source that there is not, and for a user's mistake.
    """
    source = cfg.source or ("silicon" if cfg.get("executor") is None else "executor")
    if source not in SOURCES:
        raise InputError(f"source={source}: unknown, use one of {', '.join(SOURCES)}")
    code: int | None = import_module(SOURCES[source]).command(cfg)
    return code
