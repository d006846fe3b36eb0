"""Makes the quantile tables: from the public traces where they are at hand, from published figures elsewhere.

`python -m traces.synthesis.derive DIRECTORY` reads conversation_trace.jsonl and synthetic_trace.jsonl there and
writes the four JSON files beside this module. The tables hold quantiles and shares, no rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.source import FileTrace
from traces.synthesis.tables import Quantiles
from traces.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Json = dict[str, Any]

LEVELS = (
    *(round(0.01 * i, 4) for i in range(100)),
    *(0.9925, 0.995, 0.9975, 0.999, 1.0),
)
COARSE = tuple(round(0.05 * i, 4) for i in range(21))
PARTS = 6
MOONCAKE = "Mooncake FAST'25 release (Apache-2.0)"

# Tool&agent: published totals, and what two stretches of the trace show of its three kinds (one of them 347 rows). The
# stretches differ: of kind A most prompts are near 6,200 tokens in one and two thirds above 6,346 in the other.
TOOLAGENT_REQUESTS, TOOLAGENT_SPAN_S, TOOLAGENT_REUSABLE = 23_608, 3_537.0, 0.59
TOOLAGENT_TICK_S = 3.053
TOOLAGENT_MEAN, TOOLAGENT_MEDIAN, TOOLAGENT_P95, TOOLAGENT_OUTPUT = 8_596, 6_346, 26_114, 182
A_SHARE, A_BLOCKS = 0.42, 12
A_BELOW_MEDIAN = 0.42  # of A's prompts are shorter than the mixture's median
A_PROMPT = {
    "levels": [0, 0.05, 0.2, 0.34, A_BELOW_MEDIAN, 0.56, 0.7, 0.85, 0.95, 0.99, 1],
    "values": [6_165, 6_172, 6_190, 6_250, TOOLAGENT_MEDIAN, 6_680, 6_900, 7_250, 7_800, 8_500, 10_000],
}
A_OUTPUT = {"levels": [0, 0.6667, 0.6667, 0.94, 0.98, 1], "values": [3, 3, 22, 42, 80, 240]}
B_SHARE, B_BLOCKS = 0.135, 5
B_PROMPT = {"levels": [0, 0.05, 0.9, 1], "values": [2_930, 3_010, 3_480, 4_440]}
B_OUTPUT = {"levels": [0, 1], "values": [16, 24]}
C_SHARE = 0.445
C_MEDIAN, C_LONGEST = 7_800, 123_000  # tokens of C's prompts; 118,753 is the longest that was seen
# Outputs of C: the 347 rows have the conversation's own distribution but for the shortest ones, whose mean is too small
# for the whole trace. These of the conversation's values grow, each by at most about two standard errors of the rows.
C_OUTPUT_VALUES = (1, 66, 315, 525, 690, 1_137, 2_000)
C_OUTPUT_GROWTH = (3.0, 1.5, 0.12, 0.08, 0.17, 0.35, 0.0)
C_OUTPUT_LEAST = 3

# Qwen-Bailian trace A: published are 43,058 requests in two hours, the median prompt, 16-token blocks, an ideal hit
# share of 62% and 80% of reuses within ten minutes (arXiv 2506.02634). The spreads are assumptions.
QWEN_A_REQUESTS, QWEN_A_SPAN_S, QWEN_A_MEDIAN = 43_058, 7_200.0, 1_046
QWEN_A_REUSABLE, QWEN_A_REUSE_P80_S = 0.62, 600.0
QWEN_A_SIGMA, QWEN_A_OUTPUT, QWEN_A_OUTPUT_SIGMA = 1.2, 320, 0.9
QWEN_A_LATER = 1.39  # median prompt of later turns over the median of all; first turns are as much shorter


def quantiles(values: Floats, levels: tuple[float, ...] = LEVELS, digits: int = 0) -> Json:
    """Values at `levels` as JSON data."""
    found = [round(float(v), digits) for v in np.quantile(values, levels)]
    return {"levels": list(levels), "values": [int(v) for v in found] if digits == 0 else found}


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's rank correlation (ties by order)."""
    ranks = np.array([np.argsort(np.argsort(v, kind="stable")) for v in (a, b)], dtype=np.float64)
    return round(float(np.asarray(np.corrcoef(ranks))[0, 1]), 3)


def turns_of(prompt: Floats, output: Floats) -> Json:
    """Tables of one class of requests."""
    return {
        "prompt": quantiles(prompt),
        "output": quantiles(output),
        "rank_correlation": rank_correlation(prompt, output),
    }


def prefix_links(trace: Trace) -> tuple[Ints, Ints]:
    """Blocks that each request has in common with earlier ones, and the row that used the last of them last."""
    last: dict[int, int] = {}
    matched, parent = [], []
    for row, ids in enumerate(trace.table["block_ids"].to_pylist()):
        found = 0
        while found < len(ids) and ids[found] in last:
            found += 1
        matched.append(found)
        parent.append(last[ids[found - 1]] if found else -1)
        last.update(dict.fromkeys(ids, row))
    return np.array(matched), np.array(parent)


