"""The HTML report of a validation against measured engines, and its figures (templates/validate_silicon.html)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.pages import html, theme
from analysis.pages.theme import COLOURS, Figure, scatter
from traces.files import write_whole

WORST = 12  # rows of each table of the worst
SYMBOLS = {"fit": "circle-open", "held_out": "circle", "kv_limited": "x"}
SPLITS = {"fit": "fit", "held_out": "held out", "kv_limited": "TTFT above 5 s"}
METRICS = {"tpot": "Time per output token", "ttft": "Time to first token"}

Rows = Sequence[Mapping[str, Any]]


def write_page(content: Mapping[str, Any], rows: Rows, path: Path) -> Path:
    """Write the page in one step and return its path."""
    return write_whole(path, render(content, rows))


def render(content: Mapping[str, Any], rows: Rows) -> str:
    """The page of a summary and the rows that were replayed."""
    return html.render(
        "validate_silicon.html",
        title="Simulated against measured engines",
        content=content,
        warnings=[("", line) for line in content["warnings"]],
        rows=rows,
        metrics=METRICS,
        worst={m: sorted(rows, key=lambda row: -abs(row[f"{m}_error"]))[:WORST] for m in METRICS},
        parity=parity,
        load=load,
    )


def parity(rows: Rows, metric: str) -> Figure:
    """Log-log scatter in milliseconds, a colour for each family and a symbol for each split."""
    data = []
    for number, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
        for split, symbol in SYMBOLS.items():
            some = [row for row in rows if row["family"] == family and row["split"] == split]
            if some:
                x, y = ([row[f"{side}_{metric}_s"] * 1e3 for row in some] for side in ("measured", "predicted"))
                look = {
                    "marker": {"color": COLOURS[number], "symbol": symbol, "size": 7},
                    "text": list(map(load, some)),
                }
                hover = "%{text}<br>measured %{x} ms<br>predicted %{y} ms<extra>%{fullData.name}</extra>"
                data.append(scatter(f"{family}, {SPLITS[split]}", x, y, "markers", **look, hovertemplate=hover))
    return theme.parity(data, "measured, ms", "predicted, ms", 440)


def load(row: Mapping[str, Any]) -> str:
    """The load behind a row in words."""
    tokens = f"{row['prompt_tokens']} + {row['output_tokens']} tokens"
    return f"{tokens}, {row['concurrency']} in flight, TP {row['tp']}"
