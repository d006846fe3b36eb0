"""One self-contained HTML page of simulation and goodput results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.pages.report.load import load_results
from analysis.pages.report.page import render
from traces.files import write_whole


def write_report(folders: Sequence[Path], path: Path, title: str | None = None) -> Path:
    """Write the page of the results in `folders` to `path`, in one step, and return it.

    Raises:
        InputError: if a folder does not exist or holds no result.
    """
    return write_whole(path, render(load_results(folders), title))
