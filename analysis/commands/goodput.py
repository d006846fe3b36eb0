"""`confsim goodput`: the search, a table, and the report."""

from __future__ import annotations

import contextlib
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.commands.shared import percentiles, print_warnings, rate, run_folder, share, shown
from analysis.compare import Silent, compare
from analysis.progress import listener
from analysis.report import write_report


def command(cfg: DictConfig) -> None:
    """Search the goodput of `cfg.schemes`; write `goodput.json`, the runs at the goodputs and `report.html`.

    Raises:
        InputError: for a user's mistake.
    """
    folder = run_folder()
    console = Console(soft_wrap=True)
    watch = contextlib.nullcontext(Silent()) if cfg.quiet else listener(console)
    with watch as watcher:
        result = compare(cfg, folder, watcher)
    page = write_report([folder], folder / "report.html")
    if cfg.quiet:
        return
    console.print()
    console.print(Text(str(result["label"]), style="bold"))
    console.print(table(result))
    for name, scheme in result["schemes"].items():
        print_warnings(console, (f"{name}: {line}" for line in scheme["warnings"]))
    console.print(Text(f"report: {shown(page)}"))


def table(result: dict[str, Any]) -> Table:
    """A row a scheme: its goodput, and at that rate attainment and percentiles."""
    grid = Table(box=None, pad_edge=False, header_style="dim")
    grid.add_column("scheme")
    for title in ("goodput\nreq/s", "per GPU\nreq/s", "attain-\nment"):
        grid.add_column(title, justify="right")
    for title in ("TTFT", "TBT"):
        for name in ("P50", "P95", "P99"):
            grid.add_column(f"{title}\n{name}", justify="right")
    for name, scheme in result["schemes"].items():
        goodput = "0 (structural)" if scheme["structural"] else rate(scheme["goodput"])
        row = [goodput, rate(scheme["goodput_per_gpu"]), share(scheme["attainment"])]
        grid.add_row(_title(name, scheme), *row, *percentiles(scheme, "ttft_s"), *percentiles(scheme, "gap_s"))
    return grid


def _title(name: str, scheme: dict[str, Any]) -> str:
    values = ", ".join(f"{key.removeprefix('scheme.')}={value}" for key, value in scheme["chosen"].items())
    return f"{name} ({values})" if values else name
