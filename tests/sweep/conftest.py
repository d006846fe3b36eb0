"""What the tests of sweeps share: cheap runs, and the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment() -> dict[str, str]:
    """Of processes that import this checkout and the helpers here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}


@pytest.fixture
def confsim_process(tmp_path: Path, environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Starts `confsim ...` in `tmp_path`."""

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            (sys.executable, "-m", "confsim", *words),
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    return start


@pytest.fixture
def command_line(confsim_process: Callable[..., subprocess.Popen[str]]) -> CommandLine:
    """Runs `confsim ...` to its end."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        process = confsim_process(*words)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of sweeps in this process go to the test's folder, and its helpers can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
