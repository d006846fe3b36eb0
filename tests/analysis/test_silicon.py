"""Validation against measured engines: what is read, what may choose constants, and a replay that stays as it is."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from confsim.errors import InputError
from confsim.schemes.chunked_prefill import ChunkedPrefill
from confsim.setup.configuration import compose
from confsim.specs import KvConfig

if find_spec("aiconfigurator_core") is None or find_spec("scipy") is None:
    pytest.skip("needs the calibrate extra", allow_module_level=True)

from analysis.validate import command as dispatcher
from analysis.validate import silicon
from analysis.validate.silicon_engines import ENGINES, Bench, Constants, Predicted, bench, predict
from analysis.validate.silicon_fit import AIM, errors, fit
from analysis.validate.silicon_page import parity, render
from analysis.validate.silicon_rows import FAMILIES, FIT_TP, Measured, Sample, load_sample, sample_path

BY_NAME = {family.name: family for family in FAMILIES}
VLLM = Constants(0.001, 4e-5, 1.03)


@pytest.fixture(scope="module")
def sample() -> Sample:
    return load_sample()


def small(sample: Sample, name: str, tp: int, count: int) -> list[Measured]:
    rows = [row for row in sample.of(BY_NAME[name], count) if row.tp == tp]
    assert len(rows) == count
    return rows


# --- what is read ----------------------------------------------------------------------------------------------------


def test_families_and_exclusions_have_the_known_counts(sample: Sample) -> None:
    assert {name: len(rows) for name, rows in sample.rows.items()} == {
        "qwen_vllm": 90,
        "qwen_sglang": 78,
        "llama_h100": 45,
        "llama_h200": 60,
    }
    assert list(sample.left_out.values()) == [21, 6, 4, 4]
    assert sum("8B-FP8" in reason for reason in sample.left_out) == 1


def test_splits_by_tp_and_by_long_ttft(sample: Sample) -> None:
    counts = {
        family.name: [sum(family.split(row) == split for row in sample.rows[family.name]) for split in silicon.SPLITS]
        for family in FAMILIES
    }
    assert counts == {
        "qwen_vllm": [30, 57, 3],
        "qwen_sglang": [24, 43, 11],
        "llama_h100": [15, 27, 3],
        "llama_h200": [0, 58, 2],
    }
    for family in FAMILIES:
        fitted = [row for row in sample.rows[family.name] if family.split(row) == "fit"]
        assert all(row.tp == FIT_TP and row.ttft_s <= 5.0 for row in fitted)


def test_rows_are_in_seconds_and_in_order(sample: Sample) -> None:
    rows = sample.rows["qwen_vllm"]
    first = next(row for row in rows if row.tp == 4)
    assert (first.prompt_tokens, first.output_tokens, first.concurrency) == (1024, 128, 8)
    assert first.ttft_s == pytest.approx(0.126100, rel=1e-5)
    assert first.tpot_s == pytest.approx(0.011758, rel=1e-4)
    keys = [(row.tp, row.prompt_tokens, row.output_tokens, row.concurrency) for row in rows]
    assert keys == sorted(keys)


def test_a_limit_keeps_the_smallest_loads_of_each_degree(sample: Sample) -> None:
    rows = sample.of(BY_NAME["llama_h200"], 2)
    assert [row.tp for row in rows] == [1, 1, 2, 2, 4, 4, 8, 8]
    assert {(row.concurrency, row.output_tokens) for row in rows} == {(4, 1024)}


def test_broken_samples_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_sample(tmp_path / "none.csv")
    with sample_path().open(newline="") as file:
        reader = csv.DictReader(file)
        line = next(row for row in reader if FAMILIES[0].select(row))
    path = tmp_path / "sample.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, line)
        writer.writeheader()
        writer.writerow({**line, "silicon_ttft_ms": "fast"})
    with pytest.raises(InputError, match=r"sample\.csv:2"):
        load_sample(path)


# --- the engines' rules ----------------------------------------------------------------------------------------------


def test_budgets_follow_the_engines() -> None:
    row = Measured("x", 4096, 512, 64, 4, 1.0, 0.01)
    chunks = {name: engine.scheme(row).chunk_tokens for name, engine in ENGINES.items()}
    assert chunks == {"vllm 0.12.0": 64 + 4096 + 1500, "sglang 0.5.1": 3 * 4096, "vllm fp8": 8192}
    assert [engine.scheme(row).prefill_first for engine in ENGINES.values()] == [False, True, False]


def test_drawn_lengths_are_those_of_the_benchmark() -> None:
    row = Measured("x", 1024, 8192, 4, 4, 1.0, 0.01)
    prompts, outputs = ENGINES["vllm fp8"].lengths(row)
    assert len(prompts) == len(outputs) == 40
    assert prompts.min() >= 819 and prompts.max() <= 1024
    assert outputs.min() >= 6553 and outputs.max() <= 8192
    np.testing.assert_array_equal(prompts[:4], [991, 866, 936, 1011])
    again, _ = ENGINES["vllm fp8"].lengths(row)
    np.testing.assert_array_equal(prompts, again)


def test_the_client_keeps_its_loops_and_its_seed() -> None:
    used = bench("qwen_vllm")
    simulation = used.simulation(Measured("x", 1024, 16, 4, 4, 1.0, 0.01), VLLM)
    load = simulation.arrivals.apply(simulation.trace, None, 0)
    assert load.parent_row is not None and load.think_s is not None
    assert load.parent_row[:6].tolist() == [-1, -1, -1, -1, 0, 1]
    assert load.arrival_s[:4].tolist() == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert load.think_s[:4].max() == 0.0 and load.think_s[4:].mean() == pytest.approx(0.006, rel=0.5)
    np.testing.assert_array_equal(load.think_s, simulation.arrivals.apply(simulation.trace, None, 0).think_s)
    requests = simulation.replay(load, check=True).requests
    assert requests["status"].to_pylist() == ["completed"] * 40
    row = dict(zip(requests["request_id"].to_pylist(), requests["arrival_s"].to_pylist(), strict=True))
    end = dict(zip(requests["request_id"].to_pylist(), requests["finish_s"].to_pylist(), strict=True))
    assert all(row[i] == pytest.approx(end[i - 4] + load.think_s[i]) for i in range(4, 40))


def test_constants_enter_the_tables_where_they_should() -> None:
    used = bench("qwen_vllm")
    row = Measured("x", 1024, 128, 8, 4, 1.0, 0.01)
    plain, changed = (
        used.simulation(row, constants).latency.compile(used.model, used.gpu, 4, 1)
        for constants in (Constants(0.0, 0.0, 1.0), Constants(0.001, 2e-5, 1.5))
    )
    for tokens in (1, 8):
        assert changed.linear_s(tokens) == plain.linear_s(tokens)  # a decode batch is not prefill
    assert changed.linear_s(4096) - plain.linear_s(8) == pytest.approx(1.5 * (plain.linear_s(4096) - plain.linear_s(8)))
    assert changed.prefill_attention_s(512, 300) == pytest.approx(1.5 * plain.prefill_attention_s(512, 300))
    assert changed.prefill_attention_s(20_000, 0) == pytest.approx(1.5 * plain.prefill_attention_s(20_000, 0))
    assert changed.decode_attention_s(8, 8192) == plain.decode_attention_s(8, 8192)
    assert changed.overhead_s(10) == pytest.approx(0.001 + 2e-4)


def test_prefill_first_pauses_decodes_and_conserves_kv() -> None:
    row = Measured("x", 1024, 40, 6, 4, 1.0, 0.01)
    simulation = bench("qwen_sglang").simulation(row, VLLM)
    result = replace(simulation, kv=KvConfig(capacity_tokens=6272, admission="step")).run(check=True)
    columns = result.iterations.select(["prefill_tokens", "decode_tokens"]).to_pydict()
    mixed = [p and d for p, d in zip(columns["prefill_tokens"], columns["decode_tokens"], strict=True)]
    assert not any(mixed)
    assert result.summary["requests"]["completed"] == 60
    assert result.summary["requests"]["preemptions"] > 0
    decodes_first = replace(simulation, scheme=replace(simulation.scheme, prefill_first=False)).run(check=True)
    assert np.mean(decodes_first.requests["tpot_s"].to_numpy()) != np.mean(result.requests["tpot_s"].to_numpy())


def test_prefill_first_is_an_option_of_the_scheme() -> None:
    assert compose(["scheme=chunked_prefill"]).scheme.prefill_first is False
    assert ChunkedPrefill(prefill_first=True).prefill_first


# --- the fit ---------------------------------------------------------------------------------------------------------


def linear_engine(truth: Constants) -> Callable[[Sequence[Measured], Constants], list[Predicted]]:
    """Predictions that are linear in the constants, as an engine's nearly are."""

    def replay(rows: Sequence[Measured], constants: Constants) -> list[Predicted]:
        scale = constants.prefill_factor / truth.prefill_factor
        return [
            Predicted(
                row.prompt_tokens * 4e-5 * scale + constants.iteration_s - truth.iteration_s,
                0.008 + constants.iteration_s + constants.sequence_s * row.concurrency + 0.002 * scale,
                0,
            )
            for row in rows
        ]

    return replay


