"""`confsim stats`: what a trace looks like, on the terminal and as `stats.json`."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from analysis.commands.shared import make_console, run_folder, shown
from confsim.outcome.result import write_json
from traces.progress import console_progress
from traces.stats import describe, stats_table


def command(cfg: DictConfig) -> None:
    """Describe the trace of `cfg`.

    Raises:
        InputError: if it cannot be read.
    """
    from hydra.utils import instantiate

    folder = run_folder()
    source: Any = instantiate(cfg.trace, _convert_="all")
    trace = source.load(seed=cfg.seed, progress=None if cfg.quiet else console_progress())
    found = describe(trace)
    write_json(folder / "stats.json", {"kind": "stats", **found.as_dict()})
    if not cfg.quiet:
        console = make_console()
        console.print(stats_table(found))
        console.print(f"written: {shown(folder / 'stats.json')}", markup=False, highlight=False)
