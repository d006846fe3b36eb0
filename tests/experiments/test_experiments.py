"""The experiments on a small budget: cells, lanes, cache, pages, figures."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.commands import experiments as command
from analysis.commands import scenario
from analysis.experiments import ablation, attention_stage, base, dispatch, prefill_rate, premise, ranking, speedup
from analysis.experiments import run as runs
from analysis.experiments.base import ExperimentCell, Section, Settings
from analysis.experiments.document import write_document, write_explorer
from analysis.experiments.run import run
from analysis.experiments.work import Lane, compute, reshaped, slice_of
from analysis.pages import charts
from analysis.pages.charts import bars, lines, svg, write_svg
from analysis.pages.theme import COLOURS, LIMIT_COLOUR, SCHEMES
from analysis.search.premise import Lengths, decode_slack, decodes_running, gpus_needed
from confsim.api import compose, load_trace
from confsim.errors import InputError
from confsim.setup.cache import Store
from confsim.setup.configuration import options

SMALL = Settings(
    requests=25, tolerance=0.5, zero_load_requests=2, models=("qwen3_14b",), workloads=("toolagent",), trace_folder=None
)
TWO = {"Conflux": ("scheme=conflux",), "chunked prefill, TP": ("scheme=chunked_prefill",)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFSIM_CACHE", str(tmp_path_factory.getbasetemp() / "experiments-cache"))


@pytest.fixture()
def two_schemes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only two schemes, so that an experiment is quick."""
    for module in (base, prefill_rate, speedup, ranking, premise):
        for name in ("PLAIN", "ROWS"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, TWO)
        monkeypatch.setattr(module, "registered", dict)
    return


# --- every experiment ------------------------------------------------------------------------------------------------


def test_every_registered_scheme_has_a_row_in_the_comparison() -> None:
    for rows in (base.PLAIN, ranking.ROWS):
        assert {row[0].removeprefix("scheme=") for row in base.registered(rows).values()} == set(options("scheme"))