def derive_sessions(trace: Trace, name: str, source: str, tick_s: float, shared_blocks: int) -> Json:
    """Tables of a trace of one kind with sessions, found by their prefixes (blocks of the trace's own ids)."""
    table = trace.table
    prompt, output = (table[n].to_numpy().astype(np.float64) for n in ("prompt_tokens", "output_tokens"))
    arrival = table["arrival_s"].to_numpy()
    blocks = np.ceil(prompt / trace.block_tokens)
    matched, parent = prefix_links(trace)
    later = matched > shared_blocks
    share, lag = matched[later] / blocks[later], (arrival[later] - arrival[parent[later]])
    edges = [int(e) for e in np.quantile(blocks[later], (0.25, 0.5, 0.75))]
    bins = np.searchsorted(edges, blocks[later], side="right")
    sessions = {
        "turns": turns_of(prompt[later], output[later]),
        "share": [round(float(part.mean()), 4) for part in np.array_split(later, PARTS)],
        "block_edges": [*edges, 1 << 30],
        "prefix_share": [quantiles(share[bins == b], COARSE, 4) for b in range(len(edges) + 1)],
        "lag_s": quantiles(lag, COARSE, 2),
    }
    kind = {
        "name": name,
        "share": 1.0,
        "shared_blocks": shared_blocks,
        "first": turns_of(prompt[~later], output[~later]),
        "sessions": sessions,
    }
    return {
        "name": name,
        "source": source,
        "requests": len(trace),
        "rate": round(float((len(trace) - 1) / arrival[-1]), 5),
        "tick_s": tick_s,
        "block_tokens": trace.block_tokens,
        "reusable": round(float(matched.sum() / blocks.sum()), 4),
        "kinds": [kind],
    }


def derive_toolagent(conversation: Json) -> Json:
    """The tool&agent mixture: kinds A and B from their description, C from the conversation tables.

    C's prompts are the conversation's, mapped piecewise linearly so that the whole mixture has the published median,
    P95 and mean, and C the median and the longest prompt that were seen; its outputs are the conversation's, grown to
    the published mean of the mixture.
    """
    source = conversation["kinds"][0]
    maps = _prompt_map(source), _output_map(source)
    kind_c = {
        **source,
        "name": "conversation",
        "share": C_SHARE,
        "first": _mapped(source["first"], *maps),
        "sessions": {**source["sessions"], "turns": _mapped(source["sessions"]["turns"], *maps)},
    }
    kind_a = _plain_kind("tool_a", A_SHARE, A_BLOCKS, A_PROMPT, A_OUTPUT)
    kind_b = _plain_kind("tool_b", B_SHARE, B_BLOCKS, B_PROMPT, B_OUTPUT)
    return {
        "name": "toolagent",
        "source": f"published totals of toolagent_trace.jsonl and a reading of two stretches of it, {MOONCAKE}; its "
        "conversation part from quantiles of conversation_trace.jsonl",
        "requests": TOOLAGENT_REQUESTS,
        "rate": round((TOOLAGENT_REQUESTS - 1) / TOOLAGENT_SPAN_S, 5),
        "tick_s": TOOLAGENT_TICK_S,
        "block_tokens": 512,
        "reusable": TOOLAGENT_REUSABLE,
        "kinds": [kind_a, kind_b, kind_c],
    }


def derive_qwen_a() -> Json:
    """Qwen-Bailian trace A from what is published; log-normal lengths whose spread is an assumption."""
    first = _lognormal_turns(QWEN_A_MEDIAN / QWEN_A_LATER)
    later = _lognormal_turns(QWEN_A_MEDIAN * QWEN_A_LATER)
    lag = -np.log1p(-np.minimum(np.array(COARSE), 0.995)) * (QWEN_A_REUSE_P80_S / np.log(5))
    sessions = {
        "turns": later,
        "share": [0.5] * PARTS,
        "block_edges": [1 << 30],
        "prefix_share": [{"levels": [0, 1], "values": [0.55, 0.98]}],
        "lag_s": {"levels": list(COARSE), "values": [round(float(v), 2) for v in lag]},
    }
    kind = {"name": "chat", "share": 1.0, "shared_blocks": 4, "first": first, "sessions": sessions}
    return {
        "name": "qwen_a",
        "source": "published figures of Qwen-Bailian trace A (arXiv 2506.02634, Apache-2.0): requests, span, median "
        "prompt, ideal hit share, reuse times; log-normal spreads, outputs and shares of turns are assumptions",
        "requests": QWEN_A_REQUESTS,
        "rate": round((QWEN_A_REQUESTS - 1) / QWEN_A_SPAN_S, 5),
        "tick_s": 0.0,
        "block_tokens": 16,
        "reusable": QWEN_A_REUSABLE,
        "kinds": [kind],
    }


