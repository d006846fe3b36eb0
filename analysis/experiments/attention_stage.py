"""Experiment 3: the attention stage alone, with its two paths overlapped and not."""

from __future__ import annotations

from analysis.experiments.base import Experiment, ExperimentCell, Results, Section, Settings, milliseconds, scenario
from analysis.pages.charts import bars

DECODES = (8, 16, 32, 48)  # a GPU
CHUNK = 8192  # prefill tokens of the iteration, over 4 GPUs
ROWS = {
    "in turn": ("scheme.overlap=false",),
    "overlapped, paper's split": ("scheme.overlap=true",),
    "overlapped, adaptive split": ("scheme.overlap=true", "scheme.sm_split=adaptive"),
}
CAPACITY = 600_000  # tokens of KV a GPU: more than it has, so that 48 decodes of 8K fit beside their prefill


def cells(settings: Settings) -> dict[str, ExperimentCell]:
    """One iteration with a whole chunk for each load and way to run the stage."""
    found = {}
    for name, overrides in ROWS.items():
        for decodes in DECODES:
            found[f"{name}, {decodes}"] = scenario(
                f"attention stage, {name}, {decodes} decodes a GPU",
                "scheme=conflux",
                *overrides,
                f"kv.capacity_tokens={CAPACITY}",
                decodes_per_gpu=decodes,
                decode_tokens=1,
                prefill_tokens=CHUNK,
                prefills=1,
                tbt_s=10,
            )
    return found


def section(settings: Settings, results: Results) -> Section:
    """Stage times, and the two paths alone."""
    page = Section("3. The attention stage alone")
    page.text(
        f"One iteration of Conflux (Qwen3-14B, 4 H100) with a first chunk of {CHUNK:,} prefill tokens beside decodes "
        "of 8K context. Milliseconds of the attention stage over all layers, all-to-alls included; the paths alone are "
        "what each takes on the whole GPU. KV capacity is set to "
        f"{CAPACITY:,} tokens a GPU, more than an 80 GB GPU has, so that the largest load can be asked for."
    )
    stage = {name: [results[f"{name}, {decodes}"]["attention_stage_s"] for decodes in DECODES] for name in ROWS}
    parts = [results[f"in turn, {decodes}"]["breakdown_s"] for decodes in DECODES]
    alone = {
        "prefill path alone": [part["communication"] + part["prefill_attention"] for part in parts],
        "decode path alone": [part["decode_attention"] for part in parts],
    }
    page.table(
        ["milliseconds", *(f"{decodes} decodes a GPU" for decodes in DECODES)],
        [[name, *map(milliseconds, row)] for name, row in {**stage, **alone}.items()],
    )
    saved = {
        name: [1 - value / turn for value, turn in zip(row, stage["in turn"], strict=True)]
        for name, row in stage.items()
        if name != "in turn"
    }
    page.table(
        ["time saved against running in turn", *(f"{decodes} decodes a GPU" for decodes in DECODES)],
        [[name, *(f"{share:+.0%}" for share in row)] for name, row in saved.items()],
    )
    series = {name: [value * 1e3 for value in row] for name, row in stage.items()}
    page.figure(
        "attention_stage",
        bars(DECODES, series, "decodes of 8K a GPU", "attention stage (ms)"),
        "Attention stage in turn and overlapped",
    )
    return page


EXPERIMENT = Experiment("attention_stage", "The attention stage alone", cells, section)