def test_the_fit_recovers_constants_and_is_deterministic() -> None:
    truth = Constants(0.0021, 3.7e-5, 1.07)
    replay = linear_engine(truth)
    loads = [Measured(str(c), prompt, 128, c, 4, 1.0, 1.0) for prompt in (1024, 4096) for c in (8, 32, 128)]
    rows = [replace(row, ttft_s=p.ttft_s, tpot_s=p.tpot_s) for row, p in zip(loads, replay(loads, truth), strict=True)]
    found = fit(rows, lambda constants: replay(rows, constants))
    assert found.constants.iteration_s == pytest.approx(truth.iteration_s, abs=2e-6)
    assert found.constants.sequence_s == pytest.approx(truth.sequence_s, abs=2e-8)
    assert found.constants.prefill_factor == pytest.approx(truth.prefill_factor, abs=2e-4)
    assert found == fit(rows, lambda constants: replay(rows, constants))
    assert AIM == (0.03, 0.10)


def test_held_out_rows_never_choose_constants(sample: Sample) -> None:
    """Whatever the rows of other degrees (and of the H200) say, the constants stay."""

    def validated(data: Sample) -> silicon.Validation:
        replay = linear_engine(Constants(0.002, 3e-5, 1.0))
        families = [BY_NAME[name] for name in ("qwen_vllm", "llama_h100", "llama_h200")]
        return silicon.validate(data, families, lambda name, rows, constants: replay(rows, constants))

    def perturbed(name: str, row: Measured) -> Measured:
        if row.tp == FIT_TP and name != "llama_h200":
            return row
        return replace(row, ttft_s=row.ttft_s * 3.0, tpot_s=row.tpot_s / 2.0)

    changed = {name: tuple(perturbed(name, row) for row in rows) for name, rows in sample.rows.items()}
    before, after = validated(sample), validated(replace(sample, rows=changed))
    assert set(before.fits) == {"qwen_vllm", "llama_h100"}
    assert before.fits == after.fits and before.fitted_rows == after.fitted_rows
    fits = [entry for entry in entries(before, sample) if entry["split"] == "fit"]
    assert fits == [entry for entry in entries(after, sample) if entry["split"] == "fit"]
    assert entries(before, sample) != entries(after, sample)
    moved = {**sample.rows, "qwen_vllm": tuple(perturbed("llama_h200", row) for row in sample.rows["qwen_vllm"])}
    assert validated(replace(sample, rows=moved)).fits["qwen_vllm"] != before.fits["qwen_vllm"]


