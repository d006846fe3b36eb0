"""Sweeps from Python: `confsim.sweep(base, axes)`."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from analysis.sweep.driver import Sweep
from analysis.sweep.expand import Grid, Point, expand
from confsim.errors import InputError
from confsim.setup.configuration import check, compose, config_errors, explain, groups, one_line, rewrite

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
    """Run `command` for every combination of `axes` on top of `base` and return a row a run.

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
    hydra = [*launcher]
    if isinstance(base, DictConfig):
        grid = _grid_of_config(
            base, axes, command, _folder(folder, str(base.output.dir), command), hydra, workers, resume
        )
    else:
        words = list(base) if not isinstance(base, Mapping) else [f"{key}={render(base[key])}" for key in base]
        words += [f"{key}={','.join(map(render, values))}" for key, values in axes.items()]
        words += [f"resume={render(resume)}", f"sweep.workers={render(workers)}"]
        target = _folder(folder, "outputs" if folder else str(_output_dir(base, command)), command)
        hydra.append(f"hydra.sweep.dir={render(str(target))}")
        found = expand(command, [*rewrite(words, command, True), *hydra])
        if found is None:
            raise InputError("launcher: only Hydra's basic sweeper works here; drop hydra/sweeper")
        grid = found
    outcome = Sweep(grid, quiet).run()
    if outcome.interrupted:
        raise KeyboardInterrupt
    for failure in outcome.failures:
        warnings.warn(f"{failure.text or 'the run'} failed: {failure.error} ({failure.traceback})", stacklevel=2)
    if outcome.disk_full:
        raise OSError(f"the disk is full: {outcome.present} of {outcome.planned} results are in {outcome.folder}")
    frame: pd.DataFrame = outcome.table.to_pandas()
    return frame


def _output_dir(base: Sequence[str] | Mapping[str, Any], command: str) -> Any:
    if isinstance(base, Mapping):
        return base.get("output.dir", "outputs")
    given = [word.partition("=")[2] for word in base if word.startswith("output.dir=")]
    return given[-1].strip("'\"") if given else "outputs"


def _folder(folder: str | Path | None, output: str, command: str) -> Path:
    if folder is not None:
        return Path(folder).absolute()
    return (Path(output) / f"{command}-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(4)}").absolute()


def render(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
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


def _grid_of_config(
    cfg: DictConfig,
    axes: Mapping[str, Sequence[Any]],
    command: str,
    folder: Path,
    hydra: Sequence[str],
    workers: int | None,
    resume: bool,
) -> Grid:
    """The grid of a composed configuration; an axis that is a group replaces the group by each choice."""
    base = cfg.copy()
    OmegaConf.set_struct(base, False)
    OmegaConf.update(base, "resume", resume)
    OmegaConf.update(base, "sweep.workers", workers)
    known = set(groups())
    points = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        points.append(_point(base, chosen, known, command))
    return Grid(command, folder, (), tuple(hydra), {key: list(values) for key, values in axes.items()}, tuple(points))


def _point(base: DictConfig, chosen: Mapping[str, Any], known: set[str], command: str) -> Point:
    cfg = base.copy()
    for key, value in sorted(chosen.items(), key=lambda item: item[0] not in known):  # groups first
        if key in known and isinstance(value, str):
            cfg[key] = compose([f"{key}={value}"], command)[key]
        elif OmegaConf.select(cfg, key, default=...) is ...:
            raise InputError(f"axes[{key!r}]: no such key in the configuration")
        else:
            OmegaConf.update(cfg, key, value)
    mistake = None
    try:
        check(cfg, (), command)
        config: Any = OmegaConf.to_container(cfg, resolve=True)
    except InputError as error:
        mistake, config = one_line(str(error)), OmegaConf.to_container(cfg)
    except config_errors() as error:
        raise InputError(explain(error)) from error
    choices = {key: str(value) for key, value in chosen.items() if key in known}
    text = " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in chosen.items())
    return Point(dict(chosen), text, config, choices, mistake)
