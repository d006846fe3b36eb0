"""`confsim validate source=executor`: a slice of a trace, live on real ranks and simulated, compared.

Iteration by iteration: the live run makes the plans, its ranks execute all of them again, and the medians are compared
with what the latency model says. Plan by plan: a simulation charged with the measured times must make the same plans.
Request by request and in goodput: a simulation on the model's own times beside the live run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from rich.text import Text

from analysis.commands.shared import make_console, run_folder, share, shown
from analysis.validate.executor_page import write_page
from analysis.validate.plans import LoggedRun, PlanKey, PlanLog, RecordedTimes
from confsim import api
from confsim.errors import InputError
from confsim.outcome.result import Result, write_json, write_table
from confsim.run.engine import Run, Simulation
from confsim.run.model_backend import ModelBackendConfig
from confsim.schemes.rank_rules import RankRules
from confsim.setup.provenance import provenance

Floats = npt.NDArray[np.float64]
Say = Callable[[str], None]

TARGETS = {"cpu": 0.10}  # mean absolute error of whole mixed iterations to reach, by gpu
TARGET = 0.04
KINDS = ("prefill only", "decode only", "mixed")
SIZES = (16, 64, 256, 1024, 4096)  # upper ends of bins of an iteration's tokens
WARN_NOISE = 0.05


@dataclass(frozen=True)
class Replay:
    """One run: its result, and the plan of each iteration."""

    result: Result
    plans: list[PlanKey]
    repeats: Floats | None = None  # seconds, [times, iterations]

    @property
    def durations_s(self) -> list[float]:
        """Seconds that each iteration was charged."""
        table = self.result.iterations
        seconds: list[float] = (table["end_s"].to_numpy() - table["start_s"].to_numpy()).tolist()
        return seconds


@dataclass(frozen=True)
class Comparison:
    """A slice live and simulated; `clocked` is simulated on the live run's measured times."""

    live: Replay
    simulated: Replay
    clocked: Replay


def command(cfg: DictConfig) -> int:
    """Validate and write `summary.json`, `iterations.parquet`, `requests.parquet` and `report.html`.

    Raises:
        InputError: for a user's mistake.
    """
    from hydra.core.hydra_config import HydraConfig

    folder = run_folder()
    console = make_console()
    say: Say = (lambda line: None) if cfg.quiet else lambda line: console.print(Text(line, style="dim"))
    content, iterations, requests = validate(live_config(list(HydraConfig.get().overrides.task)), say)
    page = write_results(folder, content, iterations, requests)
    if not cfg.quiet:
        console.print(error_table(content["errors"]))
        console.print(Text(content["verdict"], style="bold green" if content["met"] else "bold red"))
        console.print(Text(f"report: {shown(page)}"))
    return 0


def live_config(overrides: Sequence[str]) -> DictConfig:
    """The configuration with `backend=live`, and a scheme that prices what its ranks do.

    Raises:
        InputError: for a key or value that cannot be.
    """
    given = [word for word in overrides if not word.startswith("backend=")]
    cfg = api.compose([*given, "backend=live"], command="validate")
    OmegaConf.set_struct(cfg, False)
    cfg.backend.keep_plans = True
    for key, value in RankRules.of(cfg.executor.device).options().items():
        if key in cfg.scheme:
            cfg.scheme[key] = value
    return cfg


def validate(cfg: DictConfig, say: Say = lambda line: None) -> tuple[dict[str, Any], pa.Table, pa.Table]:
    """The summary, and tables of iterations and of requests.

    Raises:
        InputError: for values that contradict each other or cannot be.
    """
    simulation = api.build(cfg)
    repeats = int(cfg.live.repeats)
    if repeats < 0:
        raise InputError(f"live.repeats={repeats}: use 0 or more")
    rates = [float(rate) for rate in cfg.live.rates or []]
    if any(not 0 < rate < float("inf") for rate in rates):
        raise InputError(f"live.rates={list(cfg.live.rates)}: use numbers above 0")
    simulation.latency.describe(simulation.model, simulation.gpu)  # a missing profile is said before ranks start
    comparison = compare(simulation, repeats, say)
    iterations, requests = iterations_table(comparison), requests_table(comparison)
    goodput = compare_goodput(simulation, rates, say)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    return summarise(simulation, comparison, iterations, requests, goodput, config), iterations, requests


