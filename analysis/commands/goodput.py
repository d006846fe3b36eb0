"""`confsim goodput`: the search, a table, and the report."""

from __future__ import annotations

import contextlib
from typing import Any

from omegaconf import DictConfig
from rich.table import Table
from rich.text import Text

from analysis.commands.shared import make_console, print_warnings, rate, run_folder, share, shown
from analysis.pages.report import write_report
from analysis.progress import listener
from analysis.search.compare import Listener, compare


def command(cfg: DictConfig) -> None:
    """Search the goodput of `cfg.schemes`; write `goodput.json`, the runs at the goodputs and `report.html`.

    Raises:
        InputError: for a user's mistake.
    """
    folder = run_folder()
    console = make_console()
    watch = contextlib.nullcontext(Listener()) if cfg.quiet else listener(console)
    with watch as watcher:
        result = compare(cfg, folder, watcher)
    page = write_report([folder], folder / "report.html")
    if cfg.quiet:
        return
    console.print()
    console.print(Text(str(result["label"]), style="bold"))
    console.print(table(result))
    band = bands(result)
    if band:
        console.print(Text(band))
    for name, scheme in result["schemes"].items():
        print_warnings(console, (f"{name}: {line}" for line in scheme["warnings"]))
    console.print(Text(f"report: {shown(page)}"))


def table(result: dict[str, Any]) -> Table:
    """A row a scheme: its goodput, and at that rate attainment and percentiles; fits 80 columns."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    grid.add_column("\nscheme", no_wrap=True)
    for title in ("goodput\nreq/s", "a GPU\nreq/s", "\nattained"):
        grid.add_column(title, justify="right", no_wrap=True)
    for title, unit in (("TTFT", "s"), ("TBT", "ms")):
        for name in ("P50", "P95", "P99"):
            grid.add_column(f"{title}\n{name} {unit}", justify="right", no_wrap=True)
    for name, scheme in result["schemes"].items():
        row = [rate(scheme["goodput"]), rate(scheme["goodput_per_gpu"]), share(scheme["attainment"])]
        row += [cell for key, unit in (("ttft_s", 1.0), ("gap_s", 1e-3)) for cell in _percentiles(scheme, key, unit)]
        grid.add_row(_title(name, scheme), *row)
    return grid


def bands(result: dict[str, Any]) -> str:
    """How far the goodputs move with the error of the latency model, in one line."""
    known = {name: scheme["band"] for name, scheme in result["schemes"].items() if scheme["band"]}
    if not known:
        return ""
    error = max(band["latency_error"] for band in known.values())
    ranges = ", ".join(
        f"{name} {rate(band['low']['goodput'])} to {rate(band['high']['goodput'])}" for name, band in known.items()
    )
    return f"with all latencies ±{error:.1%} (held-out error of the profile): {ranges} req/s"


def _percentiles(scheme: dict[str, Any], key: str, unit_s: float) -> list[str]:
    values = scheme[key] or {}
    found = [values.get(name) for name in ("p50", "p95", "p99")]
    return ["–" if value is None else f"{value / unit_s:.3g}" for value in found]


def _title(name: str, scheme: dict[str, Any]) -> str:
    values = ", ".join(f"{key.removeprefix('scheme.')}={value}" for key, value in scheme["chosen"].items())
    return f"{name}\n  {values}" if values else name