def entries(result: silicon.Validation, sample: Sample) -> list[dict[str, object]]:
    content = silicon.summarise(result, sample, {})
    json.dumps(content, allow_nan=False)
    return content["families"]


def test_a_family_without_fit_rows_is_named(sample: Sample) -> None:
    with pytest.raises(InputError, match="qwen_vllm at TP 4"):
        silicon.choose(BY_NAME["qwen_vllm"], [], lambda name, rows, constants: [])


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_three_rows_are_replayed_as_recorded(sample: Sample) -> None:
    """What the documentation records is what the simulator predicts: replays of small rows, pinned in the errors."""
    rows = small(sample, "qwen_vllm", 4, 3)
    tpot, ttft = errors(rows, [predict("qwen_vllm", row, VLLM) for row in rows])
    assert np.abs(tpot).max() < 0.06
    assert np.abs(ttft).max() < 0.25


def test_smoke_writes_summary_rows_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silicon, "run_folder", lambda: tmp_path)
    overrides = ["source=silicon", "silicon.families=[qwen_vllm]", "silicon.rows=1", "silicon.workers=1", "quiet=true"]
    cfg = compose([*overrides, f"silicon.record={tmp_path / 'record.json'}"], command="validate")
    dispatcher.command(cfg)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert [(entry["split"], entry["rows"]) for entry in content["families"]] == [("fit", 1), ("held_out", 2)]
    keys = {"model", "system", "engine", "split", "rows", "tpot_mape", "ttft_mape", "tpot_median", "ttft_median"}
    assert all(keys <= set(entry) for entry in content["families"])
    assert content["kind"] == "validate" and content["provenance"]["profiles"]["qwen_vllm"]
    assert content["families"][1]["tpot_mape"] < 0.10
    text = (tmp_path / "report.html").read_text()
    assert "Parity" in text and "The worst rows" in text and text.count("plotly.js v") <= 2
    assert not any(f'src="{scheme}' in text for scheme in ("http://", "https://", "//"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert set(record["constants"]) == {"qwen_vllm"} and "provenance" not in record


def test_page_escapes_and_draws_every_family(sample: Sample) -> None:
    replay = linear_engine(Constants(0.002, 3e-5, 1.0))
    result = silicon.validate(sample, FAMILIES, lambda name, rows, constants: replay(rows, constants))
    rows = silicon.rows_table(result).to_pylist()
    assert len(rows) == 273
    content = silicon.summarise(result, sample, {})
    page = render({**content, "warnings": ["KV is <small>"]}, rows)
    assert "KV is &lt;small&gt;" in page
    figure = parity(rows, "ttft")
    assert sum(len(trace["x"]) for trace in figure["data"]) == 273
    assert len(figure["data"]) == 11  # splits that have rows


def test_users_mistakes_are_one_line() -> None:
    with pytest.raises(InputError, match="source=gold: unknown, use one of silicon, executor"):
        dispatcher.command(compose(["source=gold"], command="validate"))
    with pytest.raises(InputError, match=r"silicon.families=qwen: unknown, use some of qwen_vllm"):
        silicon.chosen_families(["qwen"])
    with pytest.raises(InputError, match=r"silicon\.rows=0"):
        silicon.command(compose(["silicon.rows=0"], command="validate"))


def test_results_do_not_depend_on_the_workers(sample: Sample) -> None:
    rows = small(sample, "qwen_vllm", 4, 2)
    with silicon.predictor(1) as serial, silicon.predictor(2) as parallel:
        assert serial("qwen_vllm", rows, VLLM) == parallel("qwen_vllm", rows, VLLM)


def test_kv_of_the_llama_rows_is_bfloat16() -> None:
    used = Bench(BY_NAME["llama_h100"])
    assert used.model.kv_itemsize == 2 and used.model.gemm_itemsize == 1
    assert used.kernels.profile.model["kv_cache_dtype"] == "bfloat16"
