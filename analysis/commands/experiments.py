"""`confsim experiments`: run the controlled experiments and write their page."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from analysis.experiments import ablation, attention_stage, dispatch, prefill_rate, premise, ranking, speedup
from analysis.experiments.base import Experiment, Settings
from analysis.experiments.document import write_document, write_explorer
from analysis.experiments.run import run
from analysis.pages.charts import missing
from analysis.search.pool import worker_count
from confsim.errors import InputError
from confsim.setup.configuration import did_you_mean

MODULES = (prefill_rate, ablation, attention_stage, speedup, dispatch, ranking, premise)
EXPERIMENTS: dict[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in MODULES}


def command(cfg: DictConfig) -> None:
    """Run the experiments of `cfg` and write `cfg.page`.

    Raises:
        InputError: for a user's mistake.
    """
    if no_figures := missing():
        raise InputError(no_figures)
    settings = read_settings(cfg)
    wanted = read_names(cfg)
    workers = worker_count("workers", cfg.workers)
    cells = {(name, key): cell for name in wanted for key, cell in EXPERIMENTS[name].cells(settings).items()}
    console = None if cfg.quiet else Console(stderr=True)
    named = {f"{name}\0{key}": cell for (name, key), cell in cells.items()}
    results = run(named, workers, console=console)
    sections = []
    for name in wanted:
        own = {key: results[f"{name}\0{key}"] for experiment, key in cells if experiment == name}
        sections.append(EXPERIMENTS[name].section(settings, own))
    page = Path(str(cfg.page))
    write_document(page, sections)
    if cfg.explorer is not None:
        write_explorer(Path(str(cfg.explorer)), sections)
    if not cfg.quiet:
        print(f"written: {page}")


def read_names(cfg: DictConfig) -> list[str]:
    """The experiments that are asked for.

    Raises:
        InputError: for an unknown name.
    """
    names = [str(name) for name in cfg.only] or list(EXPERIMENTS)
    for name in names:
        if name not in EXPERIMENTS:
            hint = did_you_mean(name, list(EXPERIMENTS))
            raise InputError(f"only=[{name}]: unknown, use {', '.join(EXPERIMENTS)}{hint}")
    return names


def read_settings(cfg: DictConfig) -> Settings:
    """The settings in a configuration.

    Raises:
        InputError: for values that cannot be.
    """
    return Settings(
        requests=None if cfg.requests is None else int(cfg.requests),
        seed=int(cfg.seed),
        tolerance=float(cfg.tolerance),
        zero_load_requests=int(cfg.zero_load_requests),
        models=tuple(map(str, cfg.models)),
        workloads=tuple(map(str, cfg.workloads)),
        trace_folder=None if cfg.trace_folder is None else Path(str(cfg.trace_folder)),
        full=bool(cfg.full),
    )
