"""`confsim scenario`: a controlled experiment, its tables and plots, and the output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.commands.shared import in_sweep, make_console, print_warnings, run_folder, seconds, shown
from analysis.pages.charts import Figure, bars, missing, write_svg
from confsim.run.scenario import PARTS, run

DRAWN = 40  # iterations that the plot shows, from the first on
NAMES = {part: part.replace("_", " ") for part in PARTS}


def command(cfg: DictConfig) -> None:
    """Run the scenario of `cfg` and write its result to the run's folder.

    Raises:
        InputError: for a user's mistake.
    """
    folder = run_folder()
    result = run(cfg)
    result.write(folder)
    no_plots = missing()
    if no_plots is None:
        write_svg(breakdown_figure(result.iterations), folder / "iterations.svg")
        write_svg(tokens_figure(result.summary), folder / "tokens.svg")
    if cfg.quiet:
        return
    console = make_console()
    if in_sweep():
        console.print(one_line(result.summary), markup=False, highlight=False)
    else:
        print_result(console, result.summary, folder, no_plots)


# --- on the terminal -------------------------------------------------------------------------------------------------


def one_line(summary: dict[str, Any]) -> str:
    """A scenario of a sweep."""
    gap = seconds(summary["max_gap_s"])
    mean_s = sum(summary["prefill_s"]) / len(summary["prefill_s"])
    return f"{summary['scheme']}: {summary['label']}: {seconds(mean_s)} a prefill, largest gap {gap}"


def print_result(console: Console, summary: dict[str, Any], folder: Path, no_plots: str | None = None) -> None:
    """The first screen of a scenario; `no_plots` says why there are none."""
    console.print(Text(f"{summary['scheme']}, {summary['model']} on {summary['cluster']['gpus']} GPUs", style="bold"))
    console.print(summary["label"], markup=False, highlight=False)
    console.print(_facts(summary))
    console.print(_breakdown(summary))
    console.print(_groups(summary))
    print_warnings(console, [*summary["warnings"], *filter(None, [no_plots])])
    plots = ", plots beside it" if no_plots is None else ""
    console.print(f"written: {shown(folder / 'summary.json')}{plots}", markup=False, highlight=False)


def _facts(summary: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    times = summary["prefill_s"]
    rows = {
        "prompts outstanding": f"{min(summary['concurrency'], summary['prefills'])}",
        "prefill with its wait, mean": seconds(sum(times) / len(times)),
        "fastest to slowest": f"{seconds(min(times))} to {seconds(max(times))}",
        "prefills per second": f"{summary['prefills_per_s']:.4g}",
        "iterations": f"{summary['iterations']:,}",
        "largest gap": f"{seconds(summary['max_gap_s'])} (TBT {seconds(summary['tbt_s'])})",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _breakdown(summary: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title="an iteration, mean", title_justify="left")
    for name in ("whole", "attention stage", *NAMES.values()):
        table.add_column(name, justify="right")
    parts = [summary["breakdown_s"][part] for part in PARTS]
    table.add_row(*map(seconds, (summary["iteration_s"], summary["attention_stage_s"], *parts)))
    return table


def _groups(summary: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title="tokens an iteration, mean", title_justify="left")
    table.add_column("")
    for name in summary["groups"]:
        table.add_column(name, justify="right")
    for phase in ("prefill", "decode"):
        table.add_row(phase, *(f"{value:,.1f}" for value in summary[f"{phase}_tokens_per_group"]))
    return table


# --- plots -----------------------------------------------------------------------------------------------------------


def breakdown_figure(iterations: pa.Table) -> Figure:
    """What the first iterations spent their time on; the attention paths may overlap."""
    shown_rows = iterations.slice(0, DRAWN)
    series = {
        NAMES[part]: [value * 1e3 for value in shown_rows[f"{part}_s"].to_pylist()]
        for part in PARTS
        if any(shown_rows[f"{part}_s"].to_pylist())
    }
    return bars(range(1, len(shown_rows) + 1), series, "iteration", "milliseconds (parts; attention may overlap)", True)


def tokens_figure(summary: dict[str, Any]) -> Figure:
    """Tokens of each group."""
    series = {phase: summary[f"{phase}_tokens_per_group"] for phase in ("decode", "prefill")}
    return bars(summary["groups"], series, "group", "tokens an iteration (mean)", stacked=True)
