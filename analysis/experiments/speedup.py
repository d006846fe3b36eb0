"""Experiment 4: one long prefill on more GPUs, each with its decodes."""

from __future__ import annotations

from analysis.experiments.base import (
    PLAIN,
    Experiment,
    ExperimentCell,
    Results,
    Section,
    Settings,
    mean_s,
    milliseconds,
    number,
    registered,
    scenario,
)
from analysis.pages.charts import lines

GPUS = (1, 2, 4, 8)
DECODES = 16  # of 8K, a GPU
PROMPT = 32768
SPREADING = ("conflux", "uniform_sp", "chunked_prefill", "muxwise", "loongserve")  # schemes that run it on all GPUs


def cells(settings: Settings) -> dict[str, ExperimentCell]:
    """One prefill for each scheme and number of GPUs."""
    found = {}
    for name, overrides in _rows().items():
        for gpus in GPUS:
            key = f"{name}, {gpus} GPUs"
            load = {"decodes_per_gpu": DECODES, "prefill_tokens": PROMPT, "prefills": 1}
            found[key] = scenario(f"speed-up, {key}", *overrides, f"cluster.gpus={gpus}", **load)
    return found


def _rows() -> dict[str, tuple[str, ...]]:
    rows = registered(PLAIN)
    return {name: row for name, row in rows.items() if row[0].removeprefix("scheme=") in SPREADING}


def section(settings: Settings, results: Results) -> Section:
    """Times and speed-ups over one GPU."""
    page = Section("4. A long prefill on more GPUs")
    page.text(
        f"A prefill of 32K of Qwen3-14B with {DECODES} decodes of 8K on each of 1, 2, 4 and 8 H100, TBT 100 ms: the "
        "decode load grows with the GPUs. Milliseconds, and in brackets how many times faster than the scheme itself "
        "on one GPU."
    )
    times = {name: [mean_s(results[f"{name}, {gpus} GPUs"]) for gpus in GPUS] for name in _rows()}
    faster = {name: [_speedup(row[0], value) for value in row] for name, row in times.items()}
    page.table(
        ["milliseconds", *(f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS)],
        [
            [name, *(f"{milliseconds(time)} ({number(ratio)})" for time, ratio in zip(row, faster[name], strict=True))]
            for name, row in times.items()
        ],
    )
    ideal = {"ideal": [float(gpus) for gpus in GPUS]}
    page.figure(
        "speedup",
        lines(GPUS, {**faster, **ideal}, "GPUs", "times faster than on one GPU", log_x=True),
        "Speed-up of a prefill of 32K",
    )
    return page


def _speedup(one: float | None, value: float | None) -> float | None:
    return None if one is None or value is None else one / value


EXPERIMENT = Experiment("speedup", "A long prefill on more GPUs", cells, section)
