"""The HTML report of a validation against measured engines: parity plots, tables, the worst rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from analysis.commands.shared import share
from analysis.pages.report.figures import COLOURS, LIMIT_COLOUR, Figure, numbers
from analysis.pages.report.page import Page
from traces.files import write_whole

WORST = 12  # rows of each table of the worst
SYMBOLS = {"fit": "circle-open", "held_out": "circle", "kv_limited": "x"}
SPLIT_NAMES = {"fit": "fit (TP 4)", "held_out": "held out", "kv_limited": "TTFT above 5 s"}
METRICS = {"tpot": "time per output token", "ttft": "time to first token"}

Rows = Sequence[Mapping[str, Any]]


def write_page(content: Mapping[str, Any], rows: Rows, path: Path) -> Path:
    """Write the page in one step and return its path."""
    text = render(content, rows)
    return write_whole(path, text)


def render(content: Mapping[str, Any], rows: Rows) -> str:
    """The page."""
    page = Page()
    page.add("<h1>Simulated against measured engines</h1>")
    page.add(f'<p class="soft">{escape(content["label"])}</p>')
    page.warnings(content["warnings"])
    _errors(page, content)
    _parity(page, rows)
    _worst(page, rows)
    _constants(page, content)
    _protocol(page, content)
    return page.html("Simulated against measured engines")


def _errors(page: Page, content: Mapping[str, Any]) -> None:
    page.heading(
        "Errors",
        "Mean and median of |predicted / measured - 1|. Held-out rows chose no constant. The estimator is the sample's "
        "own package on all rows of a family.",
    )
    head = ["model", "GPU", "engine", "split", "rows", "TPOT mean", "TPOT median", "TTFT mean", "TTFT median"]
    head += ["estimator, TPOT", "estimator, TTFT"]
    page.table(head, [_error_cells(entry, content["estimator"]) for entry in content["families"]], [1, 2, 3])
    page.heading(
        "By TP degree", "Without rows of a TTFT above 5 s; the bias is the mean of predicted / measured - 1.", 3
    )
    head = ["model", "GPU", "engine", "TP", "split", "rows", "TPOT mean", "TPOT bias", "TTFT mean", "TTFT bias"]
    lines = [
        [
            *(escape(entry[key]) for key in ("model", "system", "engine")),
            str(entry["tp"]),
            SPLIT_NAMES[entry["split"]],
            str(entry["rows"]),
            *(_signed(entry[key]) if key.endswith("bias") else share(entry[key])
              for key in ("tpot_mape", "tpot_bias", "ttft_mape", "ttft_bias")),
        ]
        for entry in content["by_tp"]
    ]  # fmt: skip
    page.table(head, lines, [1, 2, 4])


def _error_cells(entry: Mapping[str, Any], estimator: Mapping[str, Mapping[str, float]]) -> list[str]:
    cells = [escape(entry[key]) for key in ("model", "system", "engine")]
    cells += [SPLIT_NAMES[entry["split"]], str(entry["rows"])]
    cells += [share(entry[key]) for key in ("tpot_mape", "tpot_median", "ttft_mape", "ttft_median")]
    return cells + [share(estimator[entry["family"]][key]) for key in ("tpot_mape", "ttft_mape")]


def _signed(value: float) -> str:
    return f"{value:+.1%}"


def _parity(page: Page, rows: Rows) -> None:
    page.heading("Parity", "Predicted against measured; on the line they are equal, the dashed ones are 10% off.")
    page.add('<div class="pair">')
    for metric, name in METRICS.items():
        page.figure(parity(rows, metric), name[0].upper() + name[1:])
    page.add("</div>")


def parity(rows: Rows, metric: str) -> Figure:
    """Log-log scatter in milliseconds, a colour a family and a symbol a split."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    data: list[dict[str, Any]] = []
    for number, family in enumerate(families):
        for split, symbol in SYMBOLS.items():
            some = [row for row in rows if row["family"] == family and row["split"] == split]
            if some:
                data.append(_points(some, metric, f"{family}, {SPLIT_NAMES[split]}", COLOURS[number], symbol))
    values = [row[f"{kind}_{metric}_s"] * 1e3 for row in rows for kind in ("measured", "predicted")]
    low, high = min(values) / 1.2, max(values) * 1.2
    layout = {
        "height": 470,
        "margin": {"l": 64, "r": 20, "t": 14, "b": 52},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.24, "yanchor": "top", "x": 0, "font": {"size": 11}},
        "shapes": [_line(low, high, 1.0), _line(low, high, 1.1), _line(low, high, 0.9)],
    }
    for axis, kind in (("xaxis", "measured"), ("yaxis", "predicted")):
        ends = [math.log10(low), math.log10(high)]
        layout[axis] = {"title": {"text": f"{kind} (ms)"}, "type": "log", "range": ends, "automargin": True}
    return {"data": data, "layout": layout}


