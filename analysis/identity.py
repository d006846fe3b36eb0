"""What makes two runs the same: resolved configuration, trace content, latency profile and code version."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from confsim.errors import InputError
from confsim.setup.cache import code_digest, named_files
from confsim.setup.provenance import digest
from confsim.setup.registry import foreign_modules

RESULTLESS = ("cache", "output", "quiet", "resume", "sweep")  # top-level keys that no result depends on
CODE = ("confsim", "traces")
SEARCH = ("analysis.search",)  # of a goodput search
EXTRAS = ("band", "timeline")  # of `output`
LIBRARIES = ("numpy", "simpy")  # whose version may change a number
ID_DIGITS = 32


@dataclass(frozen=True)
class Identity:
    """The hash `id`, and what went into it (plain JSON data)."""

    id: str
    parts: dict[str, Any]


class Identifier:
    """Names runs; hashes of files and latency profiles are taken once."""

    def __init__(self) -> None:
        self._profiles: dict[str, str | None] = {}

    def __call__(self, command: str, config: Mapping[str, Any]) -> Identity:
        """The identity of a run of `command` with a resolved configuration."""
        parts = {
            "command": command,
            "config": digest(relevant(config)),
            "content": named_files({key: config[key] for key in config if key not in RESULTLESS}),
            "profile": self._profile({group: config.get(group) for group in ("latency", "model", "gpu")}),
            "code": code_version(command, config),
        }
        return Identity(digest(parts)[:ID_DIGITS], parts)

    def _profile(self, groups: dict[str, Any]) -> str | None:
        """Hash of the latency profile; None where the configuration has none that loads (the run will say why)."""
        key = digest(groups)
        if key not in self._profiles:
            self._profiles[key] = _profile_hash(groups)
        return self._profiles[key]


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved configuration that results depend on."""
    kept = {key: value for key, value in config.items() if key not in RESULTLESS}
    output = config.get("output") or {}
    kept["output"] = [key for key in EXTRAS if output.get(key) is True]  # files and figures that a run has or not
    if isinstance(kept.get("goodput"), Mapping):
        kept["goodput"] = {key: value for key, value in kept["goodput"].items() if key != "workers"}
    return kept


def _profile_hash(groups: dict[str, Any]) -> str | None:
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        parts = {group: instantiate(value, _convert_="all") for group, value in groups.items() if value is not None}
        return str(parts["latency"].describe(parts["model"], parts["gpu"])["profile_hash"])
    except (InputError, InstantiationException, KeyError, TypeError, AttributeError):
        return None


def code_version(command: str, config: Mapping[str, Any]) -> str:
    """Hash of the sources that a run executes, those of a user's own classes included, and of key versions."""
    own = [*CODE, *(SEARCH if command == "goodput" else ())]
    foreign = {"executor" if name.startswith("executor.") else name for name in foreign_modules(config)}
    foreign = {name for name in foreign if name.split(".")[0] not in CODE}
    return digest([code_digest(*own, *sorted(foreign)), _libraries()])


@cache
def _libraries() -> tuple[str, ...]:
    python = ".".join(platform.python_version_tuple()[:2])
    return (f"python {python}", *(f"{name} {metadata.version(name)}" for name in LIBRARIES))
