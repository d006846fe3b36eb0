"""`confsim validate`: the module of the chosen source does the work."""

from __future__ import annotations

from importlib import import_module

from omegaconf import DictConfig

from confsim.errors import InputError

SOURCES = {"silicon": "analysis.validate.silicon", "executor": "analysis.validate.executor"}


def command(cfg: DictConfig) -> int | None:
    """Validate against `cfg.source`.

    Raises:
        InputError: for a source that there is not, and for a user's mistake.
    """
    if cfg.source not in SOURCES:
        raise InputError(f"source={cfg.source}: unknown, use one of {', '.join(SOURCES)}")
    code: int | None = import_module(SOURCES[cfg.source]).command(cfg)
    return code
