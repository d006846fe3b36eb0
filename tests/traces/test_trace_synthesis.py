"""Synthetic presets: published figures within 3%, structure, determinism, labels."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from traces.errors import InputError
from traces.prefix import reusable_blocks
from traces.stats import describe
from traces.synthesis import PRESETS, FixedTrace, SyntheticTrace
from traces.synthesis.derive import derive_all
from traces.trace import Trace

# Of the real files (shared/traces, measured) and of the published figures; None: not published.
FIGURES = {
    "toolagent": (8_596, 6_346, 26_114, 182, None, None, 0.59, 23_607 / 3_537),
    "conversation": (12_035.06, 6_909, 39_550.5, 342.62, 350, 698, 0.3664, 3.4012),
    "synthetic": (15_325.48, 11_587, 48_904.6, 149.12, 69, 519, 0.6396, 3.9060),
    "qwen_a": (None, 1_046, None, None, None, None, 0.62, 43_057 / 7_200),
}


def figures(trace: Trace) -> tuple[float, ...]:
    prompt, output = (trace.table[n].to_numpy() for n in ("prompt_tokens", "output_tokens"))
    arrival = trace.table["arrival_s"].to_numpy()
    reusable, blocks = reusable_blocks(trace.table["block_ids"])
    lengths = [(v.mean(), *np.percentile(v, (50, 95))) for v in (prompt, output)]
    rate = (len(trace) - 1) / arrival[-1]
    return (*(float(v) for v in lengths[0] + lengths[1]), reusable / blocks, rate)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("requests", [3000, None])
def test_figures_within_3_percent_over_seeds(preset: str, requests: int | None) -> None:
    for seed in (0, 1, 2, 3) if requests else (0,):
        found = figures(SyntheticTrace(preset, requests).load(seed))
        for value, wanted in zip(found, FIGURES[preset], strict=True):
            if wanted is not None:
                assert value == pytest.approx(wanted, rel=0.03)


def test_default_count_is_that_of_the_modelled_trace() -> None:
    assert len(SyntheticTrace("toolagent").load(0, block_ids=False)) == 23_608


def test_toolagent_is_a_mixture_of_three_kinds_on_ticks() -> None:
    trace = SyntheticTrace("toolagent", 6000).load(4)
    table = trace.table
    kinds = np.array(table["kind"].to_pylist())
    prompt, output = table["prompt_tokens"].to_numpy(), table["output_tokens"].to_numpy()
    ids = table["block_ids"].to_pylist()
    assert Counter(kinds) == {"tool_a": 2520, "tool_b": 810, "conversation": 2670}
    a, b, c = (kinds == k for k in ("tool_a", "tool_b", "conversation"))
    assert prompt[a].min() >= 6165
    assert prompt[a].max() <= 10_000
    assert (prompt[a] < 6346).mean() == pytest.approx(0.42, abs=0.01)
    assert (output[a] == 3).mean() == pytest.approx(2 / 3, abs=0.02)
    others = output[a][output[a] != 3]
    assert (others.min() >= 22, others.max() <= 240) == (True, True)
    assert (prompt[b].min() >= 2930, prompt[b].max() <= 4440) == (True, True)
    assert (output[b].min() >= 16, output[b].max() <= 24) == (True, True)
    assert (output[c].min() >= 3, output[c].max() <= 2000) == (True, True)
    assert output[c].mean() == pytest.approx(388, rel=0.03)
    assert np.median(prompt[c]) == pytest.approx(7800, rel=0.03)
    assert 100_000 < prompt[c].max() <= 123_000
    for rows, shared in ((a, 12), (b, 5), (c, 1)):
        assert len({tuple(ids[i][:shared]) for i in np.flatnonzero(rows)}) == 1
    burst = describe(trace).burstiness
    assert burst.tick_s == pytest.approx(3.053)
    assert burst.coarse
    assert burst.requests_per_tick == pytest.approx(20, rel=0.05)


# 347 consecutive rows of the tool&agent trace (shared/traces/README.md): prompt and output tokens at quantiles, mean
# output, shares of outputs below a length, shares of kinds, and lengths within kinds.
STRETCH = {
    "prompt": (1_028, 3_766, 6_489, 7_756, 26_859, 39_213, 118_753),
    "output": (3, 3, 27, 315, 562, 863, 1_342),
    "mean output": (162,),
    "outputs below 10, 30, 100": (0.27, 0.52, 0.62),
    "correlation of length and rank": (0.30, 0.09),
    "shares of kinds": (0.42, 0.13, 0.44),
    "kind A: median, P95, above 6,346": (6_680, 7_800, 2 / 3),
    "kind C: median, mean output, P95 output": (7_800, 347, 663),
    "rows a tick, mean and deviation": (19.2, 3.3),
}


def stretch(rows: pa.Table) -> dict[str, tuple[float, ...]]:
    """The figures of `STRETCH`."""
    prompt, output, arrival = (rows[n].to_numpy() for n in ("prompt_tokens", "output_tokens", "arrival_s"))
    kinds = np.array(rows["kind"].to_pylist())
    a, b, c = (kinds == k for k in ("tool_a", "tool_b", "conversation"))
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (prompt, output)]
    ticks = np.unique(arrival, return_counts=True)[1][1:-1]
    levels = (5, 25, 50, 75, 95, 99, 100)
    figures = (
        np.percentile(prompt, levels),
        np.percentile(output, levels),
        (output.mean(),),
        [(output < length).mean() for length in (10, 30, 100)],
        (np.corrcoef(prompt, output)[0, 1], np.corrcoef(*ranks)[0, 1]),
        (a.mean(), b.mean(), c.mean()),
        (np.median(prompt[a]), np.percentile(prompt[a], 95), (prompt[a] > 6346).mean()),
        (np.median(prompt[c]), output[c].mean(), np.percentile(output[c], 95)),
        (ticks.mean(), ticks.std(ddof=1)),
    )
    return dict(zip(STRETCH, (tuple(map(float, values)) for values in figures), strict=True))


def test_a_real_stretch_of_toolagent_lies_within_the_range_of_the_presets_own() -> None:
    """Each figure of the 347 real rows between the lowest and highest 0.5% of stretches as long."""
    found: list[dict[str, tuple[float, ...]]] = []
    for seed in range(3):
        table = SyntheticTrace("toolagent").load(seed, block_ids=False).table
        found += [stretch(table.slice(start, 347)) for start in range(0, len(table) - 347, 347)]
    assert len(found) > 200
    for name, wanted in STRETCH.items():
        low, high = np.quantile([figures[name] for figures in found], (0.005, 0.995), axis=0)
        for value, least, most in zip(wanted, low, high, strict=True):
            assert least <= value <= most, (name, value, least, most)


@pytest.mark.parametrize("preset", ["conversation", "toolagent", "qwen_a"])
def test_sessions_continue_earlier_prompts(preset: str) -> None:
    table = SyntheticTrace(preset, 1500).load(2).table
    ids, parents = table["block_ids"].to_pylist(), table["parent_id"].to_pylist()
    arrival, turn = table["arrival_s"].to_numpy(), table["turn"].to_pylist()
    session = table["session"].to_pylist()
    children = [(row, parent) for row, parent in enumerate(parents) if parent is not None]
    assert len(children) > 150
    assert max(Counter(parent for _, parent in children).values()) == 1
    for row, parent in children:
        matched = len(ids[parent]) - 1
        assert ids[row][:matched] == ids[parent][:matched]
        assert arrival[parent] < arrival[row]
        assert (session[row], turn[row]) == (session[parent], turn[parent] + 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_seeded_valid_and_labelled(preset: str) -> None:
    trace = SyntheticTrace(preset, 400).load(1)
    assert trace.table.equals(SyntheticTrace(preset, 400).load(1).table)
    assert not trace.table.equals(SyntheticTrace(preset, 400).load(2).table)
    light = SyntheticTrace(preset, 400).load(1, block_ids=False).table
    assert light.drop_columns("block_ids").equals(trace.table.drop_columns("block_ids"))
    assert trace.provenance["synthetic"] is True
    assert trace.provenance["name"] == f"{preset} (synthetic)"
    blocks = [len(ids) for ids in trace.table["block_ids"].to_pylist()]
    assert blocks == [-(-p // trace.block_tokens) for p in trace.table["prompt_tokens"].to_pylist()]
    assert trace.table["arrival_s"][0].as_py() == 0.0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("requests", [1, 2, 3, 7])
def test_tiny_traces(preset: str, requests: int) -> None:
    assert len(SyntheticTrace(preset, requests).load(0)) == requests


def test_fixed() -> None:
    trace = FixedTrace(100, 7, requests=4, interval_s=0.5).load()
    assert trace.table["prompt_tokens"].to_pylist() == [100] * 4
    assert trace.table["output_tokens"].to_pylist() == [7] * 4
    assert trace.table["arrival_s"].to_pylist() == [0.0, 0.5, 1.0, 1.5]
    assert trace.provenance["synthetic"] is True
    assert "synthetic" in trace.provenance["name"]
    assert len(FixedTrace(requests=100, limit=10, window=[2, 5]).load()) == 3


def test_X1_settings() -> None:
    for trace, part in (
        (SyntheticTrace("toolagents"), "toolagent, conversation, synthetic, qwen_a"),
        (SyntheticTrace("toolagent", 0), "trace.requests=0"),
        (SyntheticTrace("toolagent", "many"), "trace.requests=many"),  # type: ignore[arg-type]
        (SyntheticTrace("toolagent", 10, sample=2), "trace.sample=2"),
        (FixedTrace(prompt_tokens=0), "trace.prompt_tokens=0"),
        (FixedTrace(output_tokens=0), "trace.output_tokens=0"),
        (FixedTrace(interval_s=-1), "trace.interval_s=-1"),
    ):
        with pytest.raises(InputError) as error:
            trace.load()
        assert part in str(error.value)


def test_tables_are_what_the_derivation_gives(shared_traces: Path) -> None:
    for name, data in derive_all(shared_traces).items():
        stored = json.loads(files("traces.synthesis").joinpath(f"{name}.json").read_text(encoding="utf-8"))
        assert json.loads(json.dumps(data)) == stored