@pytest.mark.parametrize("module", [prefill_rate, ablation, speedup], ids=lambda module: module.EXPERIMENT.name)
def test_scenario_experiments(module: Any, two_schemes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPTS", (8192,), raising=False)
    monkeypatch.setattr(module, "GPUS", (1, 2), raising=False)
    results = {key: compute(cell) for key, cell in module.cells(SMALL).items()}
    section = module.section(SMALL, results)
    assert section.figures
    for name in section.figures:
        assert f"experiments/{name}.svg" in "\n".join(section.lines)
    assert all("refused" not in result for result in results.values())


def test_attention_stage_experiment() -> None:
    results = {key: compute(cell) for key, cell in attention_stage.cells(SMALL).items()}
    for decodes in attention_stage.DECODES:
        turn = results[f"in turn, {decodes}"]
        parts = turn["breakdown_s"]
        paths = parts["communication"] + parts["prefill_attention"], parts["decode_attention"]
        assert turn["iterations"] == 1
        assert turn["attention_stage_s"] == pytest.approx(sum(paths))
        adaptive = results[f"overlapped, adaptive split, {decodes}"]["attention_stage_s"]
        assert max(paths) * 0.999 <= adaptive <= sum(paths) * 1.001
    assert "attention_stage" in attention_stage.section(SMALL, results).figures


def test_dispatch_experiment() -> None:
    results = {key: compute(cell) for key, cell in dispatch.cells(SMALL).items()}
    assert results["even, 512"]["tokens_per_group"] == [256, 128, 128, 128]
    assert results["waterfill, 512"]["tokens_per_group"] == [160, 160, 160, 160]
    for chunk in dispatch.CHUNKS:
        even, water = (results[f"{rule}, {chunk}"]["linear_stage_s"] for rule in dispatch.RULES)
        assert water < even
    text = "\n".join(dispatch.section(SMALL, results).lines)
    assert "| 512 | 256 / 128 / 128 / 128 | 160 / 160 / 160 / 160 |" in text


def test_ranking_experiment(two_schemes: None) -> None:
    cells = ranking.cells(SMALL)
    assert len(cells) == 4
    results = {key: compute(cell) for key, cell in cells.items()}
    second = results["qwen3_14b, toolagent, SRPF / deadline, Conflux"]["variants"]
    assert list(second) == [*ranking.CONDITIONS, *ranking.DETAILS]
    assert second["noise"]["chosen"]["slo.margin"] in (0.0, 0.1, 0.2, 0.3)
    for variant in second.values():
        assert variant["goodput"] >= 0
        assert 0 <= variant["zero_load"] <= 1
    assert second["SLO halved"]["goodput"] <= second["SLO doubled"]["goodput"] * 1.5
    text = "\n".join(ranking.section(SMALL, results).lines)
    for condition in (*ranking.CONDITIONS, *ranking.DETAILS):
        assert ranking.MEANING[condition] in text
    assert "toolagent (preset)" in text
    assert "Conflux over best baseline" in text


def test_premise_experiment(two_schemes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(premise, "SHARES", (0.0, 1.0))
    monkeypatch.setattr(premise, "SCALES", (0.1, 1.0))
    results = {key: compute(cell) for key, cell in premise.cells(SMALL).items()}
    section = premise.section(SMALL, results)
    assert set(section.figures) == {"premise_short", "premise_length"}
    assert results["prompts times 0.1, lengths"]["prompt"]["95"] < results["prompts times 1, lengths"]["prompt"]["95"]


def test_where_an_advantage_vanishes() -> None:
    assert "about 75%" in premise.vanishing((0.0, 0.5, 1.0), [2.0, 1.5, 0.5])
    assert "no advantage at any share" in premise.vanishing((0.0, 1.0), [0.9, 0.8])
    assert "remains" in premise.vanishing((0.0, 1.0), [1.2, 1.1])


# --- lanes -----------------------------------------------------------------------------------------------------------


def test_a_slice_is_seeded_consecutive_and_starts_at_zero() -> None:
    words = ("trace=toolagent", "trace.requests=200")
    whole = load_trace(compose(list(words)))
    part = slice_of(words, 50, 3)
    assert part is slice_of(words, 50, 3)
    first = part.provenance["slice"]["first"]
    assert part.table["prompt_tokens"].to_pylist() == whole.table["prompt_tokens"].to_pylist()[first : first + 50]
    assert part.table["arrival_s"][0].as_py() == 0.0
    assert slice_of(words, None, 0).table.num_rows == 200
    assert slice_of(words, 50, 4).provenance["slice"]["first"] != first


def test_shapes_change_prompts_alone() -> None:
    trace = slice_of(("trace=toolagent", "trace.requests=200"), 100, 0)
    mixed = reshaped(trace, {"short_share": 0.25, "short_tokens": 7, "seed": 0})
    assert (mixed.table["prompt_tokens"].to_numpy() == 7).sum() == 25
    assert mixed.table["output_tokens"].equals(trace.table["output_tokens"])
    halved = reshaped(trace, {"scale": 0.5})
    prompt = trace.table["prompt_tokens"].to_numpy()
    assert np.abs(halved.table["prompt_tokens"].to_numpy() - prompt / 2).max() <= 0.5
    assert reshaped(trace, None) is trace


def test_a_lane_starts_conditions_at_the_base_and_skips_foreign_options() -> None:
    lane = Lane(
        trace=("trace=fixed", "trace.requests=40", "trace.prompt_tokens=4000", "trace.output_tokens=20"),
        scheme="chunked_prefill",
        options={"chunk_tokens": "tuned"},
        overrides=("latency=affine",),
        variants={"base": [], "other": ["scheme.overlap=false", "slo.rule=deadline"]},
        tolerance=0.1,
        zero_load_requests=4,
    )
    found = lane.run()["variants"]
    assert found["base"]["chosen"]["scheme.chunk_tokens"] in (512, 1024, 2048, 4096, 8192)
    assert found["base"]["goodput"] > 0
    assert found["other"]["goodput"] >= found["base"]["goodput"] * 0.9
    assert found["base"]["ttft_s"]["p50"] > 0
    assert "ttft_s" not in found["other"]


def test_a_scheme_that_refuses_says_why() -> None:
    cell = base.scenario("x", "scheme=conflux", "latency=affine", decodes_per_gpu=500, decode_context=8192)
    assert "no KV" in compute(cell)["refused"]


# --- the runner ------------------------------------------------------------------------------------------------------


def cheap(number: int) -> ExperimentCell:
    words = ["latency=affine", "decodes_per_gpu=1", "decode_context=600", "decode_tokens=1", "prefills=1"]
    return ExperimentCell("scenario", f"cell {number}", {"overrides": [*words, f"prefill_tokens={100 + number}"]})


def test_results_are_kept_by_content_h3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    cells = {str(number): cheap(number) for number in range(4)}
    done: list[str] = []

    def until_interrupted(cell: ExperimentCell) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(cell.label)
        return compute(cell)

    monkeypatch.setattr(runs, "compute", until_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(cells, 1, store)
    done.clear()
    monkeypatch.setattr(runs, "compute", lambda cell: done.append(cell.label) or compute(cell))
    found = run(cells, 1, store)
    assert done == ["cell 2", "cell 3"]
    assert list(found) == list(cells)
    monkeypatch.setattr(runs, "compute", lambda cell: pytest.fail("computed again"))
    assert run(cells, 1, store) == found


def test_two_processes_give_the_same(tmp_path: Path) -> None:
    cells = {str(number): cheap(number) for number in range(3)}
    alone = run(cells, 1, Store(tmp_path / "a"))
    assert run(cells, 2, Store(tmp_path / "b")) == alone


def test_a_key_follows_parameters_and_traces(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("1")
    cell = ExperimentCell("lane", "a", {"trace": (f"trace.path='{file}'",)})
    before = runs.parts(cell)
    file.write_text("2")
    assert runs.parts(cell) != before
    assert runs.parts(ExperimentCell("lane", "a label is nothing", cell.params)) == runs.parts(cell)
    assert runs.parts(cheap(1)) != runs.parts(cheap(2))


# --- the command -----------------------------------------------------------------------------------------------------


def config(*overrides: str) -> Any:
    return compose(["workers=1", "quiet=true", *overrides], command="experiments")


def test_the_command_writes_page_figures_and_explorer(tmp_path: Path) -> None:
    page, explorer = tmp_path / "docs" / "experiments.md", tmp_path / "all.html"
    command.command(config("only=[dispatch,attention_stage]", f"page={page}", f"explorer={explorer}"))
    text = page.read_text()
    assert text.index("5. Dispatch") < text.index("3. The attention stage")
    for name in ("dispatch", "attention_stage"):
        ET.parse(page.parent / "experiments" / f"{name}.svg")
        assert f"(experiments/{name}.svg)" in text
    assert explorer.read_text().count('class="plot" data-figure=') == 2
    before = page.read_bytes()
    command.command(config("only=[dispatch,attention_stage]", f"page={page}"))
    assert page.read_bytes() == before


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("only=[rankin]", "did you mean ranking"),
        ("workers=0", "workers=0"),
        ("models=[gpt]", "models=gpt"),
        ("workloads=[x]", "workloads=x"),
        ("requests=0", "requests=0"),
        ("tolerance=2", "tolerance=2"),
    ],
)
def test_mistakes_x1(word: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        command.command(config(word))


def test_recorded_traces_are_preferred_and_labelled(tmp_path: Path) -> None:
    assert Settings(trace_folder=tmp_path).title("conversation") == "conversation (preset)"
    (tmp_path / "conversation_trace.jsonl").write_text("")
    settings = Settings(trace_folder=tmp_path)
    assert settings.title("conversation") == "conversation"
    assert settings.trace("conversation")[0] == "trace=mooncake"
    assert settings.title("toolagent") == "toolagent (preset)"


def test_all_experiments_have_distinct_names_and_figures() -> None:
    assert list(command.EXPERIMENTS) == [
        "prefill_rate", "ablation", "attention_stage", "speedup", "dispatch", "ranking", "premise",
    ]  # fmt: skip
    labels = [cell.label for module in command.MODULES for cell in module.cells(SMALL).values()]
    assert all(labels)


# --- premise ---------------------------------------------------------------------------------------------------------


def test_gpus_that_a_prompt_needs_by_hand() -> None:
    """With 1 ms a thousand tokens and nothing else, 32K take 1.6 s on one GPU and 0.8 s on two."""
    zeros = [
        f"latency.{name}=0"
        for name in (
            "linear_base_s", "decode_base_s", "prefill_base_s", "prefill_pair_s", "all_to_all_base_s",
            "all_to_all_token_s", "head_base_s", "head_token_s", "iteration_overhead_s", "sequence_overhead_s",
        )
    ]  # fmt: skip
    words = ["latency=affine", *zeros, "latency.linear_token_s=5e-5"]
    for ttft, gpus in ((1.7, 1), (1.0, 2), (0.5, 4), (0.3, 8), (0.1, None)):
        assert gpus_needed(compose([*words, f"slo.ttft_s={ttft}"]), 32768) == gpus


def test_decode_slack_by_hand() -> None:
    from confsim.latency.affine import AffineLatency

    latency = AffineLatency(linear_base_s=0.01, linear_token_s=1e-5, decode_token_s=1e-7, head_base_s=0.001)
    slack = decode_slack(latency, 10, 5000, 0.05)
    alone = 0.01 + 10 * 1e-5 + 50000 * 1e-7 + 0.001
    assert slack.iteration_s == pytest.approx(alone)
    assert slack.share == pytest.approx(1 - alone / 0.05)
    assert slack.prefill_tokens == pytest.approx((0.05 - alone) / 1e-5, abs=1)


def test_littles_law_and_lengths() -> None:
    assert decodes_running(2.0, 101, 0.05) == pytest.approx(10)
    assert decodes_running(2.0, 1, None) == 0
    lengths = Lengths.of(load_trace(compose(["trace=fixed", "trace.requests=10"])))
    assert lengths.prompt == {50: 1024, 90: 1024, 95: 1024, 99: 1024}
    assert lengths.decode_context == 1024 + 64


# --- figures ---------------------------------------------------------------------------------------------------------


def boxes(text: str, colour: str) -> list[tuple[float, float]]:
    """Lower end and height of each bar of a colour in an SVG, in the order of drawing; y grows upward."""
    paths = (e for e in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}path") if e.get("clip-path"))
    found = []
    for path in paths:
        if f"fill: {colour.lower()}" in path.get("style", ""):
            ys = [-float(y) for y in re.findall(r"[ML] [-\d.]+ ([-\d.]+)", path.get("d", ""))]
            found.append((min(ys), max(ys) - min(ys)))
    return found


def test_bars_stand_on_the_axis_and_reach_their_value() -> None:
    text = svg(bars(["a", "b"], {"one": [1.0, 2.0], "two & more": [4.0, None]}, "x", "y"))
    (base, one_a), (_, one_b) = boxes(text, COLOURS[0])
    (other_base, two_a), (_, two_b) = boxes(text, COLOURS[1])
    assert one_b == pytest.approx(2 * one_a, abs=0.01) and two_a == pytest.approx(4 * one_a, abs=0.01)
    assert two_b == 0.0 and other_base == pytest.approx(base)
    assert {"one", "two & more", "a", "b", "x", "y"} <= {e.text for e in ET.fromstring(text).iter() if e.text}


def test_stacks_add_up() -> None:
    text = svg(bars(["a"], {"one": [1.0], "two": [3.0]}, "x", "y", stacked=True))
    ((low, height),), ((upper, more),) = boxes(text, COLOURS[0]), boxes(text, COLOURS[1])
    assert upper == pytest.approx(low + height, abs=0.01) and more == pytest.approx(3 * height, abs=0.01)


def test_lines_on_a_log_axis_are_evenly_spaced_by_ratio() -> None:
    text = svg(lines([1, 2, 4, 8], {"s": [1.0, 2.0, None, 8.0]}, "x", "y", log_x=True, limit=5.0))
    line = next(
        e.get("d", "")
        for e in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}path")
        if e.get("clip-path") and f"stroke: {COLOURS[0].lower()}" in e.get("style", "")
    )
    xs = [float(x) for x in re.findall(r"[ML] ([-\d.]+)", line)]
    assert len(xs) == 3 and xs[1] - xs[0] == pytest.approx((xs[2] - xs[1]) / 2, abs=0.01)
    assert f"stroke: {LIMIT_COLOUR.lower()}" in text


def test_equal_figures_are_equal_bytes() -> None:
    figure = bars(["a"], {"Conflux": [1.0], "uniform SP": [3.0]}, "x", "y")
    assert svg(figure) == svg(figure)
    assert "<dc:date>" not in svg(figure)
    assert boxes(svg(figure), SCHEMES["conflux"]) and boxes(svg(figure), SCHEMES["uniform_sp"])


def test_without_matplotlib_experiments_are_refused_and_scenarios_only_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="figures as SVG need matplotlib"):
        write_svg(bars(["a"], {"s": [1.0]}, "x", "y"), tmp_path / "a.svg")
    with pytest.raises(InputError, match="figures as SVG need matplotlib"):
        command.command(config("only=[dispatch]", f"page={tmp_path / 'page.md'}"))
    monkeypatch.setattr(scenario, "run_folder", lambda: tmp_path / "run")
    scenario.command(compose(["quiet=true"], command="scenario"))
    assert (tmp_path / "run" / "summary.json").is_file() and not (tmp_path / "run" / "tokens.svg").exists()


def test_documents(tmp_path: Path) -> None:
    section = Section("A title")
    section.text("Words.")
    section.table(["a", "b"], [["x", "1"]])
    section.figure("one", bars(["a"], {"s": [1.0]}, "x", "y"), "a caption")
    write_document(tmp_path / "page.md", [section])
    lines_ = (tmp_path / "page.md").read_text().splitlines()
    assert {"## A title", "| a | b |", "|---|---:|", "| x | 1 |", "![a caption](experiments/one.svg)"} <= set(lines_)
    write_explorer(tmp_path / "page.html", [section])
    explorer = (tmp_path / "page.html").read_text()
    assert "<figcaption>a caption</figcaption>" in explorer and 'data-figure="0"' in explorer
    assert all(a != b for a, b in itertools.pairwise(lines_) if a.startswith("#"))
