"""Experiment 6: goodput of every scheme on every workload and model, under several conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.experiments.base import MODELS, Experiment, ExperimentCell, Results, Section, Settings, registered
from analysis.pages.charts import bars

ROWS = {  # schemes and how their options are chosen; auto and tuned are searched
    "Conflux": ("scheme=conflux",),
    "Conflux, adaptive split": ("scheme=conflux", "sm_split=adaptive"),
    "uniform SP": ("scheme=uniform_sp",),
    "chunked prefill, dynamic": ("scheme=chunked_prefill", "chunk_tokens=auto"),
    "chunked prefill, tuned": ("scheme=chunked_prefill", "chunk_tokens=tuned"),
    "data parallel, best TP": ("scheme=data_parallel", "tp=auto"),
    "MuxWise": ("scheme=muxwise",),
    "LoongServe": ("scheme=loongserve",),
    "disaggregated, best split": ("scheme=disaggregated", "split=auto"),
}
ORDERS = ("FCFS", "SRPF / deadline")
DETAILED = "qwen3_14b"  # the model with more conditions

CONDITIONS = {
    "max gap": [],
    "deadline": ["slo.rule=deadline"],
    "noise": ["noise"],
    "exposed overhead": ["scheme.async_schedule=false"],
}
DETAILS = {
    "SLO halved": ["slo.ttft_s=1", "slo.tbt_s=0.05"],
    "SLO doubled": ["slo.ttft_s=4", "slo.tbt_s=0.2"],
    "TTFT by length": ["slo.ttft_s=1", "slo.ttft_per_token_s=0.001"],
    "prefix reuse": ["kv.prefix_cache=true"],
}
MEANING = {
    "max gap": "The SLO of the headline: TTFT 2 s, largest gap 100 ms, for 95% of the requests.",
    "deadline": "Token i is due at arrival + 2 s + i * 100 ms: an early first token lends its slack to later gaps.",
    "noise": "Times vary around their predictions by the held-out error of the latency profile; every planner may keep "
    "a margin of 0, 10, 20 or 30% to the TBT, the best is taken.",
    "exposed overhead": "Nobody hides host work behind the GPU: all pay the same overhead for the same batch.",
    "SLO halved": "TTFT 1 s, largest gap 50 ms.",
    "SLO doubled": "TTFT 4 s, largest gap 200 ms.",
    "TTFT by length": "TTFT at most 1 ms a prompt token, or 1 s if that is more; largest gap 100 ms.",
    "prefix reuse": "Prompts reuse cached prefixes, in schemes that keep them.",
}


def cells(settings: Settings) -> dict[str, ExperimentCell]:
    """A lane for each model, workload, order and scheme."""
    found = {}
    for model in settings.models:
        for workload in settings.workloads:
            for order in ORDERS:
                for name, row in registered(ROWS).items():
                    key = _key(model, workload, order, name)
                    found[key] = lane(settings, key, model, workload, row, order, _conditions(settings, model))
    return found


def _conditions(settings: Settings, model: str) -> dict[str, list[str]]:
    """The conditions of a model; the further ones only for one of them, unless everything is asked for."""
    return {**CONDITIONS, **(DETAILS if model == DETAILED or settings.full else {})}


def policy(row: Sequence[str], order: str) -> str:
    """The override of a scheme's queue order."""
    if order == ORDERS[0]:
        return "policy=fcfs"
    return "policy=deadline_waterfill" if row[0] == "scheme=conflux" else "policy=srpf"


def lane(
    settings: Settings,
    label: str,
    model: str,
    workload: str,
    row: Sequence[str],
    order: str,
    conditions: dict[str, list[str]],
    shape: dict[str, Any] | None = None,
) -> ExperimentCell:
    """The searches of one scheme on one workload."""
    gpus, tp = MODELS[model]
    scheme = row[0].removeprefix("scheme=")
    params = {
        "trace": settings.trace(workload),
        "scheme": scheme,
        "options": dict(option.split("=", 1) for option in row[1:]),
        "overrides": [f"model={model}", f"cluster.gpus={gpus}", f"cluster.tp={tp}", policy(row, order)],
        "variants": conditions,
        "requests": settings.requests,
        "seed": settings.seed,
        "tolerance": settings.tolerance,
        "zero_load_requests": settings.zero_load_requests,
        "shape": shape,
    }
    return ExperimentCell("lane", label, params)


def _key(model: str, workload: str, order: str, name: str) -> str:
    return f"{model}, {workload}, {order}, {name}"


# --- the page --------------------------------------------------------------------------------------------------------


