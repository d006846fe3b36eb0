"""The page of the experiments: Markdown, an SVG for each figure, and one HTML page with all figures to explore."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from analysis.experiments.base import Section
from analysis.pages import html
from analysis.pages.charts import write_svg
from analysis.pages.theme import Figure
from traces.files import write_whole

HEAD = """# Experiments

Written by `make experiments`; every number below comes from the simulator as it is, and nothing is tuned to a published
figure. Latencies are predictions of a model fitted to kernel measurements (see [latency.md](latency.md)); a scenario
keeps the decode load constant (`confsim scenario --help`), goodput is the highest request rate at which 95% of the
requests keep their SLO.
"""


def write_document(path: Path, sections: Sequence[Section]) -> None:
    """Write the page to `path`, figures to the folder `experiments` beside it."""
    folder = path.parent / "experiments"
    figures: dict[str, Figure] = {}
    lines = [HEAD]
    for section in sections:
        lines += [f"## {section.title}", "", *section.lines]
        figures |= section.figures
    for name, figure in figures.items():
        write_svg(figure, folder / f"{name}.svg")
    write_whole(path, "\n".join(lines).rstrip() + "\n")


def write_explorer(path: Path, sections: Sequence[Section]) -> None:
    """Write one self-contained HTML page with every figure drawn by plotly.js, each with its caption."""
    text = "\n".join(line for section in sections for line in section.lines)
    captions = {name: caption for caption, name in re.findall(r"!\[(.*)\]\(experiments/(.*)\.svg\)", text)}
    write_whole(path, html.render("experiments.html", title="Experiments", sections=sections, captions=captions))
