"""`confsim advise`: what a trace asks of a scheme, and which one serves it best."""

from __future__ import annotations

import contextlib
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.commands.shared import make_console, rate, run_folder, seconds, share, shown
from analysis.progress import listener
from analysis.search.advise import advise
from analysis.search.compare import Listener


def command(cfg: DictConfig) -> None:
    """Print the advice on the trace of `cfg`; write `advise.json` and the searches to the run's folder.

    Raises:
        InputError: for a user's mistake.
    """
    folder = run_folder()
    console = make_console()
    with contextlib.nullcontext(Listener()) if cfg.quiet else listener(console) as watcher:
        result = advise(cfg, folder, watcher)
    if not cfg.quiet:
        print_advice(console, result)
        console.print(Text(f"written: {shown(folder / 'advise.json')}"))


def print_advice(console: Console, result: dict[str, Any]) -> None:
    """The advice on one screen."""
    console.print()
    console.print(Text(f"{result['label']}, {result['requests']:,} requests", style="bold"))
    for line in (prompts(result), gpus(result), slack(result)):
        console.print(Text(line))
    console.print(_table(result))
    console.print(Text(verdict(result), style="bold"))


def prompts(result: dict[str, Any]) -> str:
    """Prompt percentiles."""
    found = ", ".join(f"{name.upper()} {tokens:,}" for name, tokens in result["prompt_tokens"].items())
    return f"prompt tokens: {found}; mean output {result['mean_output_tokens']:,.0f}"


def gpus(result: dict[str, Any]) -> str:
    """GPUs that the P95 prompt needs."""
    alone, beside = result["gpus_for_p95"], result["gpus_for_p95_beside_decodes"]
    limit, tokens = seconds(result["ttft_limit_p95_s"]), result["prompt_tokens"]["p95"]
    words = ["more than were tried" if count is None else str(count) for count in (alone, beside)]
    needs = f"{words[0]} alone, {words[1]} beside decodes"
    return f"GPUs that the P95 prompt ({tokens:,}) needs for its TTFT of {limit}: {needs}"


def slack(result: dict[str, Any]) -> str:
    """Decode slack on one GPU."""
    found, load = result["decode_slack"], result["load"]
    if found is None:
        return "decode slack: no scheme has a goodput, so there is no load to tell it at"
    decodes = f"{found['decodes']:.1f} decodes of {load['decode_context']:,} tokens on one group"
    spent = f"{seconds(found['iteration_s'])} of the {seconds(result['tbt_s'])} TBT"
    room = f"room for {found['prefill_tokens']:,} prefill tokens"
    return (
        f"decode slack at {rate(load['rate'])} req/s: {decodes} take {spent}; {share(found['share'])} is left, {room}"
    )


def verdict(result: dict[str, Any]) -> str:
    """The best scheme and its margin."""
    best, margin = result["best"], result["margin"]
    if best is None:
        return "no scheme keeps this SLO at any rate"
    if margin is None:
        return f"best goodput: {best}, {rate(result['schemes'][best]['goodput'])} req/s, the only scheme with one"
    second = list(result["schemes"])[1]
    text = f"best goodput: {best}, {rate(result['schemes'][best]['goodput'])} req/s, {share(margin)} above {second}"
    return (
        text
        if margin > result["tolerance"]
        else f"{text}: no difference, searches are exact to {share(result['tolerance'])}"
    )


def _table(result: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("scheme", "order", "options"):
        table.add_column(name, no_wrap=True)
    for name in ("goodput req/s", "a GPU", "attained alone"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, scheme in result["schemes"].items():
        options = ", ".join(
            f"{key.rpartition('.')[2]}={value}" for key, value in {**scheme["options"], **scheme["chosen"]}.items()
        )
        goodput = f"{rate(scheme['goodput'])}{' (structural)' if scheme['structural'] else ''}"
        cells = (goodput, rate(scheme["goodput_per_gpu"]), share(scheme["zero_load"]))
        table.add_row(name, scheme["order"], options, *cells)
    return table
