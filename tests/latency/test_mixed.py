"""Attention of both phases in one call: grids of ratios, their fit, and iterations that pay for it."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.calibrate.measurements import MixedTable
from analysis.calibrate.mixed import PACKAGED_KNOTS, fit_mixed, packaged, read_csv
from confsim.errors import InputError
from confsim.latency.affine import AffineLatency
from confsim.latency.config import FittedLatency
from confsim.latency.mixed import AXES, GRIDS, MixedAttention, chosen_grid, describe_grid, packaged_grids
from confsim.latency.profile import Profile
from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from confsim.run.request import Request
from confsim.schemes.cost import CoBatchCost, Planned, in_turn
from confsim.specs import GpuSpec, ModelSpec

GRID: dict[str, Any] = {
    "kind": "mixed_attention",
    "format": 1,
    "gpu": "bench",
    "chunk_tokens": [100, 1000],
    "cached_tokens": [0, 48],  # 16 and 64 with the offset
    "sequences": [1, 16],
    "context_each": [10, 1000],
    # chunk, prefix, sequences, context; the last axis fastest
    "ratio": [1.0, 2.0, 4.0, 8.0, 1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0],
}


def grid(**changes: Any) -> MixedAttention:
    return MixedAttention({**GRID, **changes}, "grid")


def test_ratios_at_the_points_and_between_them_on_log_scales() -> None:
    points = product(*(GRID[name] for name in AXES))
    assert [grid().ratio(*at) for at in points] == pytest.approx(GRID["ratio"])
    assert grid().ratio(100, 0, 1, 100) == pytest.approx(math.sqrt(2.0))  # half-way from 10 to 1,000 on a log scale
    assert grid().ratio(100, 0, 4, 10) == pytest.approx(2.0)
    assert grid().ratio(1000, 16, 16, 1000) == pytest.approx(2.0)  # 32 between 16 and 64
    assert grid().ratio(math.sqrt(1e5), 0, 1, 1000) == pytest.approx(math.sqrt(2.0))


def test_beyond_the_grid_the_edge_counts() -> None:
    assert grid().ratio(1, 0, 16, 50_000) == pytest.approx(8.0)
    assert grid().ratio(9000, 5000, 400, 9000) == pytest.approx(4.0)


def test_seconds_are_the_ratio_times_the_sum() -> None:
    assert grid().seconds(100, 0, 1, 1000, 0.003, 0.001) == pytest.approx(0.008)
    assert grid().seconds(0, 0, 4, 1000, 0.0, 0.002) == 0.002
    assert grid().seconds(100, 0, 0, 0, 0.003, 0.0) == 0.003


def test_beyond_the_longest_chunk_only_what_the_grid_reaches_is_stretched() -> None:
    """A chunk of 2,000: its first 1,000 tokens have a quarter of its pairs."""
    ratio = grid(ratio=[2.0] * 16)
    assert ratio.seconds(2000, 0, 4, 400, 0.040, 0.010) == pytest.approx(0.050 + 0.010 + 0.010)


def test_one_call_is_never_faster_than_its_longer_part() -> None:
    assert grid(ratio=[0.5] * 16).seconds(100, 0, 1, 1000, 0.009, 0.001) == 0.009


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ratio": [1.0] * 15}, "2 x 2 x 2 x 2"),
        ({"ratio": [0.0] * 16}, "at least"),
        ({"sequences": [4, 4]}, "sequences does not ascend"),
        ({"sequences": [4]}, "two numbers or more"),
        ({"chunk_tokens": [0, 4]}, "chunk_tokens"),
        ({"context_each": None}, "context_each"),
    ],
)
def test_grids_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        grid(**changes)


def test_choices(tmp_path: Path) -> None:
    own = grid()
    assert chosen_grid("auto", own) is own
    assert chosen_grid("auto", None) is chosen_grid("separate", own) is None
    assert packaged_grids() == ["rtx4090", "rtxpro6000"]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(GRID))
    found = chosen_grid(str(file), None)
    assert found is not None and found.gpu == "bench"
    for choice, says in (
        ("h100", "auto, separate, rtx4090, rtxpro6000"),
        (str(tmp_path / "no.json"), "cannot be read"),
    ):
        with pytest.raises(InputError, match=says):
            chosen_grid(choice, None)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="mixed_attention"):
        chosen_grid(str(tmp_path / "other.json"), None)


def test_results_say_whose_grid_it_is(model: ModelSpec, gpu: GpuSpec) -> None:
    assert FittedLatency().describe(model, gpu)["mixed_attention"] == {"one_kernel": False}
    borrowed = FittedLatency(mixed_attention="rtxpro6000").describe(model, gpu)["mixed_attention"]
    assert (borrowed["one_kernel"], borrowed["borrowed"], borrowed["gpu"]) == (True, True, "rtxpro6000")
    assert borrowed["errors"]["held_out"]["mean_pct"] < 5.0 < borrowed["errors"]["sum_of_parts"]["mean_pct"]
    assert describe_grid(grid(), "bench")["borrowed"] is False
    assert FittedLatency().compile(model, gpu, 4, 1).mixed is None
    assert FittedLatency(mixed_attention="rtx4090").compile(model, gpu, 4, 1).mixed is not None


def test_a_profile_keeps_its_own_grid(profile: Profile, model: ModelSpec, gpu: GpuSpec, tmp_path: Path) -> None:
    from dataclasses import replace

    path = tmp_path / "own.json"
    replace(profile, mixed=grid(gpu=gpu.name)).save(path)
    mixed = FittedLatency(profile=str(path)).compile(model, gpu, 4, 1).mixed
    assert mixed is not None
    assert mixed.ratio(100, 0, 16, 1000) == pytest.approx(8.0)
    assert FittedLatency(profile=str(path), mixed_attention="separate").compile(model, gpu, 4, 1).mixed is None
    about = FittedLatency(profile=str(path)).describe(model, gpu)["mixed_attention"]
    assert (about["one_kernel"], about["borrowed"]) == (True, False)


def test_an_iteration_of_one_call_by_hand() -> None:
    """Two chunks, 60 tokens behind 40 and 40 behind none, are one of 100 behind 24, beside 4 decodes of 100 each."""
    law = AffineLatency(prefill_pair_s=1e-6, decode_token_s=1e-5, linear_token_s=1e-5, mixed=grid())
    cost = CoBatchCost(law, in_turn, async_schedule=False, one_kernel=True)
    first, second = Request(0, 0.0, 100), Request(1, 0.0, 500)
    first.prefilled = 40
    batches = (DecodeBatch(0, 4, 400),)
    plan = IterationPlan((PrefillChunk(first, 40, (60,), True), PrefillChunk(second, 0, (40,))), batches)
    prefill_s, decode_s = 1e-6 * (60 * 70 + 40 * 20), 1e-5 * 400
    place = math.log((24 + 16) / 16) / math.log(4)  # between the prefixes, where both have the ratio of 2 ** 1.5
    assert 0 < place < 1
    stage_s = (prefill_s + decode_s) * 2**1.5
    timing = cost.timing(plan)
    assert timing.duration_s == pytest.approx(1e-5 * 104 + stage_s)
    assert cost.in_turn_iterations == 0
    # The planner says the same.
    load = cost.load(batches)
    planned = Planned(60, 1e-6 * 60 * 70, 1, 1, 0.0, 60 * 40)

    class One:
        """Everything on one group of 4 decodes."""

        def peak(self, tokens: int) -> tuple[int, int]:
            return tokens + 4, tokens

    predict = cost.predictor(load, One(), second, planned)  # type: ignore[arg-type]
    assert predict(40) == pytest.approx(timing.duration_s, rel=1e-12)
    # Without one kernel, and where nothing decodes, it is the sum.
    assert CoBatchCost(law, in_turn, async_schedule=False).timing(plan).duration_s == pytest.approx(
        1e-5 * 104 + prefill_s + decode_s
    )
    alone = IterationPlan((PrefillChunk(second, 0, (40,)),), (DecodeBatch(0),))
    assert cost.timing(alone).duration_s == pytest.approx(1e-5 * 40 + 1e-6 * 800)


def _table(skip: tuple[int, int, int, int] | None = None) -> MixedTable:
    """Parts at 1 us a chunk token and 2 us a sequence, calls at twice their sum times 1.5 beyond 8 sequences."""
    rows = [(tokens, 0, 0, 0, tokens * 1e-6) for tokens in (16, 64, 256)]
    rows += [(0, 0, count, 100, count * 2e-6) for count in (1, 8, 64)]
    rows += [(0, 0, count, 400, count * 8e-6) for count in (1, 8, 64)]
    rows += [(tokens, 32, 0, 0, tokens * 3e-6) for tokens in (16, 64, 256)]
    alone = {row[:4]: row[4] for row in rows}
    for tokens, cached, count, context in product((16, 64, 256), (0, 32), (1, 8, 64), (100, 400)):
        parts = alone[tokens, cached, 0, 0] + alone[0, 0, count, context]
        if (tokens, cached, count, context) != skip:
            rows.append((tokens, cached, count, context, parts * (3.0 if count > 8 else 2.0)))
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return MixedTable(*columns)


def test_the_fit_keeps_measured_ratios_and_predicts_what_it_leaves_out() -> None:
    data = fit_mixed(_table(), {"gpu": "bench"})
    assert data["sequences"] == [1, 8, 64]
    found = MixedAttention(data, "fit")
    assert found.ratio(64, 32, 64, 400) == pytest.approx(3.0)
    assert found.ratio(16, 0, 8, 100) == pytest.approx(2.0)
    # Of the inner points, chunks of 64 are right; 8 sequences lie between ratios of 2 and 3: sqrt(6) for 2.
    error = (math.sqrt(6.0) / 2.0 - 1.0) / 2
    assert data["errors"]["held_out"] == {
        "mean_pct": pytest.approx(100 * error, abs=0.01),
        "median_pct": pytest.approx(100 * error, abs=0.01),
        "p95_pct": pytest.approx(200 * error, abs=0.01),
        "rows": 24,
    }
    with pytest.raises(InputError, match="chunk_tokens=64, cached_tokens=32, sequences=8, context_each=400"):
        fit_mixed(_table(skip=(64, 32, 8, 400)), {"gpu": "bench"})


def test_the_packaged_grids_are_what_the_fit_gives(shared_traces: Path) -> None:
    folder = shared_traces.parent / "measurements"
    if not folder.is_dir():
        pytest.skip(f"no measurements at {folder}")
    for name, data in packaged(folder).items():
        assert json.loads((GRIDS / f"{name}.json").read_text(encoding="utf-8")) == json.loads(json.dumps(data))


def test_predictions_beside_raw_calls(shared_traces: Path) -> None:
    """Calls measured beside the kept points, from a few decodes to many."""
    file = shared_traces.parent / "measurements" / "mixed_attention_rtxpro6000_llama-3.1-8b.csv.gz"
    if not file.is_file():
        pytest.skip(f"no measurements at {file}")
    table, mixed = read_csv(file), chosen_grid("rtxpro6000", None)
    assert mixed is not None

    def call(*at: int) -> float:
        rows = np.ones(len(table.seconds), dtype=bool)
        for column, value in zip(("tokens", "cached", "sequences", "context"), at, strict=True):
            rows &= getattr(table, column) == value
        return float(table.seconds[rows][0])

    for at in ((1384, 3888, 32, 5832), (923, 0, 8, 2592), (615, 8748, 128, 1152), (273, 512, 64, 3888)):
        assert not all(value in axis for value, axis in zip(at, PACKAGED_KNOTS, strict=True))
        parts = call(at[0], at[1], 0, 0), call(0, 0, *at[2:])
        seconds = mixed.seconds(at[0], at[1], at[2], at[2] * at[3], *parts)
        assert seconds == pytest.approx(call(*at), rel=0.15)
