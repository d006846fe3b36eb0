"""Folders of the user's own, on CONFSIM_PATH or given by `--config-dir`: YAML files and Python modules in one place.

A folder has the groups that `conf/` has, such as `gpu/b300.yaml`, and Python files beside them: `aging.py` in it is the
module `aging`. Packaged choices of the same name win.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PATH_ENV = "CONFSIM_PATH"


def folders() -> list[Path]:
    """The user's folders, in the order in which they are searched."""
    given = os.environ.get(PATH_ENV, "")
    return [Path(folder).expanduser().absolute() for folder in given.split(os.pathsep) if folder]


def add(folder: str) -> None:
    """Search a folder first from now on, in this process and in those that it starts."""
    known = [str(path) for path in folders()]
    os.environ[PATH_ENV] = os.pathsep.join([str(Path(folder).expanduser().absolute()), *known])
    activate()


def activate() -> None:
    """Let Python find modules in these folders."""
    sys.path += [str(folder) for folder in folders() if str(folder) not in sys.path]