Map = tuple[Floats, Floats]  # knots, and what they become; linear between


def _prompt_map(source: Json) -> Map:
    """From conversation prompts to C's: median, P95 and mean of the mixture as published, by way of its P99."""
    sample = _pooled(source, "prompt")
    low = (0.5 - A_SHARE * A_BELOW_MEDIAN - B_SHARE) / C_SHARE
    inner = np.quantile(sample, (low, 0.5, 1 - 0.05 / C_SHARE, 1 - 0.01 / C_SHARE))
    target = (TOOLAGENT_MEAN - _mean(A_PROMPT) * A_SHARE - _mean(B_PROMPT) * B_SHARE) / C_SHARE
    start, top = float(sample.min()), float(sample.max())
    knots = np.array([start, *inner, top])

    def values(p99: float) -> Floats:
        return np.array([start, TOOLAGENT_MEDIAN, C_MEDIAN, TOOLAGENT_P95, p99, C_LONGEST])

    p99 = _bisect(lambda p99: float(np.interp(sample, knots, values(p99)).mean()), target, TOOLAGENT_P95, C_LONGEST)
    return knots, values(round(p99))


def _output_map(source: Json) -> Map:
    """From conversation outputs to C's: the published mean output of the mixture."""
    target = (TOOLAGENT_OUTPUT - _mean(A_OUTPUT) * A_SHARE - _mean(B_OUTPUT) * B_SHARE) / C_SHARE
    sample = _pooled(source, "output")
    knots = np.array(C_OUTPUT_VALUES, dtype=np.float64)

    def values(strength: float) -> Floats:
        return np.maximum(knots * (1.0 + strength * np.array(C_OUTPUT_GROWTH)), C_OUTPUT_LEAST)

    strength = _bisect(lambda strength: float(np.interp(sample, knots, values(strength)).mean()), target, 0.0, 3.0)
    return knots, values(strength)


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return low


def _pooled(kind: Json, name: str) -> Floats:
    """Evenly spaced levels of first and later turns, in their shares, as one sample."""
    share = float(np.mean(kind["sessions"]["share"]))
    count = 40_000
    later = round(share * count)
    parts = [(kind["first"], count - later), (kind["sessions"]["turns"], later)]
    drawn = [Quantiles.read(turns[name]).at((np.arange(k) + 0.5) / k) for turns, k in parts]
    return np.concatenate(drawn)


def _mapped(turns: Json, prompt_map: Map, output_map: Map) -> Json:
    prompt = np.interp(turns["prompt"]["values"], *prompt_map)
    output = np.interp(turns["output"]["values"], *output_map)
    return {
        "prompt": {"levels": turns["prompt"]["levels"], "values": [round(v) for v in prompt]},
        "output": {"levels": turns["output"]["levels"], "values": [round(v) for v in output]},
        "rank_correlation": turns["rank_correlation"],
    }


def _plain_kind(name: str, share: float, blocks: int, prompt: Json, output: Json) -> Json:
    first = {"prompt": prompt, "output": output, "rank_correlation": 0.0}
    return {"name": name, "share": share, "shared_blocks": blocks, "first": first, "sessions": None}


def _mean(table: Json) -> float:
    return float(Quantiles.read(table).at((np.arange(10_000) + 0.5) / 10_000).mean())


def _lognormal_turns(median: float) -> Json:
    z = np.array([NormalDist().inv_cdf(min(max(level, 0.002), 0.9995)) for level in LEVELS])
    prompt = np.maximum(median * np.exp(QWEN_A_SIGMA * z), 16)
    output = np.maximum(QWEN_A_OUTPUT * np.exp(QWEN_A_OUTPUT_SIGMA * z), 1)
    return {
        "prompt": {"levels": list(LEVELS), "values": [round(v) for v in prompt.tolist()]},
        "output": {"levels": list(LEVELS), "values": [round(v) for v in output.tolist()]},
        "rank_correlation": 0.0,
    }


def derive_all(directory: Path) -> dict[str, Json]:
    """The tables of all presets, from the two public traces in `directory`."""
    read = {n: FileTrace("mooncake", str(directory / f"{n}_trace.jsonl")).load() for n in ("conversation", "synthetic")}
    note = f"quantiles of {{}}_trace.jsonl, {MOONCAKE}"
    conversation = derive_sessions(read["conversation"], "conversation", note.format("conversation"), 3.0, 1)
    synthetic = derive_sessions(read["synthetic"], "synthetic", note.format("synthetic"), 0.0, 0)
    return {
        "conversation": conversation,
        "synthetic": synthetic,
        "toolagent": derive_toolagent(conversation),
        "qwen_a": derive_qwen_a(),
    }


def main() -> None:
    """Write the JSON files beside this module."""
    for name, data in derive_all(Path(sys.argv[1])).items():
        Path(__file__).with_name(f"{name}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
