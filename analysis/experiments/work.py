"""Computes cells: scenarios, and lanes of goodput searches of one scheme on one workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from omegaconf import OmegaConf

from analysis.experiments.base import ExperimentCell
from analysis.search.cases import SchemeCase, scheme_cases
from analysis.search.compare import latency_error
from analysis.search.goodput import Probe, Refusal, SearchSettings, Trial, search
from analysis.search.premise import Lengths, gpus_needed
from analysis.search.runner import CaseRun, CaseRunner, FullRun, point_of
from confsim import api
from confsim.errors import InputError
from confsim.run.scenario import run as run_scenario
from traces.trace import Trace

KEPT: tuple[str, ...] = (
    "prefill_s",
    "prefills_per_s",
    "iterations",
    "max_gap_s",
    "tbt_met",
    "breakdown_s",
    "attention_stage_s",
)
KEPT += ("linear_stage_s", "iteration_s", "groups", "tokens_per_group", "preemptions", "warnings")
NOISE = "noise"  # an override that stands for noise at the held-out error
Pair = tuple[dict[str, Any], dict[str, Any]]  # values of a candidate, and its configuration
STATISTICS = ("ttft_s", "gap_s", "tpot_s")
MIN_RATE, MAX_RATE = 0.05, 1000.0  # req/s; a goodput below the first counts as 0
NOISY_MARGINS = (0.3, 0.2, 0.1, 0.0)  # of slo.margin, the likeliest first: the others then cost a probe each


def compute(cell: ExperimentCell) -> dict[str, Any]:
    """The result of a cell as plain JSON data; `refused` says why where the scheme cannot run it.

    Raises:
        InputError: for a lane whose configuration is wrong.
    """
    if cell.kind == "scenario":
        return _scenario(cell.params["overrides"])
    if cell.kind == "lengths":
        return _lengths(**cell.params)
    return Lane(**cell.params).run()


def _scenario(overrides: Sequence[str]) -> dict[str, Any]:
    try:
        summary = run_scenario(api.compose(list(overrides), command="scenario")).summary
    except InputError as error:
        return {"refused": str(error)}
    return {key: summary[key] for key in KEPT}


def _lengths(
    trace: Sequence[str], overrides: Sequence[str], requests: int | None, seed: int, shape: dict[str, Any] | None
) -> dict[str, Any]:
    """Lengths of a workload, and the GPUs that its P95 prompt needs."""
    lengths = Lengths.of(reshaped(slice_of(tuple(trace), requests, seed), shape))
    cfg = api.compose(list(overrides))
    return {
        "prompt": {str(share): tokens for share, tokens in lengths.prompt.items()},
        "mean_output": lengths.mean_output,
        "decode_context": lengths.decode_context,
        "gpus_p95": gpus_needed(cfg, lengths.prompt[95]),
    }


# --- traces ----------------------------------------------------------------------------------------------------------


@cache
def slice_of(overrides: tuple[str, ...], requests: int | None, seed: int) -> Trace:
    """So many consecutive requests of a trace from a seeded place on; None is the whole trace."""
    cfg = api.compose(list(overrides), command="simulate")
    trace = api.load_trace(cfg)
    if requests is None or requests >= len(trace):
        return trace
    start = int(np.random.default_rng([seed, 0x51]).integers(0, len(trace) - requests + 1))
    provenance = {**trace.provenance, "slice": {"first": start, "requests": requests, "of": len(trace), "seed": seed}}
    return Trace(rebased(trace.table.slice(start, requests)), trace.block_tokens, provenance)


def rebased(table: pa.Table) -> pa.Table:
    """Rows with their arrivals counted from the first one."""
    arrival = pc.subtract(table["arrival_s"], table["arrival_s"][0])
    return table.set_column(table.schema.get_field_index("arrival_s"), table.schema.field("arrival_s"), arrival)


def reshaped(trace: Trace, shape: dict[str, Any] | None) -> Trace:
    """A trace with other prompts: a seeded `short_share` of them cut to `short_tokens`, all of them times `scale`."""
    if not shape:
        return trace
    prompt = trace.table["prompt_tokens"].to_numpy().astype(np.float64) * shape.get("scale", 1.0)
    if "short_share" in shape:
        order = np.random.default_rng([shape["seed"], 0x53]).permutation(len(prompt))
        prompt[order[: round(shape["short_share"] * len(prompt))]] = shape["short_tokens"]
    column = pa.array(np.maximum(np.rint(prompt), 1).astype(np.int32))
    schema = trace.table.schema
    table = trace.table.set_column(
        schema.get_field_index("prompt_tokens"), schema.field("prompt_tokens"), column
    ).drop_columns("block_ids")
    table = table.append_column(schema.field("block_ids"), pa.nulls(len(table), schema.field("block_ids").type))
    return Trace(table.select(schema.names), 0, {**trace.provenance, "reshaped": shape})


# --- lanes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lane:
    """Goodput searches of one scheme and order on one workload, under one condition (`variants`) after the other.

    `variants` maps names to overrides; the first is the base, whose goodput is where the others start. The override
    `noise` stands for noise at the held-out error of the latency model, where margins are searched as well.
    """

    trace: tuple[str, ...]
    scheme: str
    options: dict[str, Any]
    overrides: tuple[str, ...]
    variants: dict[str, list[str]]
    requests: int | None = 1000
    seed: int = 0
    tolerance: float = 0.02
    zero_load_requests: int = 128
    shape: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """The result of each variant by name, and what was replayed."""
        case = self._case()
        compiled: dict[Any, Any] = {}
        found: dict[str, Any] = {}
        for name, overrides in self.variants.items():
            found[name] = self._condition(case, overrides, compiled, next(iter(found.values()), None))
        trace = self.replayed(False)
        label = trace.provenance.get("label") or trace.provenance.get("name")
        return {"variants": found, "trace": str(label), "requests": len(trace)}

    def _case(self) -> SchemeCase:
        own = [f"++per_scheme.{self.scheme}.{key}={value}" for key, value in self.options.items()]
        words = [*self.trace, f"schemes=[{self.scheme}]", "best_options=null", *own, *self.overrides]
        return scheme_cases(api.compose(words, command="goodput"))[0]

    def replayed(self, block_ids: bool) -> Trace:
        """The slice that this lane replays."""
        overrides = (*self.trace, *(("kv.prefix_cache=true",) if block_ids else ()))
        return reshaped(slice_of(overrides, self.requests, self.seed), self.shape)

    def _condition(
        self, case: SchemeCase, overrides: Sequence[str], compiled: dict[Any, Any], base: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Goodput under one condition, what was chosen for it, why requests miss above it, attainment without load."""
        pairs = self._pairs(case, overrides, compiled, base)
        trace = self.replayed(bool(pairs[0][1]["kv"]["prefix_cache"]))
        runner = CaseRunner([config for _, config in pairs], trace, compiled)
        found = search(partial(_probe, runner), self._settings(base), [values for values, _ in pairs])
        if not found.runnable:
            return {"goodput": 0.0, "chosen": {}, "zero_load": 0.0, "refused": found.each[0].refused}
        curve, best = found.curve, found.best
        failure, zero = curve.lowest_failure, self._zero_load(runner, found.runnable)
        out: dict[str, Any] = {
            "goodput": curve.goodput,
            "chosen": pairs[best][0],
            "zero_load": zero,
            "structural": curve.goodput == 0 and zero < float(pairs[0][1]["slo"]["attainment"]),
            "missed_by": curve[failure].missed_by if failure is not None else {},
            "monotone": not curve.passes_above_failure,
            "probes": sum(len(candidate.curve) for candidate in found.each),
        }
        return out | (_at(runner, best, curve.goodput) if base is None and curve.goodput else {})

    def _pairs(
        self, case: SchemeCase, overrides: Sequence[str], compiled: dict[Any, Any], base: dict[str, Any] | None
    ) -> list[Pair]:
        """The scheme's candidates under the overrides, the likeliest first: the others then cost a probe each."""
        words = [word for word in overrides if word != NOISE]
        pairs = [(v, overridden(config, words)) for v, config in zip(case.candidates, case.configs, strict=True)]
        if base is not None:
            pairs.sort(key=lambda pair: pair[0] != base["chosen"])
        if NOISE not in overrides:
            return pairs
        simulation = api.build(OmegaConf.create(pairs[0][1]), self.replayed(False))
        described = simulation.latency.describe(simulation.model, simulation.gpu)
        error = latency_error({"provenance": {"latency": described}})
        noisy = [(values, _with(config, "latency", noise=error)) for values, config in pairs]
        values, config = noisy[0]
        wider = [({**values, "slo.margin": m}, _with(config, "slo", margin=m)) for m in NOISY_MARGINS]
        return [*wider, *noisy[1:]]

    def _settings(self, base: dict[str, Any] | None) -> SearchSettings:
        """Those of a condition, which starts at the goodput of the base."""
        start, step = (base["goodput"], 1.25) if base is not None and base["goodput"] else (2.0, 2.0)
        return SearchSettings(self.tolerance, MIN_RATE, MAX_RATE, start, probes_per_round=1, step=step)

    def _zero_load(self, runner: CaseRunner, candidates: Sequence[int]) -> float:
        """The best attainment without load that a candidate reaches."""
        best = 0.0
        for candidate in candidates:
            alone = _full(runner, CaseRun(candidate, "zero", requests=self.zero_load_requests))
            best = max(best, alone.probe.attainment_low)
            if best == 1.0:
                break
        return best


