"""The report of a sweep: curves, heat maps, seed bands, a Pareto view, routers, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.pages.sweep.images import write_images
from analysis.pages.sweep.page import Choice, render
from analysis.pages.sweep.view import load_view
from traces.files import write_whole

__all__ = ["Choice", "write_sweep_report"]


def write_sweep_report(
    folders: Sequence[Path],
    path: Path,
    title: str | None = None,
    choice: Choice | None = None,
    images: str | None = None,
) -> tuple[Path, list[str]]:
    """Write the page of one or more sweeps to `path`; returns it, and warnings about images that could not be drawn.

    `images` is `png` or `svg`: every figure is also written to `figures/` beside the page, where kaleido and a browser
    are there.

    Raises:
        InputError: for a folder that is no sweep, a sweep without results, or a key that it does not have.
    """
    text, figures = render(load_view(folders), choice or Choice(), title)
    write_whole(path, text)
    warnings = write_images(figures, path.parent / "figures", images) if images else []
    return path, warnings
