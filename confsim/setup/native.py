"""The event loop's inner modules as machine code: compiled by mypyc where a C compiler is, interpreted elsewhere.

Both are the same sources and give the same bytes; machine code is about twice as fast. A build lies in
`confsim/_native/`, in a folder named after the interpreter and a digest of the sources, so that one that does not
match what is imported is never used. `CONFSIM_NATIVE=0` runs the sources. `confsim.setup.compiling` makes builds.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
BUILDS = PACKAGE / "_native"
MODULES = (
    "kv.pools",
    "latency.compiled",
    "policies.dispatch.even",
    "policies.dispatch.waterfill",
    "policies.heap",
    "run.holders",
    "run.ledger",
    "run.loop",
    "run.model_backend",
    "run.plan",
    "run.record",
    "run.request",
    "run.serving",
    "schemes.admission",
    "schemes.base",
    "schemes.cobatch",
    "schemes.cost",
    "schemes.disagg.decode",
    "schemes.disagg.prefill",
    "schemes.elastic.allocation",
    "schemes.elastic.batch",
    "schemes.elastic.batching",
    "schemes.elastic.decoding",
    "schemes.elastic.dispatch",
    "schemes.elastic.gate",
    "schemes.elastic.instance",
    "schemes.elastic.law",
    "schemes.elastic.macro",
    "schemes.elastic.masters",
    "schemes.elastic.prefilling",
    "schemes.elastic.ring",
    "schemes.elastic.slots",
    "schemes.elastic.state",
    "schemes.fill",
    "schemes.inbox",
    "schemes.mux_cost",
    "schemes.mux_loops",
    "schemes.mux_prefill",
)
INTERPRETER = EXTENSION_SUFFIXES[0].split(".")[1]  # its version and platform, as extension modules are named


def build_folder() -> Path:
    """Where the build of these sources for this interpreter lies, or would lie."""
    digest = hashlib.sha256()
    for module in MODULES:
        digest.update(source(module).read_bytes())
    return BUILDS / f"{INTERPRETER}-{digest.hexdigest()[:16]}"


def activate() -> bool:
    """Import the compiled modules from now on, if there is a build of these sources; whether there is."""
    if os.environ.get("CONFSIM_NATIVE", "1") == "0" or not BUILDS.is_dir():
        return False
    folder = build_folder()
    if not folder.is_dir():
        return False
    sys.meta_path.insert(0, _Finder(folder))
    return True


def active() -> bool:
    """Whether compiled modules are imported."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(MetaPathFinder):
    """Finds the modules of one build."""

    def __init__(self, folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        self._files = {
            ".".join([*path.relative_to(folder).parent.parts, path.name.split(".")[0]]): str(path) for path in files
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a compiled module, None for all others."""
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def source(module: str) -> Path:
    """The file of one of `MODULES`."""
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