def _probe(runner: CaseRunner, trials: Sequence[Trial]) -> list[Probe | Refusal]:
    return [point_of(runner(CaseRun(trial.candidate, "probe", trial.rate, may_refuse=True))) for trial in trials]


def _full(runner: CaseRunner, run: CaseRun) -> FullRun:
    outcome = runner(run)
    assert isinstance(outcome, FullRun)
    return outcome


def _at(runner: CaseRunner, candidate: int, rate: float) -> dict[str, Any]:
    summary = _full(runner, CaseRun(candidate, "full", rate)).summary
    out = {key: {name: (summary[key] or {}).get(name) for name in ("p50", "p95", "p99")} for key in STATISTICS}
    mean_tpot = (summary["tpot_s"] or {}).get("mean")
    return {**out, "tpot_mean_s": mean_tpot, "utilisation": summary["utilisation"]}


def overridden(config: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """A configuration with `group.key=value` words applied; an option that the scheme does not have is left out."""
    for word in words:
        group, _, rest = word.partition(".")
        key, _, value = rest.partition("=")
        if group != "scheme" or key in config["scheme"]:
            config = _with(config, group, **{key: OmegaConf.from_dotlist([f"{key}={value}"])[key]})
    return config


def _with(config: dict[str, Any], group: str, **values: Any) -> dict[str, Any]:
    return {**config, group: {**config[group], **values}}
