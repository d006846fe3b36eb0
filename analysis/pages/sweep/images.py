"""Figures as PNG or SVG files, through kaleido and a browser where both are there. Never required.

Drawing happens in a process of its own with a time limit, since a browser that does not start may never answer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confsim.errors import InputError

FORMATS = ("png", "svg")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIME_LIMIT_S = 60.0
EACH_S = 5.0  # more for every figure
INK = {"font": {"color": "#1c2024", "size": 13}, "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff"}
WIDTH = 900


def write_images(
    figures: Sequence[tuple[str, dict[str, Any]]], folder: Path, kind: str, limit_s: float = TIME_LIMIT_S
) -> list[str]:
    """Write `folder/NAME.kind` for every figure; returns a warning if that cannot be done.

    Raises:
        InputError: for an unknown format.
    """
    if kind not in FORMATS:
        raise InputError(f"images={kind}: use {' or '.join(FORMATS)}, or null for none")
    if importlib.util.find_spec("kaleido") is None:
        return [f"no {kind} images: kaleido is not installed (pip install 'confsim[images]'); the page needs none"]
    browser = browser_path()
    if browser is None:
        return [f"no {kind} images: no Chrome or Chromium found (set BROWSER_PATH); the page needs none"]
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        {
            "figure": {"data": figure["data"], "layout": {**figure["layout"], **INK}},
            "path": str(folder / f"{name}.{kind}"),
        }
        for name, figure in figures
    ]
    try:
        done = subprocess.run(
            (sys.executable, "-m", "analysis.pages.sweep.images"),
            input=json.dumps(jobs),
            text=True,
            capture_output=True,
            timeout=limit_s + EACH_S * len(jobs),
            check=False,
            env={**os.environ, "BROWSER_PATH": browser, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return [f"no {kind} images: the browser {browser} did not answer in time; the page needs none"]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return [f"no {kind} images: {lines[-1]}; the page needs none"]
    return []


def browser_path() -> str | None:
    """A browser that kaleido can drive."""
    given = os.environ.get("BROWSER_PATH")
    return given or next((path for name in BROWSERS if (path := shutil.which(name))), None)


def main() -> None:
    """Draw the figures of standard input."""
    import plotly.io

    for job in json.load(sys.stdin):
        height = job["figure"]["layout"].get("height", 400)
        plotly.io.write_image(job["figure"], job["path"], width=WIDTH, height=height, scale=2)


if __name__ == "__main__":
    main()
