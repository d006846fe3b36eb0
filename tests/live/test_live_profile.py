"""Profiling: what is measured, how often and in which order; folders that are resumed; and fits that recover a law."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from live_fakes import (
    CPU,
    LAW,
    MODEL,
    FakeRanks,
    OneKernelRanks,
    OverlappingRanks,
    executor,
    fake_ranks,
    fit_folder,
    law_of,
)

from analysis.calibrate import rounds as source
from analysis.calibrate.command import table
from confsim.errors import InputError
from confsim.latency.profile import Profile
from executor.config import ExecutorConfig, Layout
from executor.probe import Probe, even, warm_up
from executor.profile.command import profile
from executor.profile.plan import Grid, make_plan

GRID = Grid(chunk_tokens=256, prefix_tokens=256, context_tokens=256, sequences=8, kv_tokens=6144, rounds=4)


def measured(folder: Path, grid: Grid = GRID, config: ExecutorConfig | None = None, **keys: Any) -> Any:
    return profile(config or executor(), CPU, grid, folder, ranks=keys.pop("ranks", fake_ranks), **keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile")
    measured(path)
    return path


def rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*/round-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


# What is measured ----------------------------------------------------------------------------------------------------


def test_every_cell_is_measured_once_a_round_forwards_and_backwards(folder: Path):
    found = rows(folder)
    plan = make_plan(GRID.filled(executor()), Layout("xp", 2))
    names = [[row["cell"] for row in found if row["round"] == number] for number in range(4)]
    assert all(sorted(order) == sorted(names[0]) for order in names)
    assert len(names[0]) == len(set(names[0])) == plan.cells
    assert names[0] == names[2] and names[1] == names[3]
    first = [unit[0].name for unit in plan.units]
    assert [name for name in names[0] if name in first] == first
    assert [name for name in names[1] if name in first] == first[::-1]


def test_rows_hold_what_the_law_says(folder: Path):
    law = law_of(Layout("xp", 2))
    for row in rows(folder):
        tokens = sum(row["tokens"])
        attention = sum(law.prefill_attention_s(n, c) for n, c in zip(row["tokens"], row["cached"], strict=True))
        assert row["prefill_attention_s"] == pytest.approx(attention)
        assert row["decode_attention_s"] == pytest.approx(
            law.decode_attention_s(row["sequences"], row["context_tokens"])
        )
        assert row["linear_s"] == pytest.approx(law.linear_s(row["shard_tokens"] + row["sequences"]))
        assert row["communication_s"] == pytest.approx(law.all_to_all_s(row["shard_tokens"]))
        assert row["shard_tokens"] >= tokens / 2


def test_what_a_model_needs_is_covered(folder: Path):
    found = rows(folder)
    assert {row["part"] for row in found} == {"prefill", "decode", "transfer", "pair", "mixed"}
    prefill = [row for row in found if row["part"] == "prefill"]
    assert {row["tokens"][0] for row in prefill if row["cached"] == [0]} == {1, 4, 16, 32, 64, 128, 256}
    assert len({row["cached"][0] for row in prefill if row["tokens"] == [64]}) == 3
    decode = [row for row in found if row["part"] == "decode"]
    assert {row["sequences"] for row in decode} == {1, 2, 4, 8}
    mixed = [row for row in found if row["part"] == "mixed"]
    assert any(row["last"] for row in mixed) and any(len(row["tokens"]) > 1 for row in mixed)


def test_one_decode_a_group_is_measured_alone(folder: Path):
    """In turn on each group, as least context leaves it; without groups to choose from there is no such thing."""
    alone = [row for row in rows(folder) if row["part"] == "decode" and row["busy_groups"] == 1]
    assert alone and {row["sequences"] for row in alone} == {1}
    assert {row["busy_groups"] for row in rows(folder) if row["sequences"] != 1} == {2}
    one = make_plan(GRID.filled(executor()), Layout("tp", 1, 2))
    assert not any(cell.part == "transfer" for unit in one.units for cell in unit)


def test_pools_hold_everything_that_a_plan_needs():
    """Real ranks reserve whole prompts: the capacity must cover decodes as they grow, and the longest ladder."""
    grid = GRID.filled(executor())
    plan = make_plan(grid, Layout("xp", 2))
    decodes = sum(level * count for level, count in plan.levels.items())
    assert decodes <= grid.kv_tokens  # type: ignore[operator]
    assert plan.capacity_tokens > decodes + 256 + 2 * 256


@pytest.mark.parametrize(
    ("grid", "match"),
    [
        ({"rounds": 2}, "3 rounds"),
        ({"chunk_tokens": 0}, r"grid\.chunk_tokens=0"),
    ],
)
def test_grids_that_cannot_be_are_refused(grid: dict[str, int], match: str):
    with pytest.raises(InputError, match=match):
        Grid(**grid)


def test_contexts_need_room():
    grid = replace(GRID, kv_tokens=100).filled(executor())
    with pytest.raises(InputError, match=r"grid\.kv_tokens=100"):
        make_plan(grid, Layout("xp", 2))


def test_sizes_stay_within_the_models_context():
    config = replace(executor(), model=replace(MODEL, max_context_tokens=512))
    filled = Grid().filled(config)
    assert (filled.chunk_tokens, filled.prefix_tokens, filled.context_tokens) == (256, 256, 256)


# Folders -------------------------------------------------------------------------------------------------------------


def test_an_interrupted_profile_is_resumed(tmp_path: Path):
    @contextmanager
    def breaking(config: ExecutorConfig) -> Any:
        ranks = FakeRanks(config.model, config.layout, law_of(config.layout))
        cells = make_plan(GRID.filled(executor()), config.layout).cells

        def fail(number: int) -> float:
            if number > 8 * cells:
                raise KeyboardInterrupt
            return 1.0

        ranks.factor = fail
        yield ranks

    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, ranks=breaking)
    done = len(list(tmp_path.glob("*/round-*.parquet")))
    assert 0 < done < 4
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/round-*.parquet")}
    outcome = measured(tmp_path)
    assert (outcome.rounds, outcome.measured) == (4, 4 - done)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert measured(tmp_path).measured == 0
    assert measured(tmp_path, replace(GRID, rounds=6)).measured == 2


def test_a_folder_of_something_else_is_refused(folder: Path):
    with pytest.raises(InputError, match="another model, layout, device or grid"):
        measured(folder, replace(GRID, chunk_tokens=128))


def test_folders_that_could_not_be_fitted_are_refused_before_measuring(folder: Path, tmp_path: Path):
    """Another model beside, a broken or older profile.json, and an output that is no folder."""
    other = tmp_path / "copy"
    shutil.copytree(folder, other)
    wider = replace(executor(), model=replace(MODEL, intermediate_size=128), layout=Layout("tp", 1, 2))
    with pytest.raises(InputError, match=r"profile\.json: measured another model: name a new folder"):
        measured(other, config=wider)
    head = json.loads((other / "xp-2x1" / "profile.json").read_text())
    for content in ("{", json.dumps(head | {"format": 1})):
        (other / "xp-2x1" / "profile.json").write_text(content)
        with pytest.raises(InputError, match=r"profile\.json: (cannot be read as JSON|is no executor profile)"):
            measured(other)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file: cannot be made \(Not a directory\)"):
        measured(tmp_path / "file")


def test_profiles_of_different_kernels_are_kept_apart(folder: Path, tmp_path: Path):
    """What one family measures says nothing of another: neither is added to the other, nor are they fitted together."""
    other = tmp_path / "copy"
    shutil.copytree(folder, other)
    file = other / "xp-2x1" / "profile.json"
    head = json.loads(file.read_text())
    ranks = [rank | {"attention": "flash-attn 3"} for rank in head["ranks"]]
    file.write_text(json.dumps(head | {"ranks": ranks}))
    for config in (executor(), replace(executor(), layout=Layout("tp", 1, 2))):
        with pytest.raises(InputError, match=r"measured flash-attn 3 2, these ranks have sdpa 2: name a new folder"):
            measured(other, replace(GRID, rounds=5), config=config)
    shutil.copytree(folder / "xp-2x1", other / "xp-again")
    with pytest.raises(InputError, match=r"measured flash-attn 3 2, .* sdpa 2|measured sdpa 2, .* flash-attn 3 2"):
        source.read(other)


def test_a_budget_ends_a_profile_after_three_rounds(tmp_path: Path):
    lines: list[str] = []
    outcome = measured(tmp_path, replace(GRID, budget_s=0.0), say=lines.append)
    assert outcome.rounds == 3
    assert any("budget" in line for line in lines) and any("left" in line for line in lines)


def test_the_folder_says_what_was_measured_on_what(folder: Path):
    head = json.loads((folder / "xp-2x1" / "profile.json").read_text())
    assert head["kind"] == "executor_profile"
    assert head["model"]["hidden_size"] == 64 and head["gpu"]["name"] == "cpu"
    assert head["ranks"] == [{"device": "fake", "attention": "sdpa", "attention_version": "2"}] * 2
    assert head["grid"]["chunk_tokens"] == 256 and "rounds" not in head["grid"]


# Probes --------------------------------------------------------------------------------------------------------------


def test_shards_of_probes_are_even():
    assert even(7, 2) == (4, 3) and even(7, 2, 1) == (3, 4) and even(3, 4) == (1, 1, 1, 0)


def test_probes_free_what_they_drop():
    ranks = FakeRanks(MODEL, Layout("xp", 2), law_of(Layout("xp", 2)))
    warm_up(ranks, 6)
    assert len(ranks.plans) == 6 and not ranks.known
    probe = Probe(ranks)
    request = probe.request(8)
    probe.run([(request, 8, 1)])
    assert probe.context(request) == 9
    probe.run((), [[], [request]])
    assert probe.context(request) == 10
    probe.drop(request)
    probe.flush()
    assert ranks.plans[-1].released == (request.id,) and not ranks.known
    warm_up(ranks, 0)


# Fits ----------------------------------------------------------------------------------------------------------------


def test_a_fit_recovers_the_law_exactly(folder: Path):
    """Every term at sizes that were measured, that lie between, and beyond (five digits are kept)."""
    fitted, model, gpu = fit_folder("executor", folder)
    got, law = fitted.compile(model, gpu, 1, 2), law_of(Layout("xp", 2))
    near = {"rel": 1e-4}
    for tokens in (1, 3, 8, 77, 128, 300):
        assert got.linear_s(tokens) == pytest.approx(law.linear_s(tokens), **near)
    for tokens in (8, 13, 77, 128, 200):
        assert got.all_to_all_s(tokens) == pytest.approx(law.all_to_all_s(tokens), **near)
        assert got.kv_transfer_s(64 * tokens) == pytest.approx(law.kv_transfer_s(64 * tokens), rel=0.02)
    for tokens in (1, 3, 8, 20):
        assert got.head_s(tokens) == pytest.approx(law.head_s(tokens), **near)
    for tokens, cached in ((16, 0), (50, 0), (256, 0), (16, 300), (100, 500), (256, 1000)):
        assert got.prefill_attention_s(tokens, cached) == pytest.approx(law.prefill_attention_s(tokens, cached), **near)
    for sequences, context in ((1, 30), (1, 256), (3, 300), (8, 1000), (8, 2500)):
        assert got.decode_attention_s(sequences, context) == pytest.approx(
            law.decode_attention_s(sequences, context), **near
        )
    assert got.overhead_s(9) == pytest.approx(law.overhead_s(9), rel=1e-6)
    assert (got.prefill_slowdown, got.decode_slowdown) == (1.0, 1.0)


def test_errors_are_zero_on_a_law_and_printed(folder: Path):
    fitted, _, _ = fit_folder("executor", folder)
    for name in ("linear", "exchange", "head", "mixed_iterations", "pure_iterations"):
        held = fitted.errors[name]["held_out"]
        assert held["rows"] > 0 and held["p95_pct"] <= 0.05, name
        # Decodes grow from round to round, so whole iterations differ by what the longer context takes.
        assert fitted.errors[name]["replicates"]["p95_pct"] <= (5.0 if name.endswith("iterations") else 0.0)
    text = "\n".join(table(fitted))
    assert "mixed_iterations" in text and "linear" in text and "held out" in text


def test_mixed_iterations_are_held_out_of_the_fit(folder: Path, tmp_path: Path):
    """Whatever the mixed rows say, no table changes; their error does."""
    other = tmp_path / "copy"
    shutil.copytree(folder, other)
    for file in other.glob("*/round-*.parquet"):
        kept = pq.read_table(file).to_pylist()
        for row in kept:
            if row["part"] == "mixed":
                row["duration_s"] *= 2.0
        pq.write_table(pa.Table.from_pylist(kept, pq.read_schema(file)), file)
    one, _, _ = fit_folder("executor", folder)
    two, _, _ = fit_folder("executor", other)
    assert (one.linear, one.decode, one.prefill, one.exchange) == (two.linear, two.decode, two.prefill, two.exchange)
    assert two.errors["mixed_iterations"]["held_out"]["mean_pct"] == pytest.approx(50.0, abs=0.01)
    assert two.errors["pure_iterations"] == one.errors["pure_iterations"]


def test_medians_shrug_off_an_iteration_that_was_disturbed(tmp_path: Path):
    @contextmanager
    def disturbed(config: ExecutorConfig) -> Any:
        rng = np.random.default_rng(3)
        ranks = FakeRanks(config.model, config.layout, law_of(config.layout))
        ranks.factor = lambda number: 5.0 if rng.random() < 0.1 else 1.0
        yield ranks

    measured(tmp_path, replace(GRID, rounds=9), ranks=disturbed)
    fitted, _, _ = fit_folder("executor", tmp_path)
    assert fitted.errors["mixed_iterations"]["held_out"]["mean_pct"] < 2.0
    assert fitted.errors["mixed_iterations"]["single"]["mean_pct"] > 10.0


def test_what_mixing_costs_is_measured(tmp_path: Path):
    """Pairs of both phases tell it; mixed iterations, which no fit has seen, are then predicted."""

    @contextmanager
    def mixing(config: ExecutorConfig) -> Any:
        yield FakeRanks(config.model, config.layout, replace(law_of(config.layout), mixed_overhead_s=1.5e-3))

    measured(tmp_path, ranks=mixing)
    fitted, model, gpu = fit_folder("executor", tmp_path)
    assert fitted.mixed_overhead_s == pytest.approx(1.5e-3, rel=1e-3)
    assert fitted.compile(model, gpu, 1, 2).mixed_overhead_s == fitted.mixed_overhead_s
    assert fitted.errors["mixed_iterations"]["held_out"]["mean_pct"] < 0.05
    fitted.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").mixed_overhead_s == fitted.mixed_overhead_s


def test_slowdowns_are_measured_where_paths_overlap(tmp_path: Path):
    """As on a GPU: pairs of both paths tell the slowdowns, and predict mixed iterations that no fit has seen."""

    @contextmanager
    def overlapping(config: ExecutorConfig) -> Any:
        yield OverlappingRanks(config.model, config.layout, law_of(config.layout))

    gpu = executor(kind="cuda", overlap="partition")
    measured(tmp_path, replace(GRID, chunk_tokens=1024), config=gpu, ranks=overlapping)
    fitted, model, spec = fit_folder("executor", tmp_path)
    assert fitted.prefill_slowdown == pytest.approx(1.6)
    assert fitted.decode_slowdown == pytest.approx(1.2, rel=0.02)  # decodes grew by a few tokens since
    assert fitted.errors["mixed_iterations"]["held_out"]["mean_pct"] < 2.0
    law = law_of(Layout("xp", 2))
    got = fitted.compile(model, spec, 1, 2)
    assert got.kv_transfer_s(512) == pytest.approx(law.kv_transfer_s(512), rel=1e-3)


def test_layouts_of_one_folder_are_fitted_together(folder: Path, tmp_path: Path):
    measured(tmp_path)
    measured(tmp_path, config=replace(executor(), layout=Layout("tp", 1, 2)))
    fitted, model, gpu = fit_folder("executor", tmp_path)
    assert set(fitted.linear) == {1, 2} and set(fitted.exchange) == {(1, 2)}
    assert fitted.compile(model, gpu, 2, 1).linear_s(64) == pytest.approx(LAW["linear_base_s"] + 64 * 31e-6)


def test_layouts_that_were_not_measured_are_refused(folder: Path):
    fitted, model, gpu = fit_folder("executor", folder)
    with pytest.raises(InputError, match="no layout of 4 groups of 1"):
        fitted.compile(model, gpu, 1, 4)


@pytest.mark.parametrize("content", [None, "{", '{"kind": "other"}'])
def test_folders_without_a_profile_are_refused(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "profile.json").write_text(content)
    with pytest.raises(InputError, match=r"profile\.json"):
        source.read(tmp_path)


def test_one_round_is_not_enough(tmp_path: Path, folder: Path):
    shutil.copytree(folder, tmp_path / "copy")
    for file in sorted((tmp_path / "copy").glob("*/round-*.parquet"))[1:]:
        file.unlink()
    with pytest.raises(InputError, match="2 or more"):
        source.read(tmp_path / "copy")


# One attention call for both phases --------------------------------------------------------------------------------


def test_one_call_for_both_phases_is_measured_and_fitted(tmp_path: Path):
    """Ranks of a tp layout with `one_kernel`: a grid of ratios, which then predicts the iterations held out."""

    @contextmanager
    def joined(config: ExecutorConfig) -> Any:
        yield OneKernelRanks(config.model, config.layout, law_of(config.layout))

    config = replace(executor(one_kernel=True), layout=Layout("tp", 1, 1))
    measured(tmp_path, config=config, ranks=joined)
    joint = [row for row in rows(tmp_path) if row["part"] == "joint" and row["round"] == 0]
    assert {tuple(row["tokens"]) for row in joint} == {(), (16,), (32,), (128,), (256,)}
    assert {tuple(row["cached"]) for row in joint} == {(), (0,), (256,)}
    assert {row["sequences"] for row in joint} == {0, 1, 2, 4, 8}
    profile, _, _ = fit_folder("executor", tmp_path)
    assert profile.mixed is not None
    assert profile.mixed.ratio(64, 100, 4, 100) == pytest.approx(2.0, rel=1e-3)
    assert profile.mixed.ratio(256, 0, 8, 256) == pytest.approx(3.0, rel=1e-3)
    assert profile.errors["mixed_attention"]["sum_of_parts"]["mean_pct"] > 50.0
    assert profile.errors["mixed_iterations"]["held_out"]["mean_pct"] < 2.0
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again.mixed is not None and again.mixed.data == profile.mixed.data
    assert again.profile_hash == profile.profile_hash


def test_ranks_that_compute_the_phases_apart_have_no_grid(folder: Path):
    assert fit_folder("executor", folder)[0].mixed is None
    plan = make_plan(GRID.filled(executor()), Layout("tp", 1, 2))
    assert not any(cell.part == "joint" for unit in plan.units for cell in unit)
