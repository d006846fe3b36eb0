"""The page of the experiments: Markdown, an SVG for each figure, and one HTML page with all figures to explore."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from analysis.experiments.base import Section
from analysis.pages.charts import Figure, write_svg
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
    """Write one self-contained HTML page with every figure drawn by plotly.js."""
    from plotly.offline import get_plotlyjs

    body = [f"<script>{get_plotlyjs()}</script>", "<h1>Experiments</h1>"]
    number = 0
    for section in sections:
        body.append(f"<h2>{escape(section.title)}</h2>")
        for name, figure in section.figures.items():
            data, layout = json.dumps(figure["data"]), json.dumps({**figure["layout"], "title": {"text": name}})
            body.append(f'<div id="figure{number}"></div>')
            body.append(f"<script>Plotly.newPlot('figure{number}', {data}, {layout}, {{responsive: true}})</script>")
            number += 1
    page = '<!DOCTYPE html><html><head><meta charset="utf-8"><title>Experiments</title></head><body>'
    write_whole(path, "\n".join([page, *body, "</body></html>", ""]))
