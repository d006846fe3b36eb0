"""`confsim validate source=silicon`: replays measured loads of engines that nobody here wrote.

The protocol: a family's constants are chosen on its rows of TP 4 alone, and all other rows are only reported. A family
with `constants_of` takes another's. Rows with a TTFT above 5 s are reported apart and never fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from rich.text import Text

from analysis.commands.shared import make_console, run_folder, share, shown
from analysis.search.pool import Pool, worker_count
from analysis.validate.silicon_engines import ENGINES, Constants, Predicted, bench, predict
from analysis.validate.silicon_fit import Fit, errors, fit
from analysis.validate.silicon_page import write_page
from analysis.validate.silicon_rows import FAMILIES, FIT_TP, SPLITS, Family, Measured, Sample, load_sample
from confsim.errors import InputError
from confsim.outcome.result import write_json, write_table
from confsim.setup.provenance import provenance

DIGITS = 4  # of errors in the record that the documentation is made from
Predictor = Callable[[str, Sequence[Measured], Constants], list[Predicted]]


@dataclass(frozen=True)
class ReplayedRow:
    """One row: what was measured, what was predicted, and to which split it belongs."""

    family: Family
    row: Measured
    predicted: Predicted
    split: str


@dataclass(frozen=True)
class Validation:
    """All rows of the chosen families, and the constants by the family that they were chosen on."""

    outcomes: tuple[ReplayedRow, ...]
    fits: Mapping[str, Fit]
    fitted_rows: Mapping[str, int]


def command(cfg: DictConfig) -> None:
    """Validate and write `summary.json`, `rows.parquet` and `report.html` to the run's folder.

    Raises:
        InputError: for a user's mistake, or where the sample is not installed.
    """
    families = chosen_families(cfg.silicon.families)
    limit = _count("silicon.rows", cfg.silicon.rows)
    sample = load_sample(None if cfg.silicon.csv is None else Path(str(cfg.silicon.csv)))
    folder = run_folder()
    console = make_console()
    say = (lambda line: None) if cfg.quiet else lambda line: console.print(Text(line, style="dim"))
    with predictor(worker_count("silicon.workers", cfg.silicon.workers)) as replay:
        result = validate(sample, families, replay, limit, say)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    content = summarise(result, sample, config)
    write_table(folder / "rows.parquet", rows_table(result))
    write_json(folder / "summary.json", content)
    page = write_page(content, rows_table(result).to_pylist(), folder / "report.html")
    if cfg.silicon.record is not None:
        write_json(Path(str(cfg.silicon.record)), record(content))
    if not cfg.quiet:
        console.print(table(content["families"]))
        console.print(Text(f"report: {shown(page)}"))


def chosen_families(names: Any) -> tuple[Family, ...]:
    """The families of those names; None is all.

    Raises:
        InputError: for an unknown one.
    """
    known = {family.name: family for family in FAMILIES}
    if names is None:
        return FAMILIES
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in known:
            raise InputError(f"silicon.families={name}: unknown, use some of {', '.join(known)}, or null for all")
    return tuple(family for name, family in known.items() if name in wanted)


def _count(key: str, value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InputError(f"{key}={value}: use a whole number of 1 or more, or null")
    return value


@contextmanager
def predictor(workers: int) -> Iterator[Predictor]:
    """Replays rows in `workers` processes (1: in this one); results do not depend on it."""
    with Pool(predict, workers) as pool:

        def replay(name: str, rows: Sequence[Measured], constants: Constants) -> list[Predicted]:
            longest_first = sorted(range(len(rows)), key=lambda i: -rows[i].concurrency * rows[i].output_tokens)
            found = dict(pool.completed({i: (name, rows[i], constants) for i in longest_first}))
            return [found[i] for i in range(len(rows))]

        yield replay


def validate(
    sample: Sample,
    families: Sequence[Family],
    replay: Predictor,
    limit: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Validation:
    """Fit each family's engine on its fit rows, then replay every row; of each TP degree at most `limit` rows.

    Raises:
        InputError: if a family has no rows to fit on.
    """
    by_name = {family.name: family for family in FAMILIES}
    fits: dict[str, Fit] = {}
    fitted: dict[str, int] = {}
    outcomes: list[ReplayedRow] = []
    for family in families:
        source = by_name[family.constants_of or family.name]
        if source.name not in fits:
            rows = [row for row in sample.of(source, limit) if source.split(row) == "fit"]
            say(f"{source.name}: choosing constants on {len(rows)} rows of TP {FIT_TP}")
            fits[source.name], fitted[source.name] = choose(source, rows, replay), len(rows)
        rows = list(sample.of(family, limit))
        say(f"{family.name}: replaying {len(rows)} rows")
        predicted = replay(family.name, rows, fits[source.name].constants)
        outcomes += [ReplayedRow(family, row, p, family.split(row)) for row, p in zip(rows, predicted, strict=True)]
    return Validation(tuple(outcomes), fits, fitted)


def choose(family: Family, rows: Sequence[Measured], replay: Predictor) -> Fit:
    """Constants of a family's engine; nothing but `rows` enters.

    Raises:
        InputError: without rows.
    """
    if not rows:
        raise InputError(f"the sample has no row of {family.name} at TP {FIT_TP}: use one of the calibrate extra")
    return fit(rows, lambda constants: replay(family.name, rows, constants))


# --- what is written -------------------------------------------------------------------------------------------------


def summarise(result: Validation, sample: Sample, config: dict[str, Any]) -> dict[str, Any]:
    """`summary.json`."""
    names = dict.fromkeys(outcome.family.name for outcome in result.outcomes)
    families = [family for family in FAMILIES if family.name in names]
    return {
        "kind": "validate",
        "source": "silicon",
        "label": f"simulated against measured engines: {len(result.outcomes)} rows of {sample.source}",
        "families": [entry for family in families for entry in _entries(family, result)],
        "by_tp": [entry for family in families for entry in _by_tp(family, result)],
        "constants": {
            name: {**asdict(found.constants), "rows": result.fitted_rows[name], "loss": found.loss,
                   "evaluations": found.evaluations}
            for name, found in result.fits.items()
        },
        "engines": {family.engine: ENGINES[family.engine].describe for family in families},
        "estimator": {
            family.name: dict(zip(("tpot_mape", "ttft_mape"), family.estimator, strict=True)) for family in families
        },
        "left_out": dict(sample.left_out),
        "warnings": _warnings(result),
        "provenance": {
            **provenance(config, 0),
            "sample": {"source": sample.source, "rows": sample.total},
            "profiles": {family.name: bench(family.name).kernels.profile_hash for family in families},
        },
    }  # fmt: skip


def _warnings(result: Validation) -> list[str]:
    preempted = sum(outcome.predicted.preemptions > 0 for outcome in result.outcomes)
    return [f"requests were preempted in the replays of {preempted} rows: KV was short"] if preempted else []


def _entries(family: Family, result: Validation) -> Iterator[dict[str, Any]]:
    for split in SPLITS:
        some = [o for o in result.outcomes if o.family == family and o.split == split]
        if some:
            yield {**_named(family), "split": split, **statistics(some)}


def _by_tp(family: Family, result: Validation) -> Iterator[dict[str, Any]]:
    mine = [o for o in result.outcomes if o.family == family and o.split != "kv_limited"]
    for tp in sorted({outcome.row.tp for outcome in mine}):
        some = [outcome for outcome in mine if outcome.row.tp == tp]
        yield {**_named(family), "tp": tp, "split": some[0].split, **statistics(some)}


def _named(family: Family) -> dict[str, str]:
    return {"family": family.name, "model": family.model, "system": family.gpu, "engine": family.engine}


def statistics(outcomes: Sequence[ReplayedRow]) -> dict[str, float | int]:
    """Mean and median absolute relative error, and the mean of the signed one, of TPOT and TTFT."""
    tpot, ttft = errors([outcome.row for outcome in outcomes], [outcome.predicted for outcome in outcomes])
    out: dict[str, float | int] = {"rows": len(outcomes)}
    for statistic, reduce in (("mape", _mean_size), ("median", _median_size), ("bias", np.mean)):
        out |= {f"{name}_{statistic}": float(reduce(values)) for name, values in (("tpot", tpot), ("ttft", ttft))}
    return out


def _mean_size(values: Any) -> float:
    return float(np.mean(np.abs(values)))


def _median_size(values: Any) -> float:
    return float(np.median(np.abs(values)))


def rows_table(result: Validation) -> pa.Table:
    """One line a row: what it is, measured and predicted seconds, relative errors."""
    lines = []
    for outcome in result.outcomes:
        (tpot,), (ttft,) = errors([outcome.row], [outcome.predicted])
        lines.append(
            {
                **_named(outcome.family),
                "split": outcome.split,
                **{key: value for key, value in asdict(outcome.row).items() if not key.endswith("_s")},
                "measured_tpot_s": outcome.row.tpot_s,
                "predicted_tpot_s": outcome.predicted.tpot_s,
                "tpot_error": float(tpot),
                "measured_ttft_s": outcome.row.ttft_s,
                "predicted_ttft_s": outcome.predicted.ttft_s,
                "ttft_error": float(ttft),
                "preemptions": outcome.predicted.preemptions,
            }
        )
    return pa.Table.from_pylist(lines)


def record(content: Mapping[str, Any]) -> dict[str, Any]:
    """What the documentation shows: errors rounded, nothing of the machine."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, DIGITS) if abs(value) > 10**-DIGITS else value
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items()}
        return [rounded(item) for item in value] if isinstance(value, list) else value

    keys = ("families", "by_tp", "estimator", "engines", "left_out")
    sample = content["provenance"]["sample"]
    constants = {
        name: {key: found[key] for key in ("iteration_s", "sequence_s", "prefill_factor", "rows")}
        for name, found in content["constants"].items()
    }
    return {**{key: rounded(content[key]) for key in keys}, "constants": constants, "sample": sample}


def table(families: Sequence[Mapping[str, Any]]) -> Table:
    """A line a family and split; fits 80 columns."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("\nmodel", "\nGPU", "\nengine", "\nsplit"):
        grid.add_column(title, no_wrap=True)
    for title in ("\nrows", "TPOT\nMAPE", "\nmedian", "TTFT\nMAPE", "\nmedian"):
        grid.add_column(title, justify="right", no_wrap=True)
    for entry in families:
        numbers = [share(entry[key]) for key in ("tpot_mape", "tpot_median", "ttft_mape", "ttft_median")]
        names = [entry[key] for key in ("model", "system", "engine", "split")]
        grid.add_row(*names, str(entry["rows"]), *numbers)
    return grid