# Running -------------------------------------------------------------------------------------------------------------


def compare(simulation: Simulation, repeats: int, say: Say = lambda line: None) -> Comparison:
    """Run the slice live, execute its plans `repeats` times more, and simulate it twice."""
    say("live: every iteration on real ranks")
    live = replay(simulation, repeats)
    say(f"live: {len(live.plans):,} iterations, executed {repeats + 1} times; simulating")
    simulated = replay(replace(simulation, backend=ModelBackendConfig()))
    clocked = replay(replace(simulation, backend=RecordedTimes(live.durations_s)))
    return Comparison(live, simulated, clocked)


def replay(simulation: Simulation, repeats: int = 0, rate: float | None = None) -> Replay:
    """One run with its plans."""
    logged = replace(simulation, backend=PlanLog(simulation.backend))
    load = logged.arrivals.apply(logged.trace, logged.rate if rate is None else rate, logged.seed)
    run = Run(logged, load)
    try:
        run.execute(logged.horizon_s, False)
        result = run.result()
        backends = run.live
        assert isinstance(backends, LoggedRun)
        again = backends.repeat(repeats) if repeats else None
        return Replay(result, backends.plans, again)
    finally:
        run.close()


def compare_goodput(simulation: Simulation, rates: Sequence[float], say: Say) -> list[dict[str, Any]]:
    """Attainment at each rate, live and simulated."""
    rows = []
    for rate in rates:
        say(f"goodput: {rate:g} req/s, live and simulated")
        live = replay(simulation, rate=rate).result.summary
        simulated = replay(replace(simulation, backend=ModelBackendConfig()), rate=rate).result.summary
        rows.append({"rate": rate, "live": live["attainment"], "simulated": simulated["attainment"]})
    return rows


# Comparing -----------------------------------------------------------------------------------------------------------


def iterations_table(comparison: Comparison) -> pa.Table:
    """One row an iteration of the live run: what ran, measured median and prediction."""
    live = comparison.live
    table = live.result.iterations
    single = np.array(live.durations_s)
    runs = single[None] if live.repeats is None else np.concatenate([single[None], live.repeats])
    prefill, decode = table["prefill_tokens"].to_numpy(), table["decode_tokens"].to_numpy()
    kind = np.where(decode == 0, KINDS[0], np.where(prefill == 0, KINDS[1], KINDS[2]))
    half = (np.median(runs[0::2], axis=0), np.median(runs[1::2], axis=0)) if len(runs) > 1 else (single, single)
    equal = [
        number < len(comparison.simulated.plans) and plan == comparison.simulated.plans[number]
        for number, plan in enumerate(live.plans)
    ]
    return pa.table(
        {
            "start_s": table["start_s"],
            "kind": kind.tolist(),
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "context_tokens": table["context_tokens"],
            "measured_s": np.median(runs, axis=0),
            "single_s": single,
            "even_s": half[0],
            "odd_s": half[1],
            "predicted_s": table["predicted_s"],
            "same_plan_simulated": equal,
        }
    )


REQUEST_TIMES = ("ttft_s", "max_gap_s", "tpot_s", "e2e_s")


def requests_table(comparison: Comparison) -> pa.Table:
    """One row a request: its latencies live and simulated."""
    live, simulated = comparison.live.result.requests, comparison.simulated.result.requests
    names = ("request_id", "prompt_tokens", "output_tokens", "status")
    columns = {name: live[name] for name in names}
    for name in REQUEST_TIMES:
        columns[f"live_{name}"] = live[name]
        columns[f"simulated_{name}"] = simulated[name]
    columns["live_attained"], columns["simulated_attained"] = live["attained"], simulated["attained"]
    return pa.table(columns)


