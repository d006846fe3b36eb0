"""Where a result comes from: package versions, the commit of the source checkout, content hashes."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
PACKAGES = ("confsim", "hydra-core", "numpy", "omegaconf", "pandas", "plotly", "pyarrow", "simpy")
ROOMS = ("confsim", "traces", "analysis", "executor", "conf", "pyproject.toml")  # what may change a result


def provenance(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """The part of a result's provenance that every kind of result shares, as plain JSON data."""
    return {"config": config, "seed": seed, "versions": versions(), **source_state()}


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, UNKNOWN))
    return tuple(found)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    return dict(_versions())


def source_state(root: Path | None = None) -> dict[str, Any]:
    """Commit of the checkout that this code runs from, and whether its sources differ from it.

    Both are "unknown" where the code is not the top of a git checkout (an installed wheel, say), or git is missing.
    """
    return dict(_source_state(root or Path(__file__).resolve().parents[2]))


@cache
def _source_state(root: Path) -> tuple[tuple[str, Any], ...]:
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != root:
        return (("git_commit", UNKNOWN), ("git_dirty", UNKNOWN))
    changed = _git(root, "status", "--porcelain", "--", *ROOMS)
    return (("git_commit", commit), ("git_dirty", UNKNOWN if changed is None else bool(changed)))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", "-C", str(root), *arguments), capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def digest(value: Any) -> str:
    """SHA-256 of plain JSON data, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
