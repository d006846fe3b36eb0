"""`confsim compile`: the modules that `confsim.setup.native` finds, made by mypyc and the C compiler that is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from confsim.setup import native

SAID = 200  # letters of what the compiler said
KEEP_S = 86_400.0  # older builds than this are removed by the next one; younger ones may be in use
# No fused multiply-add, which rounds once where the interpreter rounds twice.
FLAGS = "" if os.name == "nt" else "-ffp-contract=off"


def build() -> Path:
    """Compile, unless that was done; returns the build's folder.

    Raises:
        InputError: without mypyc or a C compiler, or where the folder cannot be written.
    """
    folder = native.build_folder()
    if folder.is_dir():
        return folder
    try:
        import mypyc  # noqa: F401
    except ImportError as error:
        raise InputError("mypyc is not installed: pip install 'confsim[compile]'") from error
    try:
        native.BUILDS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=native.BUILDS, prefix=".build-") as scratch:
            done = _compile(Path(scratch))
            for old in native.BUILDS.iterdir():
                if time.time() - old.stat().st_mtime > KEEP_S:
                    shutil.rmtree(old, ignore_errors=True)
            done.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # another process may have been faster
            raise InputError(f"{native.BUILDS}: cannot be written ({error.strerror or error})") from error
    return folder


def _compile(scratch: Path) -> Path:
    """Run mypyc on a copy of the package; returns a folder with nothing but the extension modules."""
    work = scratch / "work"
    shutil.copytree(
        native.PACKAGE, work / "confsim", ignore=shutil.ignore_patterns("_native", "__pycache__", "profiles")
    )
    files = [str(native.source(module).relative_to(native.PACKAGE.parent)) for module in native.MODULES]
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
    if not native.build_folder().is_dir():
        say(f"compiling {len(native.MODULES)} modules (about a minute, once)")
    say(f"compiled: {build()}")
