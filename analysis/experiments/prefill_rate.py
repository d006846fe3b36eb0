"""Experiment 1: prefills per second beside a decode load, by scheme."""

from __future__ import annotations

from analysis.experiments.base import (
    PLAIN,
    Experiment,
    ExperimentCell,
    Results,
    Section,
    Settings,
    kilo,
    number,
    refusals,
    registered,
    scenario,
)
from analysis.pages.charts import bars

PROMPTS = (8192, 16384, 32768, 65536)
TBTS_S = (0.05, 0.1)
DECODES = 24  # on each of 4 GPUs
PREFILLS = 16
OUTSTANDING = 8
STARVED = (
    "LoongServe starts a prompt only on instances that decode KV can be compacted away from, or where stopping all "
    "decodes pays. Where activations of long prompts leave fewer slots, these decodes do not fit on three instances. "
    "Each is replaced when it ends, outputs are too short for a stop to pay, and the rule has no ageing; in service a "
    "prompt would wait until a few decodes have ended "
    "([its page](schemes/loongserve.md))."
)


def cells(settings: Settings) -> dict[str, ExperimentCell]:
    """A scenario for each scheme, prompt length and TBT."""
    found = {}
    for name, overrides in registered(PLAIN).items():
        for tbt_s in TBTS_S:
            for prompt in PROMPTS:
                key = _key(name, tbt_s, prompt)
                found[key] = scenario(
                    key, *overrides, decodes_per_gpu=DECODES, prefill_tokens=prompt, prefills=PREFILLS,
                    concurrency=OUTSTANDING, tbt_s=tbt_s,
                )  # fmt: skip
    return found


def _key(name: str, tbt_s: float, prompt: int) -> str:
    return f"{name}, TBT {tbt_s * 1e3:.0f} ms, {kilo(prompt)}"


def section(settings: Settings, results: Results) -> Section:
    """A table and a figure for each TBT."""
    page = Section("1. Prefills beside decodes")
    page.text(
        f"Qwen3-14B on 4 H100. {DECODES} decodes of 8K context run on each GPU ({4 * DECODES} in all, each replaced "
        f"when it ends); {PREFILLS} prompts of one length, {OUTSTANDING} outstanding at a time. Prefills per second; "
        "`*` marks a decode that had to wait longer than the TBT, a dash a scheme that cannot serve this load."
    )
    for tbt_s in TBTS_S:
        rows = {name: [results[_key(name, tbt_s, prompt)] for prompt in PROMPTS] for name in registered(PLAIN)}
        page.text(f"**TBT {tbt_s * 1e3:.0f} ms**")
        page.table(
            ["prefills per second", *(f"{kilo(prompt)} prompt" for prompt in PROMPTS)],
            [[name, *map(_rate, row)] for name, row in rows.items()],
        )
        series = {name: [result.get("prefills_per_s") for result in row] for name, row in rows.items()}
        page.figure(
            f"prefill_rate_{tbt_s * 1e3:.0f}ms",
            bars([kilo(prompt) for prompt in PROMPTS], series, "prompt tokens", "prefills per second"),
            f"Prefills per second by prompt length, TBT {tbt_s * 1e3:.0f} ms",
        )
    refused = refusals({key: result for key, result in results.items() if key.endswith(kilo(PROMPTS[0]))})
    if refused:
        page.text("Refused:", "\n".join(refused))
    if any("starve" in str(result.get("refused")) for result in results.values()):
        page.text(STARVED)
    return page


def _rate(result: dict[str, object]) -> str:
    if "refused" in result:
        return "–"
    value = number(float(str(result["prefills_per_s"])))
    return value if result["tbt_met"] else f"{value} *"


EXPERIMENT = Experiment("prefill_rate", "Prefills beside decodes", cells, section)
