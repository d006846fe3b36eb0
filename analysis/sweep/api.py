"""Sweeps from Python: `confsim.sweep(base, axes)`."""

from __future__ import annotations

import re
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console

from analysis.sweep.driver import Sweep
from analysis.sweep.expand import Grid, expand, expand_config
from confsim.errors import InputError
from confsim.setup.configuration import rewrite

WORD = re.compile(r"[A-Za-z_./-][\w./-]*")
RESERVED = ("null", "true", "false", "nan", "inf")


def sweep(
    base: Sequence[str] | Mapping[str, Any] | DictConfig = (),
    axes: Mapping[str, Sequence[Any]] | None = None,
    *,
    command: str | None = None,
    folder: str | Path | None = None,
    launcher: Sequence[str] = (),
    workers: int | None = None,
    resume: bool = True,
    quiet: bool = True,
) -> pd.DataFrame:
    """Run `command` for every combination of `axes` on top of `base` and return one row per run.

    `base` is a list of overrides (`["scheme=conflux", "trace.limit=1000"]`), the same as a mapping, or a composed
    configuration. An axis is a key with its values; the name of a config group takes names of choices. `command` is
    `simulate` (default) or `goodput` (default where `base` is a configuration of it). `launcher` are Hydra's overrides
    (`["hydra/launcher=joblib"]`) and `workers` the worker jobs to start. Results go to `folder`, a new one by
    default, and finished runs are taken from there or from earlier sweeps unless `resume` is false.

    Runs that fail have `status` "failed" and an `error`, and are warned about. The columns are those of
    `results.parquet`.

    Raises:
        InputError: for a key, choice or launcher that does not exist.
        KeyboardInterrupt: after Ctrl-C; what is done is kept.
    """
    axes = dict(axes or {})
    for name, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise InputError(f"axes[{name!r}]={values!r}: expected a list of values")
    command = command or ("goodput" if isinstance(base, DictConfig) and "schemes" in base else "simulate")
    target = (Path(folder) if folder is not None else _new_folder(base, command)).absolute()
    own = {"resume": resume, "sweep.workers": workers}
    if isinstance(base, DictConfig):
        grid: Grid | None = expand_config(command, base, own, axes, target, launcher)
    else:
        given: Mapping[str, Any] = base if isinstance(base, Mapping) else {}
        words = [f"{key}={render(value)}" for key, value in given.items()] if given else list(base)
        words += [f"{key}={','.join(map(render, values))}" for key, values in axes.items()]
        words = rewrite([*words, *(f"{key}={render(value)}" for key, value in own.items())], command, True)
        grid = expand(command, [*words, *launcher, f"hydra.sweep.dir={render(str(target))}"])
    if grid is None:
        raise InputError("launcher: only Hydra's basic sweeper works here; drop hydra/sweeper")
    outcome = Sweep(grid, None if quiet else Console(soft_wrap=True)).run()
    if outcome.interrupted:
        raise KeyboardInterrupt
    for failure in outcome.failures:
        warnings.warn(f"{failure.text or 'the run'} failed: {failure.error} ({failure.traceback})", stacklevel=2)
    if outcome.disk_full:
        raise OSError(f"the disk is full: {outcome.present} of {outcome.planned} results are in {outcome.folder}")
    frame: pd.DataFrame = outcome.table.to_pandas()
    return frame


def _new_folder(base: Sequence[str] | Mapping[str, Any] | DictConfig, command: str) -> Path:
    """A folder of the output directory that no other sweep has."""
    if isinstance(base, DictConfig):
        output = base.output.dir
    elif isinstance(base, Mapping):
        output = base.get("output.dir", "outputs")
    else:
        given = [word.partition("=")[2] for word in base if word.startswith("output.dir=")]
        output = given[-1].strip("'\"") if given else "outputs"
    return Path(str(output)) / f"{command}-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(4)}"


def render(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{render(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(render, value)) + "]"
    text = str(value)
    if WORD.fullmatch(text) and text.lower() not in RESERVED:
        return text
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"
