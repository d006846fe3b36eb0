"""The event loop's inner modules as machine code: compiled by mypyc where a C compiler is, interpreted elsewhere.

Both are the same sources and give the same bytes; machine code is two to three times faster. A build lies in
`confsim/_native/`, in a folder named after the interpreter and a digest of the sources, so that one that does not
match what is imported is never used. `CONFSIM_NATIVE=0` runs the sources.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from confsim.errors import InputError

PACKAGE = Path(__file__).resolve().parent
BUILDS = PACKAGE / "_native"
MODULES = (
    "kv",
    "latency.compiled",
    "ledger",
    "loop",
    "model_backend",
    "plan",
    "policies.dispatch.even",
    "policies.dispatch.waterfill",
    "policies.heap",
    "record",
    "request",
    "schemes.base",
    "schemes.cobatch",
    "schemes.cost",
    "schemes.fill",
    "schemes.holders",
)
SAID = 200  # letters of what the compiler said
KEEP_S = 86_400.0  # older builds than this are removed by the next one; younger ones may be in use
# No fused multiply-add, which rounds once where the interpreter rounds twice.
FLAGS = "" if os.name == "nt" else "-ffp-contract=off"


def build_folder() -> Path:
    """Where the build of these sources for this interpreter lies, or would lie."""
    digest = hashlib.sha256()
    for module in MODULES:
        digest.update(_source(module).read_bytes())
    return BUILDS / f"{sysconfig.get_config_var('SOABI') or sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


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


def build() -> Path:
    """Compile, unless that was done; returns the build's folder.

    Raises:
        InputError: without mypyc or a C compiler, or where the folder cannot be written.
    """
    folder = build_folder()
    if folder.is_dir():
        return folder
    try:
        import mypyc  # noqa: F401
    except ImportError as error:
        raise InputError("mypyc is not installed: pip install 'confsim[compile]'") from error
    try:
        BUILDS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS, prefix=".build-") as scratch:
            done = _compile(Path(scratch))
            for old in BUILDS.iterdir():
                if time.time() - old.stat().st_mtime > KEEP_S:
                    shutil.rmtree(old, ignore_errors=True)
            done.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # another process may have been faster
            raise InputError(f"{BUILDS}: cannot be written ({error.strerror or error})") from error
    return folder


def _compile(scratch: Path) -> Path:
    """Run mypyc on a copy of the package; returns a folder with nothing but the extension modules."""
    work = scratch / "work"
    shutil.copytree(PACKAGE, work / "confsim", ignore=shutil.ignore_patterns("_native", "__pycache__", "profiles"))
    files = [str(_source(module).relative_to(PACKAGE.parent)) for module in MODULES]
    options = ["--config-file=", "--strict", "--ignore-missing-imports", "--follow-imports=silent"]
    environment = os.environ | {"CFLAGS": f"{os.environ.get('CFLAGS', '')} {FLAGS}", "MYPYC_DEBUG_LEVEL": "0"}
    run = subprocess.run(
        [sys.executable, "-m", "mypyc", *options, *files], cwd=work, env=environment, capture_output=True, text=True
    )
    if run.returncode:
        lines = (run.stdout + run.stderr).strip().splitlines() or ["no message"]
        said = next((line for line in lines if "error:" in line), lines[-1])
        raise InputError(f"the C compiler or mypyc failed, nothing was compiled: {said.strip()[:SAID]}")
    out = scratch / "out"
    for path in work.rglob("*"):
        if path.name.endswith(tuple(EXTENSION_SUFFIXES)) and "build" not in path.relative_to(work).parts:
            target = out / path.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
    return out


def command(cfg: Any) -> None:
    """`confsim compile`: build and say so.

    Raises:
        InputError: where nothing can be compiled.
    """
    say = (lambda line: None) if cfg.quiet else print
    if not build_folder().is_dir():
        say(f"compiling {len(MODULES)} modules (half a minute, once)")
        build()
    say(f"compiled: {build_folder()}")


def _source(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
