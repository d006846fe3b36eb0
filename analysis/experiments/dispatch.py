"""Experiment 5: dispatch of prefill tokens over groups of which one decodes everything."""

from __future__ import annotations

from analysis.experiments.base import Experiment, ExperimentCell, Results, Section, Settings, milliseconds, scenario
from analysis.pages.charts import bars

DECODES = (128, 0, 0, 0)
CONTEXT = 1024
CHUNKS = (512, 1024, 2048, 4096)
RULES = ("even", "waterfill")


def cells(settings: Settings) -> dict[str, ExperimentCell]:
    """One iteration for each chunk and rule."""
    found = {}
    for rule in RULES:
        for chunk in CHUNKS:
            found[f"{rule}, {chunk}"] = scenario(
                f"dispatch, {rule}, {chunk} tokens",
                "scheme=conflux",
                f"policy.dispatch={rule}",
                decodes_per_gpu=DECODES,
                decode_context=CONTEXT,
                decode_tokens=1,
                prefill_tokens=chunk,
                prefills=1,
                tbt_s=10,
            )
    return found


def section(settings: Settings, results: Results) -> Section:
    """Linear stage and tokens of each group."""
    page = Section("5. Dispatch over uneven groups")
    page.text(
        f"128 decodes of {CONTEXT:,} tokens on one GPU and none on the other three (Qwen3-14B, 4 H100); one iteration "
        "takes a whole prompt. The linear stage ends with its fullest group: waterfill levels the groups, even "
        "dispatch gives them equal shares of prefill whatever they decode."
    )
    head = ["prefill tokens", "even: tokens of the groups", "waterfill: tokens of the groups"]
    rows = [[f"{chunk:,}", *(_tokens(results[f"{rule}, {chunk}"]) for rule in RULES)] for chunk in CHUNKS]
    page.table(head, rows)
    times = {rule: [results[f"{rule}, {chunk}"]["linear_stage_s"] for chunk in CHUNKS] for rule in RULES}
    page.table(
        ["prefill tokens", "even: linear stage (ms)", "waterfill: linear stage (ms)", "saved"],
        [
            [f"{chunk:,}", milliseconds(even), milliseconds(water), f"{1 - water / even:.1%}"]
            for chunk, even, water in zip(CHUNKS, *times.values(), strict=True)
        ],
    )
    series = {rule: [value * 1e3 for value in row] for rule, row in times.items()}
    page.figure(
        "dispatch",
        bars([f"{chunk:,}" for chunk in CHUNKS], series, "prefill tokens of the iteration", "linear stage (ms)"),
        "Linear stage under even and waterfill dispatch",
    )
    return page


def _tokens(result: dict[str, list[float]]) -> str:
    return " / ".join(f"{tokens:,.0f}" for tokens in result["tokens_per_group"])


EXPERIMENT = Experiment("dispatch", "Dispatch over uneven groups", cells, section)