def _points(rows: Rows, metric: str, name: str, colour: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": numbers([row[f"measured_{metric}_s"] * 1e3 for row in rows]),
        "y": numbers([row[f"predicted_{metric}_s"] * 1e3 for row in rows]),
        "text": [_load(row) for row in rows],
        "marker": {"color": colour, "symbol": symbol, "size": 7},
        "hovertemplate": "%{text}<br>measured %{x} ms<br>predicted %{y} ms<extra>%{fullData.name}</extra>",
    }


def _line(low: float, high: float, factor: float) -> dict[str, Any]:
    style = {"color": LIMIT_COLOUR, "width": 1, "dash": "solid" if factor == 1.0 else "dot"}
    return {"type": "line", "line": style, "x0": low, "x1": high, "y0": low * factor, "y1": high * factor,
            "layer": "below"}  # fmt: skip


def _load(row: Mapping[str, Any]) -> str:
    tokens = f"{row['prompt_tokens']} + {row['output_tokens']} tokens"
    return f"{tokens}, {row['concurrency']} in flight, TP {row['tp']}"


def _worst(page: Page, rows: Rows) -> None:
    page.heading("The worst rows")
    for metric, name in METRICS.items():
        page.heading(name[0].upper() + name[1:], level=3)
        worst = sorted(rows, key=lambda row: -abs(row[f"{metric}_error"]))[:WORST]
        lines = [
            [
                escape(row["model"]), escape(row["system"]), escape(row["engine"]), escape(_load(row)),
                SPLIT_NAMES[row["split"]], f"{row[f'measured_{metric}_s'] * 1e3:,.1f}",
                f"{row[f'predicted_{metric}_s'] * 1e3:,.1f}", _signed(row[f"{metric}_error"]),
            ]
            for row in worst
        ]  # fmt: skip
        page.table(
            ["model", "GPU", "engine", "load", "split", "measured, ms", "predicted, ms", "error"], lines, [1, 2, 3, 4]
        )


def _constants(page: Page, content: Mapping[str, Any]) -> None:
    page.heading(
        "Constants",
        "Chosen on the fit rows of TP 4: exposed host time of an iteration and of a running sequence, and a factor on "
        "the time that prefill adds to an iteration.",
    )
    lines = [
        [escape(name), f"{c['iteration_s'] * 1e3:.3f}", f"{c['sequence_s'] * 1e6:.1f}", f"{c['prefill_factor']:.3f}",
         str(c["rows"])]
        for name, c in content["constants"].items()
    ]  # fmt: skip
    page.table(["family", "iteration, ms", "sequence, us", "prefill factor", "rows"], lines)


def _protocol(page: Page, content: Mapping[str, Any]) -> None:
    page.heading("What was replayed")
    lines = [[escape(name), escape(text)] for name, text in content["engines"].items()]
    page.table(["engine", "rules and load"], lines, [1])
    page.heading("Left out", level=3)
    page.table(["rows", "why"], [[str(count), escape(why)] for why, count in content["left_out"].items()], [1])
