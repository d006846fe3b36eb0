"""Experiment 7: where Conflux has no advantage, by the share of short prompts and by prompt length."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from analysis.experiments import ranking
from analysis.experiments.base import MODELS, Experiment, ExperimentCell, Results, Section, Settings, number, registered
from analysis.pages.charts import lines
from analysis.search.premise import decode_slack, decodes_running, one_group
from confsim import api

MODEL = "qwen3_14b"
WORKLOAD = "conversation"
SHARES = (0.0, 0.5, 0.75, 0.9, 0.95, 1.0)
SHORT = 512  # tokens of a short prompt
SCALES = (0.03, 0.1, 0.3, 1.0, 2.0)
TBT_S = 0.1
ROWS = {
    name: row
    for name, row in ranking.ROWS.items()
    if name not in ("chunked prefill, tuned", "LoongServe", "disaggregated, best split")
}


def rows() -> dict[str, tuple[str, ...]]:
    """The schemes that are compared: Conflux, and the baselines that come close to it."""
    known = registered(ranking.ROWS)
    return {name: row for name, row in ROWS.items() if name in known}


def cells(settings: Settings) -> dict[str, ExperimentCell]:
    """A lane for each scheme and mixture, and what each mixture is like."""
    found: dict[str, ExperimentCell] = {}
    shapes = {_share(share): _mixture(settings, share) for share in SHARES}
    shapes |= {_scale(scale): _scaled(scale) for scale in SCALES}
    for label, shape in shapes.items():
        for name, row in rows().items():
            key = f"{label}, {name}"
            found[key] = ranking.lane(
                settings, f"premise, {key}", MODEL, WORKLOAD, row, ranking.ORDERS[1], {"max gap": []}, shape
            )
    for scale in SCALES:
        found[f"{_scale(scale)}, lengths"] = _lengths(settings, scale)
    return found


def _lengths(settings: Settings, scale: float) -> ExperimentCell:
    gpus, tp = MODELS[MODEL]
    params = {
        "trace": settings.trace(WORKLOAD),
        "overrides": [f"model={MODEL}", f"cluster.gpus={gpus}", f"cluster.tp={tp}"],
        "requests": settings.requests,
        "seed": settings.seed,
        "shape": _scaled(scale),
    }
    return ExperimentCell("lengths", f"premise, lengths, prompts times {scale:g}", params)


def _mixture(settings: Settings, share: float) -> dict[str, Any] | None:
    return {"short_share": share, "short_tokens": SHORT, "seed": settings.seed} if share else None


def _scaled(scale: float) -> dict[str, Any] | None:
    return {"scale": scale} if scale != 1 else None


def _share(share: float) -> str:
    return f"{share:.0%} short"


def _scale(scale: float) -> str:
    return f"prompts times {scale:g}"


# --- the page --------------------------------------------------------------------------------------------------------


def section(settings: Settings, results: Results) -> Section:
    """Ratios by the share of short prompts and by prompt length."""
    page = Section("7. When not to use it")
    page.text(
        f"Qwen3-14B on 4 H100, {settings.title(WORKLOAD)}, TTFT 2 s, largest gap 100 ms, baselines with shortest "
        "remaining prefill first, Conflux with its deadline order. The ratio divides the better Conflux (paper's or "
        "adaptive SM split) by the best baseline; goodput is known to "
        f"{settings.tolerance:.0%}, so ratios below {1 + settings.tolerance:.2f} are no advantage."
    )
    _by_share(page, results)
    _by_length(page, results)
    return page


def _by_share(page: Section, results: Results) -> None:
    page.text(f"**Share of short prompts** ({SHORT} tokens instead of the recorded length, outputs as they are)")
    ratios = _table(page, results, [_share(share) for share in SHARES])
    page.text(vanishing(SHARES, ratios))
    figure = lines(SHARES, {"Conflux over best baseline": ratios}, "share of short prompts", "goodput ratio", limit=1.0)
    page.figure("premise_short", figure, "Advantage of Conflux by the share of short prompts")


def _by_length(page: Section, results: Results) -> None:
    page.text("**Prompt length and decode slack** (all prompts times a factor)")
    labels = [_scale(scale) for scale in SCALES]
    ratios = _table(page, results, labels)
    cfg = api.compose([f"model={MODEL}", f"slo.tbt_s={TBT_S}"])
    latency = one_group(cfg)
    table = []
    for label, ratio in zip(labels, ratios, strict=True):
        lengths = results[f"{label}, lengths"]
        slack = _slack(latency, lengths, results[f"{label}, Conflux"]["variants"]["max gap"])
        needs = lengths["gpus_p95"]
        table.append(
            [
                label,
                f"{lengths['prompt']['50']:,}",
                f"{lengths['prompt']['95']:,}",
                "more than 8" if needs is None else str(needs),
                *slack,
                "–" if ratio is None else f"{ratio:.2f}",
            ]
        )
    page.table(
        [
            "", "P50 prompt", "P95 prompt", "GPUs that P95 needs for its TTFT", "decodes a GPU at the goodput",
            "decode slack", "prefill tokens in it", "Conflux over best baseline",
        ],
        table,
    )  # fmt: skip
    page.text(
        "Decode slack: the share of the TBT that the decodes of one GPU leave at Conflux's goodput, and the prefill "
        "tokens of a first chunk that fit into it. `confsim advise trace=...` prints the same for another trace."
    )
    series = {"Conflux over best baseline": ratios}
    figure = lines(SCALES, series, "prompt lengths times", "goodput ratio", log_x=True, limit=1.0)
    page.figure("premise_length", figure, "Advantage of Conflux by prompt length")


def _slack(latency: Any, lengths: dict[str, Any], variant: dict[str, Any]) -> list[str]:
    gpus = MODELS[MODEL][0]
    decodes = decodes_running(variant["goodput"], lengths["mean_output"], variant.get("tpot_mean_s")) / gpus
    if not decodes:
        return ["–", "–", "–"]
    slack = decode_slack(latency, decodes, lengths["decode_context"], TBT_S)
    return [f"{decodes:.1f}", f"{slack.share:.0%}", f"{slack.prefill_tokens:,}"]


def _table(page: Section, results: Results, labels: list[str]) -> list[float | None]:
    """Goodputs, a row a scheme, and their ratios, which are returned."""
    variants = {name: [results[f"{label}, {name}"]["variants"]["max gap"] for label in labels] for name in rows()}
    found = {name: [variant["goodput"] for variant in row] for name, row in variants.items()}
    ratios: list[float | None] = []
    for column in zip(*found.values(), strict=True):
        goodput = dict(zip(found, column, strict=True))
        ours = max(value for name, value in goodput.items() if name.startswith("Conflux"))
        theirs = max(value for name, value in goodput.items() if not name.startswith("Conflux"))
        ratios.append(ours / theirs if theirs else None)
    body = [[name, *map(number, row)] for name, row in found.items()]
    last = ["**Conflux over best baseline**", *("–" if ratio is None else f"**{ratio:.2f}**" for ratio in ratios)]
    page.table(["goodput, req/s", *labels], [*body, last])
    return ratios


def vanishing(shares: tuple[float, ...], ratios: list[float | None]) -> str:
    """Where the ratio first falls to 1, between two measured shares by a straight line."""
    known = [(share, ratio) for share, ratio in zip(shares, ratios, strict=True) if ratio is not None]
    if not known:
        return "No baseline has a goodput to compare with."
    if known[0][1] <= 1:
        return f"There is no advantage at any share, from a ratio of {known[0][1]:.2f} without short prompts on."
    for (share, ratio), (after, lower) in pairwise(known):
        if lower <= 1:
            at = share + (ratio - 1) / (ratio - lower) * (after - share)
            return f"The advantage vanishes at about {at:.0%} short prompts."
    return "The advantage remains up to short prompts alone."


EXPERIMENT = Experiment("premise", "When not to use it", cells, section)
