"""One self-contained HTML page of simulation and goodput results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from analysis.pages.report.load import load_results
from analysis.pages.report.page import render


def write_report(folders: Sequence[Path], path: Path, title: str | None = None) -> Path:
    """Write the page of the results in `folders` to `path`, in one step, and return it.

    Raises:
        InputError: if a folder does not exist or holds no result.
    """
    return write_page(path, render(load_results(folders), title))


def write_page(path: Path, text: str) -> Path:
    """Write a page in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


__all__ = ["write_page", "write_report"]