def errors_of(predicted: Floats, measured: Floats) -> dict[str, Any]:
    """Absolute and signed relative errors; null where there is nothing to compare."""
    inside = np.isfinite(predicted) & np.isfinite(measured) & (measured > 0)
    if not inside.any():
        return {"rows": 0, "mean": None, "median": None, "p95": None, "bias": None, "total": None}
    error = predicted[inside] / measured[inside] - 1.0
    return {
        "rows": int(inside.sum()),
        "mean": float(np.abs(error).mean()),
        "median": float(np.median(np.abs(error))),
        "p95": float(np.quantile(np.abs(error), 0.95)),
        "bias": float(error.mean()),
        "total": float(predicted[inside].sum() / measured[inside].sum() - 1.0),  # of all seconds together
    }


def iteration_errors(table: pa.Table) -> list[dict[str, Any]]:
    """Errors by kind of batch, then by size, then of all; each with its noise floor."""
    kind = np.array(table["kind"].to_pylist(), object)
    tokens = table["prefill_tokens"].to_numpy() + table["decode_tokens"].to_numpy()
    groups = [("kind", name, kind == name) for name in KINDS]
    low = 0
    for high in (*SIZES, None):
        inside = (tokens > low) & (tokens <= high) if high is not None else tokens > low
        groups.append(("tokens", f"{low + 1:,} to {high:,}" if high is not None else f"over {low:,}", inside))
        low = high or low
    groups.append(("all", "all iterations", np.ones(len(tokens), bool)))
    return [{"by": by, "name": name, **_group_errors(table, inside)} for by, name, inside in groups if inside.any()]


def _group_errors(table: pa.Table, inside: npt.NDArray[np.bool_]) -> dict[str, Any]:
    columns = {
        name: table[name].to_numpy()[inside] for name in ("predicted_s", "measured_s", "single_s", "even_s", "odd_s")
    }
    return {
        **errors_of(columns["predicted_s"], columns["measured_s"]),
        # Two medians of half the executions differ by more than one median of all does: an upper bound of the floor.
        "noise_median": errors_of(columns["even_s"], columns["odd_s"])["mean"],
        "noise_single": errors_of(columns["single_s"], columns["measured_s"])["mean"],
    }


def summarise(
    simulation: Simulation,
    comparison: Comparison,
    iterations: pa.Table,
    requests: pa.Table,
    goodput: list[dict[str, Any]],
    config: dict[str, Any],
) -> dict[str, Any]:
    """`summary.json`."""
    live, simulated = comparison.live.result.summary, comparison.simulated.result.summary
    errors = iteration_errors(iterations)
    target = TARGETS.get(simulation.gpu.name, TARGET)
    judged = next((row for row in errors if row["name"] == "mixed"), errors[-1])
    met = judged["mean"] is not None and judged["mean"] <= target
    repeats = 0 if comparison.live.repeats is None else len(comparison.live.repeats)
    return {
        "kind": "validate",
        "source": "executor",
        "label": live["label"],
        "scheme": live["scheme"],
        "policy": live["policy"],
        "model": live["model"],
        "gpu": live["gpu"],
        "repeats": repeats,
        "target": target,
        "met": met,
        "verdict": verdict(judged, target, repeats),
        "errors": errors,
        "requests": request_errors(requests),
        "attainments": {"live": live["attainment"], "simulated": simulated["attainment"]},
        "goodput": goodput_of(goodput, simulation.slo.attainment),
        "plans": plans_of(comparison),
        "tokens": tokens_of(comparison),
        "live": live["live"],
        "warnings": warnings(comparison, judged, repeats),
        "provenance": {
            **provenance(config, simulation.seed),
            **{key: live["provenance"][key] for key in ("profile_hash", "latency", "trace", "arrivals")},
        },
    }


def verdict(judged: Mapping[str, Any], target: float, repeats: int) -> str:
    """One line: the error of whole iterations, the noise beside it, and whether that is the aim."""
    if judged["mean"] is None:
        return "nothing was compared: no iteration ran"
    words = "is met" if judged["mean"] <= target else "is not met"
    noise = f"; medians of half the {repeats + 1} executions differ by {share(judged['noise_median'])}"
    if not repeats:
        noise = "; executed once, so noise is unknown"
    return (
        f"{judged['name']} iterations: mean absolute error {share(judged['mean'])} "
        f"(median {share(judged['median'])}, P95 {share(judged['p95'])}){noise}; the aim of {share(target)} {words}"
    )


