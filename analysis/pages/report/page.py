"""What the template of a report (templates/report.html) is given: headings, cards, warnings and what ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from analysis.commands.shared import rate, seconds, share
from analysis.pages import html, theme
from analysis.pages.report import figures
from analysis.pages.report.compare_runs import common_and_different, mismatches
from analysis.pages.report.load import Results

MAX_ORIGINS = 20  # results whose provenance is shown
ODD_COUNTS = ("rejected", "unfinished", "preempted")  # of requests; only shown where there are any

Card = tuple[str, str, str]  # value, what it is, colour


def render(results: Results, title: str | None = None) -> str:
    """The page of some results."""
    contents = [*(search.content for search in results.searches), *(run.summary for run in results.simulations)]
    schemes = [name for search in results.searches for name in search.content["schemes"]]
    palette = theme.palette([*schemes, *(str(run.summary.get("scheme")) for run in results.simulations)])
    common, different = common_and_different(results)
    return html.render(
        "report.html",
        title=title or _title(results),
        results=results,
        palette=palette,
        draw=figures,
        setting=setting,
        settings=list(dict.fromkeys(setting(content) for content in contents)),
        synthetic=[bool(_provenance(content).get("trace", {}).get("synthetic")) for content in contents],
        cards=_search_cards(results, palette) or _run_cards(results, palette),
        warnings=html.merged(list(_warnings(results))),
        has_band=any(e.get("band") for search in results.searches for e in search.content["schemes"].values()),
        odd_counts=[key for key in ODD_COUNTS if any(run.summary["requests"].get(key) for run in results.simulations)],
        kv=list(dict.fromkeys(_kv_rows(results))),
        common=common,
        different=different,
        provenance=[(str(content.get("label", "")), _origin(content)) for content in contents[:MAX_ORIGINS]],
    )


def _title(results: Results) -> str:
    if len(results.searches) == 1 and not results.simulations:
        return f"Goodput of {' and '.join(results.searches[0].content['schemes'])}"
    if not results.searches and len(results.simulations) == 1:
        return f"One run of {results.simulations[0].summary.get('scheme')}"
    counts = ((len(results.searches), "goodput search", "es"), (len(results.simulations), "run", "s"))
    return ", ".join(f"{count} {name}{many if count > 1 else ''}" for count, name, many in counts if count)


def setting(content: dict[str, Any]) -> str:
    """Load, model, GPUs and SLO of a result in one line."""
    slo, cluster = content.get("slo") or {}, content.get("cluster") or {}
    gpus = f"{cluster.get('gpus', '?')} × {content.get('gpu')}"
    if (instances := cluster.get("instances") or 1) > 1:
        gpus = f"{instances} instances of {gpus}"
    parts = [str(content.get("label", "")), f"{content.get('model')} on {gpus}"]
    if slo:
        parts.append(
            f"TTFT ≤ {slo.get('ttft_s')} s, TBT ≤ {slo.get('tbt_s')} s for {slo.get('attainment', 0):.0%} of requests "
            f"(rule {slo.get('rule', 'max_gap')})"
        )
    return " · ".join(part for part in parts if part)


def _provenance(content: dict[str, Any]) -> dict[str, Any]:
    return content.get("provenance") or {}


def _origin(content: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in _provenance(content).items() if key != "config"}, indent=2)


def _search_cards(results: Results, palette: dict[str, str]) -> list[Card]:
    """The goodputs of the only search, and how much better the best is than the second."""
    if len(results.searches) != 1:
        return []
    schemes = results.searches[0].content["schemes"]
    cards = [(rate(entry["goodput"]), f"req/s goodput of {name}", palette[name]) for name, entry in schemes.items()]
    ranked = sorted(schemes, key=lambda name: -schemes[name]["goodput"])[:2]
    if len(ranked) == 2 and (other := schemes[ranked[1]]["goodput"]):
        ratio = schemes[ranked[0]]["goodput"] / other
        cards.append((f"{ratio:.2f}×", f"{ranked[0]} over {ranked[1]}", "var(--line)"))
    return cards


def _run_cards(results: Results, palette: dict[str, str]) -> list[Card]:
    if results.searches or len(results.simulations) != 1:
        return []
    summary = results.simulations[0].summary
    found = (
        (share(summary["attainment"]), "of requests keep the SLO"),
        (seconds((summary.get("ttft_s") or {}).get("p95")), "P95 time to first token"),
        (seconds((summary.get("max_gap_s") or {}).get("p95")), "P95 largest gap between tokens"),
        (f"{summary['requests']['injected']:,}", "requests"),
    )
    return [(*card, next(iter(palette.values()))) for card in found]


def _warnings(results: Results) -> Iterator[tuple[str, str]]:
    """Where, and what."""
    yield from (("", line) for line in [*mismatches(results), *results.skipped])
    for search in results.searches:
        for name, entry in search.content["schemes"].items():
            where = name if len(results.searches) == 1 else f"{search.name}, {name}"
            yield from ((where, line) for line in entry.get("warnings", []))
    for run in results.simulations:
        yield from ((run.name, line) for line in run.summary.get("warnings", []))


def _kv_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for run in results.runs:
        kv = run.summary.get("kv")
        if kv:
            gpus = kv.get("gpus_per_group", kv.get("gpus_a_group"))
            cells = (_plain(value) for value in (kv.get("groups"), gpus, kv.get("capacity_tokens")))
            terms = (kv.get("terms") or {}).get("terms") or {}
            memory = ", ".join(f"{name.replace('_', ' ')} {value / 2**30:+.1f}" for name, value in terms.items())
            yield str(run.summary.get("scheme")), *cells, "given" if kv.get("given") else "from memory", memory


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