def section(settings: Settings, results: Results) -> Section:
    """The headline table, a figure for each model, and a table for each condition."""
    page = Section("6. Goodput of every scheme")
    _introduction(page, settings, results)
    for model in settings.models:
        gpus, tp = MODELS[model]
        page.text(f"### {model}, {gpus} H100" + (f", groups of {tp}" if tp > 1 else ""))
        for order in ORDERS:
            page.text(f"**{order}.** {MEANING['max gap']}")
            page.table(_head(settings), _rows(settings, results, model, order, "max gap"))
        names = [settings.title(workload) for workload in settings.workloads]
        figure = bars(names, _series(settings, results, model), "workload", "goodput (req/s)")
        page.figure(f"goodput_{model}", figure, f"Goodput on {model}, {ORDERS[1]}")
        _chosen(page, settings, results, model)
    page.text("### Other conditions")
    for name in [*CONDITIONS, *DETAILS][1:]:
        _condition(page, settings, results, name)
    return page


def _introduction(page: Section, settings: Settings, results: Results) -> None:
    size = "Whole traces" if settings.requests is None else f"Slices of {settings.requests:,} consecutive requests"
    recorded = [w for w in settings.workloads if settings.is_recorded(w)]
    presets = [w for w in settings.workloads if not settings.is_recorded(w)]
    sources = [f"recorded: {', '.join(recorded)}"] if recorded else []
    sources += [f"synthetic presets of confsim: {', '.join(presets)}"] if presets else []
    page.text(
        f"{size} from a seeded place of each workload ({'; '.join(sources)}), arrivals spread over the recorded ticks "
        f"and scaled to the rate; goodput to {settings.tolerance:.0%}. Every baseline runs first come first served and "
        "then shortest remaining prefill first; Conflux first come first served and then with its deadline order. "
        "Prefix reuse is off except where it is named. In brackets: attainment without load, where it is below 100%; "
        "`0` with an attainment below 95% is structural, no rate can meet it; a dash marks a "
        "scheme that cannot run there. The last row divides the better Conflux by the best baseline. A slice is short: "
        "above 25 req/s it spans less than 20 TTFT limits, and goodputs there are optimistic for every scheme."
    )


def _head(settings: Settings) -> list[str]:
    return ["goodput, req/s", *(settings.title(workload) for workload in settings.workloads)]


def _rows(settings: Settings, results: Results, model: str, order: str, condition: str) -> list[list[str]]:
    found = {
        name: [_variant(results, _key(model, w, order, name), condition) for w in settings.workloads]
        for name in registered(ROWS)
    }
    rows = [[name, *map(_entry, row)] for name, row in found.items()]
    return [*rows, ["**Conflux over best baseline**", *_ratios(found)]]


def _variant(results: Results, key: str, condition: str) -> dict[str, Any]:
    variant: dict[str, Any] = results[key]["variants"][condition]
    return variant


def _entry(variant: dict[str, Any]) -> str:
    if "refused" in variant:
        return "–"
    zero = variant["zero_load"]
    text = "0" if not variant["goodput"] else f"{variant['goodput']:.3g}"
    return text if zero == 1.0 else f"{text} ({zero:.0%})"


def _ratios(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    ratios = []
    for column in zip(*found.values(), strict=True):
        goodput = dict(zip(found, (variant["goodput"] for variant in column), strict=True))
        ours = max(value for name, value in goodput.items() if name.startswith("Conflux"))
        theirs = max(value for name, value in goodput.items() if not name.startswith("Conflux"))
        ratios.append(f"**{ours / theirs:.2f}**" if theirs else "–")
    return ratios


def _series(settings: Settings, results: Results, model: str) -> dict[str, list[float | None]]:
    return {
        name: [_variant(results, _key(model, w, ORDERS[1], name), "max gap")["goodput"] for w in settings.workloads]
        for name in registered(ROWS)
    }


def _chosen(page: Section, settings: Settings, results: Results, model: str) -> None:
    """What the searches chose for the schemes with options."""
    rows = []
    for name in registered(ROWS):
        variants = [_variant(results, _key(model, w, ORDERS[1], name), "max gap") for w in settings.workloads]
        if any(variant["chosen"] for variant in variants):
            rows.append([name, *(_values(variant["chosen"]) for variant in variants)])
    if rows:
        page.table([f"chosen, {ORDERS[1]}", *(settings.title(w) for w in settings.workloads)], rows)


def _values(chosen: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()) or "–"


def _condition(page: Section, settings: Settings, results: Results, name: str) -> None:
    for model in settings.models:
        for order in ORDERS if name in _conditions(settings, model) else ():
            page.text(f"**{name}**, {model}, {order}. {MEANING[name]}")
            page.table(_head(settings), _rows(settings, results, model, order, name))


EXPERIMENT = Experiment("ranking", "Goodput of every scheme", cells, section)