def request_errors(table: pa.Table) -> list[dict[str, Any]]:
    """Errors of each latency, request by request, and its mean live and simulated."""
    rows = []
    for name in REQUEST_TIMES:
        live, simulated = (_numbers(table[f"{side}_{name}"]) for side in ("live", "simulated"))
        row = {"name": name, **errors_of(simulated, live)}
        for side, values in (("live", live), ("simulated", simulated)):
            finite = values[np.isfinite(values)]
            quantiles = np.quantile(finite, (0.5, 0.95)) if len(finite) else (None, None)
            row |= {f"{side}_p50": _float(quantiles[0]), f"{side}_p95": _float(quantiles[1])}
        rows.append(row)
    return rows


def goodput_of(rows: list[dict[str, Any]], attainment: float) -> dict[str, Any] | None:
    """Attainment by rate, and the highest rate tried that meets the target."""
    if not rows:
        return None
    best = {
        side: max((row["rate"] for row in rows if row[side] >= attainment), default=0.0)
        for side in ("live", "simulated")
    }
    return {"attainment": attainment, "rates": rows, **best}


def plans_of(comparison: Comparison) -> dict[str, Any]:
    """How many plans are the same: on the measured times (all have to be), and on the model's own."""
    live = comparison.live.plans

    def same(other: list[PlanKey]) -> int:
        return sum(a == b for a, b in zip(live, other, strict=False))

    def differs(other: list[PlanKey]) -> int | None:
        pairs = zip(live, other, strict=False)
        first = next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(live), len(other)))
        return None if first == len(live) == len(other) else first

    clocked, simulated = comparison.clocked.plans, comparison.simulated.plans
    return {
        "live": len(live),
        "simulated": len(simulated),
        "same_on_measured_times": same(clocked),
        "first_difference_on_measured_times": differs(clocked),
        "same_on_model_times": same(simulated),
        "first_difference_on_model_times": differs(simulated),
    }


def tokens_of(comparison: Comparison) -> dict[str, int]:
    """Tokens that ranks produced, and those that the requests got."""
    result = comparison.live.result
    return {
        "produced": int(result.summary["live"]["tokens"]),
        "emitted": int(np.sum(result.requests["emitted_tokens"].to_numpy())),
    }


def warnings(comparison: Comparison, judged: Mapping[str, Any], repeats: int) -> list[str]:
    """What a reader should know before believing the figures."""
    lines = list(comparison.live.result.summary["warnings"])
    plans, tokens = plans_of(comparison), tokens_of(comparison)
    if plans["first_difference_on_measured_times"] is not None:
        at = plans["first_difference_on_measured_times"]
        lines.append(f"the simulation on measured times makes another plan at iteration {at}")
    if tokens["produced"] != tokens["emitted"]:
        lines.append(f"ranks produced {tokens['produced']:,} tokens, requests got {tokens['emitted']:,}")
    if repeats and (judged["noise_median"] or 0.0) > WARN_NOISE:
        lines.append(
            f"the same plans executed again differ by {share(judged['noise_median'])} (medians of half the "
            "executions): errors near that size say nothing about the model"
        )
    return lines


def _numbers(column: pa.ChunkedArray) -> Floats:
    return np.array([np.nan if value is None else value for value in column.to_pylist()], dtype=np.float64)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


# Writing -------------------------------------------------------------------------------------------------------------


def write_results(folder: Path, content: dict[str, Any], iterations: pa.Table, requests: pa.Table) -> Path:
    """Everything into the folder; the report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "iterations.parquet", iterations)
    write_table(folder / "requests.parquet", requests)
    page = write_page(content, iterations, requests, folder / "report.html")
    write_json(folder / "summary.json", content)
    return page


def error_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Errors as they are printed."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("iterations")
    for name in ("rows", "mean", "median", "P95", "bias", "noise of medians", "noise of one"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [share(row[key]) for key in ("mean", "median", "p95", "bias", "noise_median", "noise_single")]
        table.add_row(row["name"] + (" tokens" if row["by"] == "tokens" else ""), f"{row['rows']:,}", *cells)
    return table
