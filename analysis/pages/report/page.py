"""The HTML of a report: what was found, the warnings, the figures, and what was run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from analysis.commands.shared import rate, seconds, share
from analysis.pages.report import figures as draw
from analysis.pages.report.compare_runs import common_and_different, mismatches
from analysis.pages.report.load import Goodput, Results, Run

PERCENTILES = ("p50", "p95", "p99")
OPEN_RUNS = 3  # runs whose figures over time are open at once


class Page:
    """Collects HTML and the figures that it refers to."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._figures: list[draw.Figure] = []

    def add(self, html: str) -> None:
        """Append HTML as it is."""
        self._parts.append(html)

    def heading(self, text: str, note: str = "", level: int = 2) -> None:
        """A heading, and a line that says what follows."""
        self.add(f"<h{level}>{escape(text)}</h{level}>")
        if note:
            self.add(f'<p class="soft">{escape(note)}</p>')

    def warnings(self, lines: Sequence[str]) -> None:
        """What a reader has to know first; nothing if there is none."""
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            self.add(f'<div class="warnings"><h2>Warnings</h2><ul>{items}</ul></div>')

    def figure(self, figure: draw.Figure | None, caption: str = "") -> None:
        """A figure with what it shows; nothing if there is none."""
        if figure is None:
            return
        text = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        number = len(self._figures)
        height = figure["layout"]["height"]
        self.add(f'<figure>{text}<div class="plot" data-figure="{number}" style="height:{height}px"></div></figure>')
        self._figures.append(figure)

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = ()) -> None:
        """A table of ready-made cells (HTML); columns of text are aligned to the left and may wrap."""

        def cell(tag: str, number: int, content: str) -> str:
            return f'<{tag} class="text">{content}</{tag}>' if number in text_columns else f"<{tag}>{content}</{tag}>"

        lines = ["".join(cell("th", number, escape(name)) for number, name in enumerate(head))]
        lines += ["".join(cell("td", number, content) for number, content in enumerate(row)) for row in rows]
        self.add('<div class="scroll"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>")

    def html(self, title: str) -> str:
        """The whole page, plotly.js inside."""
        from plotly.offline import get_plotlyjs

        template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        data = json.dumps(self._figures, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
        body = "\n".join(self._parts)
        return Template(template).substitute(title=escape(title), body=body, plotly=get_plotlyjs(), figures=data)


def render(results: Results, title: str | None = None) -> str:
    """The page of some results."""
    page = Page()
    palette = draw.colours(results)
    heading = title or _title(results)
    _head(page, results, heading)
    _cards(page, results, palette)
    _warnings(page, results)
    _goodput_section(page, results, palette)
    _simulation_section(page, results, palette)
    _distributions(page, results, palette)
    _over_time(page, results)
    _what_ran(page, results)
    return page.html(heading)


# --- top -------------------------------------------------------------------------------------------------------------


def _title(results: Results) -> str:
    if len(results.goodputs) == 1 and not results.simulations:
        schemes = " and ".join(results.goodputs[0].content["schemes"])
        return f"Goodput of {schemes}"
    if not results.goodputs and len(results.simulations) == 1:
        return f"One run of {results.simulations[0].summary.get('scheme')}"
    counts = ((len(results.goodputs), "goodput search", "es"), (len(results.simulations), "run", "s"))
    return ", ".join(f"{count} {name}{many if count > 1 else ''}" for count, name, many in counts if count)


def _described(results: Results) -> list[dict[str, Any]]:
    return [goodput.content for goodput in results.goodputs] + [run.summary for run in results.simulations]


def _is_synthetic(content: dict[str, Any]) -> bool:
    return bool(content.get("provenance", {}).get("trace", {}).get("synthetic"))


def _head(page: Page, results: Results, heading: str) -> None:
    described = _described(results)
    synthetic = [_is_synthetic(content) for content in described]
    badge = ""
    if any(synthetic):
        badge = f' <span class="badge">synthetic trace{"" if all(synthetic) else " in some results"}</span>'
    page.add(f"<h1>{escape(heading)}{badge}</h1>")
    lines = dict.fromkeys(_setting(content) for content in described)
    for line in list(lines)[:6]:
        page.add(f'<p class="soft" style="margin:0">{escape(line)}</p>')
    if len(lines) > 6:
        page.add(f'<p class="soft">and {len(lines) - 6} more settings, listed below</p>')


def _setting(content: dict[str, Any]) -> str:
    slo, cluster = content.get("slo") or {}, content.get("cluster") or {}
    parts = [
        str(content.get("label", "")),
        f"{content.get('model')} on {cluster.get('gpus', '?')} × {content.get('gpu')}",
    ]
    if slo:
        limits = (
            f"TTFT ≤ {slo.get('ttft_s')} s, TBT ≤ {slo.get('tbt_s')} s for {slo.get('attainment', 0):.0%} of requests"
        )
        parts.append(f"{limits} (rule {slo.get('rule', 'max_gap')})")
    return " · ".join(part for part in parts if part)


def _cards(page: Page, results: Results, palette: dict[str, str]) -> None:
    if len(results.goodputs) == 1:
        cards = [
            _card(palette[name], rate(entry["goodput"]), f"req/s goodput of {name}")
            for name, entry in results.goodputs[0].content["schemes"].items()
        ]
        cards += _ratio_card(results.goodputs[0])
    elif len(results.simulations) == 1 and not results.goodputs:
        summary = results.simulations[0].summary
        colour = next(iter(palette.values()))
        cards = [
            _card(colour, share(summary["attainment"]), "of requests keep the SLO"),
            _card(colour, seconds((summary.get("ttft_s") or {}).get("p95")), "P95 time to first token"),
            _card(colour, seconds((summary.get("max_gap_s") or {}).get("p95")), "P95 largest gap between tokens"),
            _card(colour, f"{summary['requests']['injected']:,}", "requests"),
        ]
    else:
        return
    page.add(f'<div class="cards">{"".join(cards)}</div>')


def _card(colour: str, value: str, text: str) -> str:
    return f'<div class="card" style="--colour:{colour}"><b>{escape(value)}</b><span>{escape(text)}</span></div>'


def _ratio_card(goodput: Goodput) -> list[str]:
    ranked = sorted(goodput.content["schemes"].items(), key=lambda item: -item[1]["goodput"])
    if len(ranked) < 2 or not ranked[1][1]["goodput"]:
        return []
    (first, best), (second, other) = ranked[0], ranked[1]
    return [_card("var(--line)", f"{best['goodput'] / other['goodput']:.2f}×", f"{first} over {second}")]


def _warnings(page: Page, results: Results) -> None:
    lines: list[tuple[str, str]] = [("", line) for line in [*mismatches(results), *results.skipped]]
    for goodput in results.goodputs:
        for name, entry in goodput.content["schemes"].items():
            prefix = name if len(results.goodputs) == 1 else f"{goodput.name}, {name}"
            lines += [(prefix, line) for line in entry.get("warnings", [])]
    for run in results.simulations:
        lines += [(run.name, line) for line in run.summary.get("warnings", [])]
    if not lines:
        return
    items = [f"<li>{f'<b>{escape(where)}</b>: ' if where else ''}{escape(line)}</li>" for where, line in _merged(lines)]
    page.add(f'<section class="warnings"><h2>Warnings</h2><ul>{"".join(items)}</ul></section>')


def _merged(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same warning of several results once, with their names."""
    where: dict[str, list[str]] = {}
    for name, line in lines:
        where.setdefault(line, []).append(name)
    return [(_names(list(dict.fromkeys(names))), line) for line, names in where.items()]


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# --- results ---------------------------------------------------------------------------------------------------------


def _goodput_section(page: Page, results: Results, palette: dict[str, str]) -> None:
    if not results.goodputs:
        return
    note = "The highest request rate at which the target share of requests gets every token on time."
    if any(entry.get("band") for goodput in results.goodputs for entry in goodput.content["schemes"].values()):
        note += " Error bars: with all latencies longer or shorter by the held-out error of the latency profile."
    page.heading("Goodput", note)
    page.figure(draw.goodput_bars(results, palette))
    for goodput in results.goodputs:
        if len(results.goodputs) > 1:
            page.heading(goodput.name, _setting(goodput.content), level=3)
        _goodput_table(page, goodput)
    page.heading(
        "Attainment against rate",
        "Joined points are runs to the end. Open circles (pass) and crosses (fail) were stopped as soon as their "
        "verdict was certain: the bars are the bounds of their attainment. The star is the goodput.",
    )
    for goodput in results.goodputs:
        page.figure(draw.attainment_curves(goodput, palette), goodput.name if len(results.goodputs) > 1 else "")
    _probe_tables(page, results)


def _goodput_table(page: Page, goodput: Goodput) -> None:
    head = ["scheme", "goodput, req/s", "latency band", "per GPU", "attainment", "zero-load attainment"]
    head += [f"{title} {name.upper()}" for title in ("TTFT", "TBT") for name in PERCENTILES]
    head += ["largest gap P95", "utilisation"]
    rows = []
    for name, entry in goodput.content["schemes"].items():
        chosen = ", ".join(
            f"{key.removeprefix('scheme.')}={value}" for key, value in (entry.get("chosen") or {}).items()
        )
        label = escape(name) + (f' <span class="soft">{escape(chosen)}</span>' if chosen else "")
        value = "0, structural" if entry["structural"] else rate(entry["goodput"])
        row = [label, f"<b>{value}</b>", _band(entry), rate(entry["goodput_per_gpu"]), share(entry["attainment"])]
        row.append(share(entry["zero_load"]["attainment"]))
        row += [cell for key in ("ttft_s", "gap_s") for cell in _percentiles(entry, key)]
        row += [_percentiles(entry, "max_gap_s")[1], share(entry.get("utilisation"))]
        rows.append(row)
    page.table(head, rows)


def _band(entry: dict[str, Any]) -> str:
    band = entry.get("band")
    return f"{rate(band['low']['goodput'])} to {rate(band['high']['goodput'])}" if band else "–"


def _percentiles(content: dict[str, Any], key: str) -> list[str]:
    values = content.get(key) or {}
    return [seconds(values.get(name)) for name in PERCENTILES]


def _probe_tables(page: Page, results: Results) -> None:
    for goodput in results.goodputs:
        for name, entry in goodput.content["schemes"].items():
            title = f"{name}: all {len(entry['probes'])} probes"
            if len(results.goodputs) > 1:
                title = f"{goodput.name}, {title}"
            page.add(f"<details><summary>{escape(title)}</summary>")
            page.table(["rate, req/s", "verdict", "attainment", "missed by"], map(_probe_row, entry["probes"]), [3])
            _candidate_table(page, entry)
            page.add("</details>")


def _probe_row(probe: dict[str, Any]) -> list[str]:
    verdict = '<span class="good">pass</span>' if probe["passed"] else '<span class="bad">fail</span>'
    low, high = probe["attainment_low"], probe["attainment_high"]
    attained = share(low) if low == high else f"{share(low)} to {share(high)}"
    return [f"{probe['rate']:.4f}", verdict, attained, _missed(probe.get("missed_by") or {})]


def _missed(reasons: dict[str, int]) -> str:
    return escape(", ".join(f"{reason} {count:,}" for reason, count in reasons.items() if count))


def _candidate_table(page: Page, entry: dict[str, Any]) -> None:
    if not entry.get("candidates"):
        return
    page.add('<p class="soft">Values tried; one that cannot beat the best takes a single probe.</p>')
    rows = [
        [
            escape(", ".join(f"{key}={value}" for key, value in item["values"].items())),
            rate(item["goodput"]),
            str(len(item["probes"])),
            escape(item.get("refused") or ""),
        ]
        for item in entry["candidates"]
    ]
    page.table(["values", "goodput, req/s", "probes", "cannot run"], rows, [3])


def _simulation_section(page: Page, results: Results, palette: dict[str, str]) -> None:
    if not results.simulations:
        return
    page.heading("Runs")
    page.figure(draw.simulated_attainment(results.simulations, palette))
    head = ["run", "attainment", "requests", "completed", "rejected", "unfinished", "preempted"]
    head += [f"{title} {name.upper()}" for title in ("TTFT", "TBT") for name in PERCENTILES] + [
        "utilisation",
        "missed by",
    ]
    page.table(head, (_run_row(run) for run in results.simulations), [len(head) - 1])


def _run_row(run: Run) -> list[str]:
    summary, counts = run.summary, run.summary["requests"]
    met = summary["attainment"] >= summary["slo"]["attainment"]
    row = [escape(run.name), f'<span class="{"good" if met else "bad"}">{share(summary["attainment"])}</span>']
    row += [f"{counts.get(key, 0):,}" for key in ("injected", "completed", "rejected", "unfinished", "preempted")]
    row += [cell for key in ("ttft_s", "gap_s") for cell in _percentiles(summary, key)]
    return [*row, share(summary.get("utilisation")), _missed(summary["missed_by"])]


def _distributions(page: Page, results: Results, palette: dict[str, str]) -> None:
    runs = [run for run in results.runs if run.series is not None] or results.runs[:8]
    if not runs:
        return
    note = "Each curve is a run: how large a share of its values lies at or below x. The dashed line is the SLO."
    page.heading("Latency distributions", note)
    page.add(f'<div class="{"trio" if len(runs) <= draw.LEGEND_ABOVE else "column"}">')
    titles = (
        ("ttft_s", "time to first token (s)", "ttft_s"),
        ("gap_s", "time between tokens, every gap (s)", "tbt_s"),
        ("max_gap_s", "largest gap of a request (s)", "tbt_s"),
    )
    for key, title, limit in titles:
        page.figure(draw.distribution(runs, key, title, limit, palette), title[0].upper() + title[1:])
    page.add("</div>")


def _over_time(page: Page, results: Results) -> None:
    runs = [run for run in results.runs if run.series is not None]
    if not runs:
        return
    note = "Averages over equal stretches of simulated time."
    if len(runs) < len(results.runs):
        note += f" {len(runs)} of {len(results.runs)} runs are drawn."
    page.heading("Batches and KV over time", note)
    for number, run in enumerate(runs):
        assert run.series is not None
        page.add(f"<details{' open' if number < OPEN_RUNS else ''}><summary>{escape(run.name)}</summary>")
        page.add(f'<span class="soft">{run.series.iterations:,} iterations</span><div class="pair">')
        page.figure(draw.tokens_over_time(run.series), "Tokens of an iteration")
        page.figure(draw.kv_over_time(run.series, _capacity_blocks(run.summary)), "KV in use, all groups")
        page.add("</div></details>")


def _capacity_blocks(summary: dict[str, Any]) -> float | None:
    kv = summary.get("kv") or {}
    tokens, groups, block = kv.get("capacity_tokens"), kv.get("groups"), kv.get("block_tokens")
    return tokens * groups / block if tokens and groups and block else None


# --- what ran --------------------------------------------------------------------------------------------------------


def _what_ran(page: Page, results: Results) -> None:
    page.heading("What ran")
    _kv_table(page, results)
    common, different = common_and_different(results)
    if different.rows:
        page.heading("Settings that differ", level=3)
        page.table(["setting", *different.names], ([escape(c) for c in row] for row in different.rows), range(99))
    page.add("<details><summary>Configuration" + (" in common" if different.rows else "") + "</summary>")
    page.add(f"<pre>{escape(chr(10).join(f'{key}: {value}' for key, value in common.items()))}</pre></details>")
    page.add("<details><summary>Provenance</summary>")
    for content in _described(results)[:20]:
        origin = {key: value for key, value in content.get("provenance", {}).items() if key != "config"}
        page.add(f"<h3>{escape(str(content.get('label', '')))}</h3><pre>{escape(json.dumps(origin, indent=2))}</pre>")
    page.add("</details>")


def _kv_table(page: Page, results: Results) -> None:
    rows = []
    for run in results.runs:
        kv = run.summary.get("kv") or {}
        if kv:
            row = [str(run.summary.get("scheme")), _plain(kv.get("groups")), _plain(kv.get("gpus_a_group"))]
            row += [_plain(kv.get("capacity_tokens")), "given" if kv.get("given") else "from memory", _memory(kv)]
            rows.append(tuple(escape(cell) for cell in row))
    if rows:
        page.heading("KV capacity", level=3)
        head = ["scheme", "groups", "GPUs a group", "tokens a group", "capacity", "memory of a GPU"]
        page.table(head, dict.fromkeys(rows), [5])


def _memory(kv: dict[str, Any]) -> str:
    """The terms of a GPU's memory in GiB, as they add up."""
    terms = (kv.get("terms") or {}).get("terms") or {}
    return ", ".join(f"{name.replace('_', ' ')} {value / 2**30:+.1f}" for name, value in terms.items()) + " GiB"


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
