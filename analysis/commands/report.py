"""`confsim report`: the HTML page of results that are there already."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path

from omegaconf import DictConfig

from analysis.commands.shared import shown
from analysis.pages.report import write_report
from analysis.pages.sweep import Choice, write_sweep_report
from analysis.sweep.folder import read_plan
from confsim.errors import InputError


def command(cfg: DictConfig) -> None:
    """Write the report of `cfg.folders`.

    Raises:
        InputError: if there is no result.
    """
    if not cfg.folders:
        raise InputError("folders=[]: name the output folder of at least one run")
    folders = [Path(str(folder)) for folder in cfg.folders]
    path = _write(cfg, folders)
    if not cfg.quiet:
        print(f"report: {shown(path)}")


def _write(cfg: DictConfig, folders: list[Path]) -> Path:
    if not any(read_plan(folder) for folder in folders):
        for key in ("x", "by", "metric", "images"):
            if cfg[key] is not None:
                raise InputError(f"{key}={cfg[key]}: only reports of sweeps have it; {folders[0]} is none")
        return write_report(folders, _target(cfg, folders), cfg.title)
    choice = Choice(cfg.x, cfg.by, cfg.metric)
    path, warnings = write_sweep_report(folders, _target(cfg, folders), cfg.title, choice, cfg.images)
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr)
    return path


def _target(cfg: DictConfig, folders: list[Path]) -> Path:
    if cfg.output.html is not None:
        return Path(str(cfg.output.html))
    if len(folders) == 1:
        return folders[0] / "report.html"
    token = f"report-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(4)}"
    return Path(cfg.output.dir) / token / "report.html"
