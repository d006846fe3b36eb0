"""Computes cells: scenarios, and lanes of goodput searches of one scheme on one workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.cases import SchemeCase, scheme_cases
from analysis.compare import latency_error
from analysis.experiments.base import Cell
from analysis.goodput import Probe, Search, SearchSettings, Task, search
from analysis.premise import Lengths, gpus_needed
from analysis.runner import ZERO_LOAD_RATE, sample_by_length
from confsim import api
from confsim.errors import InputError
from confsim.scenario import run as run_scenario
from traces.arrivals import Poisson
from traces.trace import Trace

KEPT = ("prefill_s", "prefills_per_s", "iterations", "max_gap_s", "tbt_met", "breakdown_s", "attention_stage_s")
KEPT += ("linear_stage_s", "iteration_s", "groups", "tokens_per_group", "preemptions", "warnings")
STATISTICS = ("ttft_s", "gap_s", "tpot_s")
MIN_RATE, MAX_RATE = 0.05, 1000.0  # req/s; a goodput below the first counts as 0
NOISY_MARGINS = (0.3, 0.2, 0.1, 0.0)  # of slo.margin, the likeliest first: the others then cost a probe each


def compute(cell: Cell) -> dict[str, Any]:
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
        found: dict[str, Any] = {}
        compiled: dict[Any, Any] = {}
        base: dict[str, Any] | None = None
        for name, overrides in self.variants.items():
            found[name] = _Condition(self, overrides, compiled, base).result()
            base = base or found[name]
        trace = self.replayed(False)
        label = trace.provenance.get("label") or trace.provenance.get("name")
        return {"variants": found, "trace": str(label), "requests": len(trace)}

    def replayed(self, block_ids: bool) -> Trace:
        """The slice that this lane replays."""
        overrides = (*self.trace, *(("kv.prefix_cache=true",) if block_ids else ()))
        return reshaped(slice_of(overrides, self.requests, self.seed), self.shape)


class _Condition:
    """One variant of a lane."""

    def __init__(
        self, lane: Lane, overrides: Sequence[str], compiled: dict[Any, Any], base: dict[str, Any] | None
    ) -> None:
        self.lane = lane
        self.compiled = compiled
        self.base = base
        self.noisy = "noise" in overrides
        own = [f"++per_scheme.{lane.scheme}.{key}={value}" for key, value in lane.options.items()]
        words = [*lane.trace, f"schemes=[{lane.scheme}]", *own, *lane.overrides]
        keys = api.compose([f"scheme={lane.scheme}"]).scheme
        words += [word for word in overrides if word != "noise" and _applies(word, keys)]
        self.case = self._case(words)
        self.trace = lane.replayed(bool(self.case.configs[0]["kv"]["prefix_cache"]))
        self._simulations: dict[int, Any] = {}

    def _case(self, words: list[str]) -> SchemeCase:
        """The scheme's candidates, with what is best in the base first: others then cost a probe each."""
        case = scheme_cases(api.compose(words, command="goodput"))[0]
        pairs = list(zip(case.candidates, case.configs, strict=True))
        if self.base is not None:
            pairs.sort(key=lambda pair: pair[0] != self.base["chosen"])  # type: ignore[index]
        if self.noisy:
            pairs = self._with_noise(pairs)
        return replace(case, candidates=tuple(p[0] for p in pairs), configs=tuple(p[1] for p in pairs))

    def _with_noise(self, pairs: list[Any]) -> list[Any]:
        """All candidates with noise, the best of them with several margins."""
        summary = _build(pairs[0][1], self.lane.replayed(False), self.compiled)
        described = summary.latency.describe(summary.model, summary.gpu)
        error = latency_error({"provenance": {"latency": described}})
        noisy = [(values, _with(config, "latency", noise=error)) for values, config in pairs]
        values, config = noisy[0]
        wider = [({**values, "slo.margin": m}, _with(config, "slo", margin=m)) for m in NOISY_MARGINS]
        return [*wider, *noisy[1:]]

    def result(self) -> dict[str, Any]:
        """Goodput, what was chosen for it, why requests miss above it, and attainment without load."""
        zero = self._zero_load()
        target = float(self.case.configs[0]["slo"]["attainment"])
        found = self._search()
        curve = found.curve
        failure = curve.lowest_failure
        out: dict[str, Any] = {
            "goodput": curve.goodput,
            "chosen": self.case.candidates[found.best],
            "zero_load": zero,
            "structural": curve.goodput == 0 and zero < target,
            "missed_by": curve[failure].missed_by if failure is not None else {},
            "monotone": not curve.passes_above_failure,
            "probes": sum(len(candidate.curve) for candidate in found.candidates),
        }
        if self.base is None and curve.goodput:
            out |= self._at(found.best, curve.goodput)
        return out

    def _search(self) -> Search:
        start = self.base["goodput"] if self.base is not None and self.base["goodput"] else 2.0
        step = 1.25 if self.base is not None and self.base["goodput"] else 2.0
        settings = SearchSettings(self.lane.tolerance, MIN_RATE, MAX_RATE, start, probes_per_round=1, step=step)
        return search(self._probe, settings, self.case.candidates)

    def _simulation(self, candidate: int) -> Any:
        if candidate not in self._simulations:
            self._simulations[candidate] = _build(self.case.configs[candidate], self.trace, self.compiled)
        return self._simulations[candidate]

    def _probe(self, task: Task) -> Probe:
        result = self._simulation(task.candidate).run(rate=task.rate, probe=True)
        passed, low, high, early = result.verdict
        missed = {reason: count for reason, count in result.summary["missed_by"].items() if count}
        return Probe(task.rate, passed, low, high, early, missed)

    def _zero_load(self) -> float:
        """The best attainment without load that a candidate reaches."""
        sample = sample_by_length(self.trace, self.lane.zero_load_requests)
        best = 0.0
        for candidate in range(len(self.case.configs)):
            simulation = replace(self._simulation(candidate), trace=sample, arrivals=Poisson())
            best = max(best, float(simulation.run(rate=ZERO_LOAD_RATE).summary["attainment"]))
            if best == 1.0:
                break
        return best

    def _at(self, candidate: int, rate: float) -> dict[str, Any]:
        summary = self._simulation(candidate).run(rate=rate).summary
        out = {key: {name: (summary[key] or {}).get(name) for name in ("p50", "p95", "p99")} for key in STATISTICS}
        mean_tpot = (summary["tpot_s"] or {}).get("mean")
        return {**out, "tpot_mean_s": mean_tpot, "utilisation": summary["utilisation"]}


def _applies(word: str, keys: Any) -> bool:
    """Whether a scheme has the option that an override is about; one that does not is not asked."""
    key = word.partition("=")[0]
    return not key.startswith("scheme.") or key.removeprefix("scheme.") in keys


def _build(config: dict[str, Any], trace: Trace, compiled: dict[Any, Any]) -> Any:
    from omegaconf import OmegaConf

    return replace(api.build(OmegaConf.create(config), trace), compiled=compiled)


def _with(config: dict[str, Any], group: str, **values: Any) -> dict[str, Any]:
    return {**config, group: {**config[group], **values}}


Compute = Callable[[Cell], dict[str, Any]]
