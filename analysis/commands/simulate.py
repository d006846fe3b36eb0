"""`confsim simulate`: one replay, a first screen that says what matters, and the output folder."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.commands.shared import (
    in_sweep,
    make_console,
    percentiles,
    print_warnings,
    run_folder,
    seconds,
    share,
    shown,
)
from analysis.pages.timeline import write_timeline
from analysis.search.knee import attainment_band
from confsim import api
from confsim.errors import InputError

STATISTICS = {
    "ttft_s": "time to first token",
    "gap_s": "gap between tokens",
    "max_gap_s": "largest gap of a request",
    "tpot_s": "mean time per output token",
    "e2e_s": "end to end",
}


def command(cfg: DictConfig) -> None:
    """Run the simulation of `cfg` and write its result to the run's folder.

    Raises:
        InputError: for a user's mistake.
    """
    folder = run_folder()
    timeline = outside_sweeps("output.timeline", cfg.output.timeline)
    started = time.perf_counter()
    result = api.simulate(cfg)
    if outside_sweeps("output.band", cfg.output.band) and result.summary["slo"] is not None:
        result = replace(result, summary={**result.summary, "band": attainment_band(cfg, result)})
    result.write(folder)
    if timeline:
        write_timeline(folder / "timeline.json.gz", result, cfg.output.timeline_iterations)
    if cfg.quiet:
        return
    console = make_console()
    if in_sweep():
        console.print(one_line(result.summary, folder), markup=False, highlight=False)
    else:
        print_summary(console, result.summary, folder, time.perf_counter() - started)


def outside_sweeps(key: str, value: Any) -> bool:
    """A setting that is true, false, or auto (only outside sweeps).

    Raises:
        InputError: for anything else.
    """
    if value == "auto":
        return not in_sweep()
    if isinstance(value, bool):
        return value
    raise InputError(f"{key}={value}: use true, false or auto")


def one_line(summary: dict[str, Any], folder: Path) -> str:
    """A run of a sweep in one line."""
    ttft, gap = percentiles(summary, "ttft_s")[1], percentiles(summary, "max_gap_s")[1]
    kept = "" if summary["slo"] is None else f"attainment {share(summary['attainment'])}, "
    return f"    {kept}P95 TTFT {ttft}, P95 largest gap {gap}: {shown(folder)}"


def print_summary(console: Console, summary: dict[str, Any], folder: Path, wall_s: float) -> None:
    """The first screen of a run: what was served, what was not, and how fast."""
    console.print(Text(str(summary["label"]), style="bold"))
    console.print(_attainment(summary), Text(_requests(summary)), sep="\n")
    if band := summary.get("band"):
        low, high = band["attainment"]
        error = f"with all latencies ±{share(band['latency_error'])} (held-out error of the profile)"
        console.print(Text(f"{error}: {share(low)} to {share(high)}"))
    console.print(_table(summary))
    print_warnings(console, summary.get("warnings", []))
    speed = summary["iterations"] / wall_s if wall_s else 0.0
    console.print(
        f"{summary['iterations']:,} iterations, {seconds(summary['simulated_s'])} simulated in {wall_s:.1f} s, "
        f"utilisation {share(summary.get('utilisation'))} "
        f"({speed:,.0f} iterations/s, loading and files included)",
        highlight=False,
    )
    console.print(Text(f"results: {shown(folder)}"))


def _attainment(summary: dict[str, Any]) -> Text:
    if summary["slo"] is None:
        return Text("no SLO: latencies only", style="bold")
    target = summary["slo"]["attainment"]
    met = summary["attainment"] >= target
    text = Text(f"attainment {share(summary['attainment'])}", style="bold green" if met else "bold red")
    missed = ", ".join(f"{reason} {count:,}" for reason, count in summary["missed_by"].items() if count)
    return text + Text(
        f" (target {target:.0%})" + (f"; missed by {missed}" if missed else ""), style="not bold default"
    )


def _requests(summary: dict[str, Any]) -> str:
    counts = summary["requests"]
    text = f"{counts['injected']:,} requests, {counts['completed']:,} completed"
    for name in ("rejected", "unfinished", "preempted"):
        if counts.get(name):
            text += f", {counts[name]:,} {name}"
    reasons = summary.get("rejected_by") or {}
    if reasons:
        text += " (rejected: " + ", ".join(f"{reason} {count:,}" for reason, count in reasons.items()) + ")"
    return text


def _table(summary: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("mean", "P50", "P90", "P95", "P99"):
        table.add_column(name, justify="right")
    for key, title in STATISTICS.items():
        values = summary.get(key) or {}
        table.add_row(title, *(seconds(values.get(name)) for name in ("mean", "p50", "p90", "p95", "p99")))
    return table
