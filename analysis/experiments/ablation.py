"""Experiment 2: Conflux with its parts switched off, one after the other."""

from __future__ import annotations

from analysis.experiments.base import (
    Experiment,
    ExperimentCell,
    Results,
    Section,
    Settings,
    kilo,
    mean_s,
    milliseconds,
    number,
    scenario,
)
from analysis.experiments.prefill_rate import DECODES, PROMPTS, TBTS_S
from analysis.pages.charts import bars

OVERLAP = "scheme.overlap=false"
SPREAD = "scheme.spread_decode=true"
ALONE = "scheme.co_batch=false"
ROWS = {
    "Conflux": (),
    "adaptive SM split": ("scheme.sm_split=adaptive",),
    "no overlap": (OVERLAP,),
    "and decode spread": (OVERLAP, SPREAD),
    "and no co-batching": (OVERLAP, SPREAD, ALONE),
}


def cells(settings: Settings) -> dict[str, ExperimentCell]:
    """One prefill for each variant, prompt length and TBT."""
    found = {}
    for name, overrides in ROWS.items():
        for tbt_s in TBTS_S:
            for prompt in PROMPTS:
                key = _key(name, tbt_s, prompt)
                load = {"decodes_per_gpu": DECODES, "prefill_tokens": prompt, "prefills": 1, "tbt_s": tbt_s}
                found[key] = scenario(f"ablation, {key}", "scheme=conflux", *overrides, **load)
    return found


def _key(name: str, tbt_s: float, prompt: int) -> str:
    return f"{name}, TBT {tbt_s * 1e3:.0f} ms, {kilo(prompt)}"


def section(settings: Settings, results: Results) -> Section:
    """Prefill times relative to Conflux as it is."""
    page = Section("2. What each part of Conflux contributes")
    page.text(
        f"The load of experiment 1 ({DECODES} decodes of 8K a GPU, Qwen3-14B on 4 H100) and one prefill. Parts are "
        "switched off one after the other: the attention paths run in turn; decodes are spread over the groups like "
        "prefill as well; linear layers of the two phases are not co-batched as well. Prefill time relative to Conflux "
        "with the paper's SM split (its time in milliseconds in brackets)."
    )
    for tbt_s in TBTS_S:
        times = {name: [mean_s(results[_key(name, tbt_s, prompt)]) for prompt in PROMPTS] for name in ROWS}
        whole = times["Conflux"]
        relative = {name: [_ratio(a, b) for a, b in zip(row, whole, strict=True)] for name, row in times.items()}
        page.text(f"**TBT {tbt_s * 1e3:.0f} ms**")
        page.table(
            ["relative prefill time", *(f"{kilo(prompt)} prompt" for prompt in PROMPTS)],
            [
                [
                    name,
                    *(f"{number(share)} ({milliseconds(time)})" for share, time in zip(row, times[name], strict=True)),
                ]
                for name, row in relative.items()
            ],
        )
        page.figure(
            f"ablation_{tbt_s * 1e3:.0f}ms",
            bars([kilo(prompt) for prompt in PROMPTS], relative, "prompt tokens", "prefill time, Conflux = 1"),
            f"Prefill time with parts of Conflux off, TBT {tbt_s * 1e3:.0f} ms",
        )
    return page


def _ratio(value: float | None, whole: float | None) -> float | None:
    return None if value is None or whole is None else value / whole


EXPERIMENT = Experiment("ablation", "What each part of Conflux contributes", cells, section)
