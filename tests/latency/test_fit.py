"""Fitting: a law put in comes out exactly, from kernels and from whole stages; errors are counted honestly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.calibrate import measurements as m
from analysis.calibrate.attention import PrefillLaw
from analysis.calibrate.fit import fit, layouts
from analysis.calibrate.gemm import GemmSurface, Roof, agreed_steps, noise_floor
from analysis.calibrate.smooth import error_summary, isotonic, monotone
from analysis.calibrate.stages import (
    TOKENS,
    Collective,
    elementwise_bytes,
    gemm_shapes,
    missing_kv_bytes,
    transfer_curve,
)
from confsim.errors import InputError
from confsim.specs import GpuSpec, ModelSpec

SIZES = 2 ** np.arange(9, 30)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40))
def test_isotonic_is_the_closest_rising_sequence(values: list[float]) -> None:
    fitted = isotonic(np.array(values))
    assert np.all(np.diff(fitted) >= -1e-9)
    assert fitted.mean() == pytest.approx(np.mean(values), abs=1e-9)
    if np.all(np.diff(values) >= 0):
        assert fitted == pytest.approx(np.array(values))


def test_monotone_averages_replicates_on_a_log_scale() -> None:
    where, times = monotone(np.array([1.0, 1.0, 2.0, 4.0]), np.array([1.0, 4.0, 3.0, 2.9]))
    assert where.tolist() == [1.0, 2.0, 4.0]
    assert times[0] == pytest.approx(2.0)
    assert times[1] == times[2] == pytest.approx(np.sqrt(3.0 * 2.9))


def test_error_summary_counts_only_finite_rows() -> None:
    summary = error_summary(np.array([1.1, 0.9, np.nan]), np.array([1.0, 1.0, 1.0]))
    assert summary == {"mean_pct": 10.0, "median_pct": 10.0, "p95_pct": 10.0, "rows": 2}
    assert error_summary(np.zeros(0), np.zeros(0))["mean_pct"] is None


def _attention_tables(model: ModelSpec, cached: bool = True) -> dict[str, Any]:
    """Affine decode and quadratic prefill for every head count that the model needs."""
    decode, prefill = [], []
    chunks = np.unique(np.concatenate([[1], 2 ** np.arange(4, 15), np.arange(1024, 16385, 512)]))
    for degree in (1, 2, 4, 8):
        split, _ = model.split_heads(degree)
        q, kv = split.q_heads, split.kv_heads
        for sequences in (1, 2, 8, 64, 512):
            for context in (1, 16, 256, 4096, 65536):
                decode.append((q, kv, sequences, context, 1e-5 + 1e-6 * sequences + 1e-9 * kv * sequences * context))
        for tokens in chunks:
            for prefix in (0, 1024, 8192) if cached else (0,):
                prefill.append((q, kv, tokens, prefix, 1e-12 * q * (tokens + 100.0) * (prefix + tokens / 2)))
    columns = [np.array(column) for column in zip(*decode, strict=True)]
    more = [np.array(column) for column in zip(*prefill, strict=True)]
    zero = np.zeros(len(decode), dtype=np.int64)
    return {
        "decode": m.DecodeTable(*columns, zero),
        "prefill": m.PrefillTable(*more, np.zeros(len(prefill), dtype=np.int64)),
    }


def _stages(model: ModelSpec) -> m.Measurements:
    """What profiled ranks supply: whole stages, chunks behind prefixes, transfers, slowdowns."""
    pairs = layouts(model)
    tokens = np.array([1, 64, 1024, 8192, 32768])

    def stage(base: float, slope: float) -> m.StageTable:
        tp = np.repeat([pair[0] for pair in pairs], len(tokens))
        sp = np.repeat([pair[1] for pair in pairs], len(tokens))
        work = np.tile(tokens, len(pairs))
        return m.StageTable(tp, sp, work, base + slope * work / tp)

    size = np.tile(SIZES, 3)
    degree = np.repeat([2, 4, 8], len(SIZES))
    return m.Measurements(
        provenance={"source": "ranks"},
        linear=stage(2e-4, 1e-6),
        head=stage(5e-4, 2e-6),
        exchange=stage(3e-5, 1e-8),
        transfer=m.CollectiveTable(degree, size, 1e-5 + size / 3e11),
        iteration_overhead_s=0.004,
        sequence_overhead_s=1e-5,
        prefill_slowdown=1.6,
        decode_slowdown=1.2,
        **_attention_tables(model),
    )


def test_measured_stages_come_out_exactly(model: ModelSpec, gpu: GpuSpec) -> None:
    profile = fit(_stages(model), model, gpu)
    compiled = profile.compile(model, gpu, 2, 4)
    layers = model.num_hidden_layers
    assert compiled.linear_s(3000) == pytest.approx(layers * (2e-4 + 1e-6 * 3000 / 2), rel=1e-4)
    assert compiled.head_s(10) == pytest.approx(5e-4 + 2e-6 * 10 / 2, rel=1e-4)
    assert compiled.all_to_all_s(2048) == pytest.approx(layers * (3e-5 + 1e-8 * 2048 / 2), rel=1e-4)
    decode = 1e-5 + 1e-6 * 100 + 1e-9 * 4 * 300_000
    assert compiled.decode_attention_s(100, 300_000) == pytest.approx(layers * decode, rel=1e-3)
    chunk = 1e-12 * 5 * (2048 + 100) * (50_000 + 1024)
    assert compiled.prefill_attention_s(2048, 50_000) == pytest.approx(layers * chunk, rel=1e-3)
    received = 32_768 * missing_kv_bytes(model, 2, 4)
    assert compiled.kv_transfer_s(32_768) == pytest.approx(layers * (1e-5 + received / 3e11), rel=1e-3)
    assert compiled.overhead_s(10) == pytest.approx(0.0041)
    assert (compiled.prefill_slowdown, compiled.decode_slowdown) == (1.6, 1.2)
    assert profile.provenance["derived"] == []
    assert profile.errors["decode_attention"]["held_out"]["mean_pct"] < 0.01


def _kernels(model: ModelSpec, gpu: GpuSpec, cached: bool = False) -> m.Measurements:
    """Kernels by laws: a GEMM at 70% of the roof, memory at 80% of peak, collectives at a latency and a bandwidth."""
    shapes = np.array([512, 1024, 2048, 4096, 8192, 16384, 65536])
    rows = np.array([1, 16, 256, 1024, 4096, 32768])
    n, k, work = (grid.ravel() for grid in np.meshgrid(shapes, shapes, rows, indexing="ij"))
    roof = Roof(gpu.flops, gpu.memory_bandwidth, 2)
    seconds = np.array([float(roof(np.array([float(a)]), b, c)[0]) for a, b, c in zip(work, n, k, strict=True)]) / 0.7
    degree = np.repeat([2, 4, 8], len(SIZES))
    size = np.tile(SIZES, 3)
    table = m.CollectiveTable(degree, size, 1e-5 + size / 3e11)
    nbytes = 2 ** np.arange(4, 34)
    return m.Measurements(
        provenance={"source": "law"},
        gemm=m.GemmTable(work, n, k, seconds, np.zeros(len(n), dtype=np.int64)),
        elementwise=m.ElementwiseTable(nbytes, nbytes / (0.8 * gpu.memory_bandwidth)),
        collectives={"all_to_all": table, "all_reduce": table, "all_gather": table},
        **_attention_tables(model, cached),
    )


def test_kernels_are_put_together_by_shape_and_bytes(model: ModelSpec, gpu: GpuSpec) -> None:
    profile = fit(_kernels(model, gpu), model, gpu)
    compiled = profile.compile(model, gpu, 4, 2)
    tokens = 2048.0
    roof = Roof(gpu.flops, gpu.memory_bandwidth, 2)
    gemms = sum(float(roof(np.array([tokens]), n, k)[0]) for n, k in gemm_shapes(model, 4).values()) / 0.7
    memory = tokens * sum(sum(sizes) for sizes in elementwise_bytes(model, 4).values()) / (0.8 * gpu.memory_bandwidth)
    reduce = 2 * (1e-5 + tokens * 5120 * 2 / 3e11)
    once = tokens * 2 * 5120 * 2 / (0.8 * gpu.memory_bandwidth) + reduce / 2
    expected = model.num_hidden_layers * (gemms + memory + reduce) + once
    assert compiled.linear_s(2048) == pytest.approx(expected, rel=1e-3)
    assert profile.errors["gemm"]["held_out"]["mean_pct"] == 0.0
    assert profile.errors["all_to_all"]["held_out"]["mean_pct"] < 0.01
    # q/k norms, RoPE, norms, KV append and SiLU * up are about 8% of a layer on one GPU, all-reduces aside.
    alone = profile.linear[1]
    share = alone["elementwise"].y[-1] / sum(curve.y[-1] for curve in alone.values())
    assert 0.04 < share < 0.12


def test_all_to_all_bytes_replicate_heads_that_are_too_few(model: ModelSpec, gpu: GpuSpec) -> None:
    """First: n * (q + 2 * max(kv, P)) * d, second: n * q * d; each at 10 us and 300 GB/s."""
    profile = fit(_kernels(model, gpu), model, gpu)
    terms = profile.exchange[(1, 8)]
    at = int(np.searchsorted(TOKENS, 2048))
    assert terms["qkv"].y[at] == pytest.approx(1e-5 + 2048 * (40 + 2 * 8) * 128 * 2 / 3e11, rel=1e-3)
    assert terms["output"].y[at] == pytest.approx(1e-5 + 2048 * 40 * 128 * 2 / 3e11, rel=1e-3)
    pack = 4 * 2048 * ((40 + 16) + 40) * 128 * 2 / (0.8 * gpu.memory_bandwidth)
    assert terms["pack"].y[at] == pytest.approx(pack, rel=1e-3)


def test_transfer_moves_one_replica_of_what_is_missing(model: ModelSpec) -> None:
    assert missing_kv_bytes(model, 1, 4) == 2 * 6 * 128 * 2
    assert missing_kv_bytes(model, 2, 4) == 2 * 3 * 128 * 2
    assert missing_kv_bytes(model, 8, 1) == 0.0
    table = m.CollectiveTable(np.full(len(SIZES), 4), SIZES, SIZES / 3e11)
    curve = transfer_curve(model, 1, 4, Collective(table))
    assert curve.y[-1] == pytest.approx(curve.x[-1] * missing_kv_bytes(model, 1, 4) * 4 / 3 / 3e11, rel=1e-3)


def test_faster_of_two_collectives_and_held_out_error() -> None:
    slow = m.CollectiveTable(np.full(4, 2), np.array([100, 200, 300, 400]), np.array([4.0, 4.0, 4.0, 4.0]))
    steep = m.CollectiveTable(np.full(4, 2), np.array([100, 200, 300, 400]), np.array([1.0, 2.0, 5.0, 8.0]))
    both = Collective(slow, steep)
    assert both(2, np.array([100.0, 400.0])).tolist() == [1.0, 4.0]
    assert both.degrees() == {2}
    with pytest.raises(InputError, match="over 4 GPUs"):
        both(4, np.array([1.0]))


def test_noise_floor_compares_replicates_of_the_same_point() -> None:
    same = np.array([2048, 2048])
    table = m.GemmTable(np.array([16, 16]), same, same, np.array([1.1, 1.0]), np.array([0, 1]))
    assert noise_floor(table, 1024, 4096)["mean_pct"] == pytest.approx(10.0)


def test_noisy_gemms_are_smoothed_and_stay_monotone() -> None:
    rng = np.random.default_rng(7)
    rows = np.arange(1, 2000, 40)
    work, n = np.tile(rows, 9), np.repeat(np.repeat([1024, 2048, 4096], 3), len(rows))
    k = np.repeat(np.tile([1024, 2048, 4096], 3), len(rows))
    roof = Roof(1e15, 3e12, 2)
    truth = np.array([float(roof(np.array([float(a)]), b, c)[0]) for a, b, c in zip(work, n, k, strict=True)]) * 1.5
    noisy = truth * np.exp(0.1 * rng.standard_normal(len(truth)))
    surface = GemmSurface(m.GemmTable(work, n, k, noisy, np.zeros_like(n)), roof, rows.astype(np.float64))
    guess = surface.seconds(3000.0, 1500.0)
    assert np.all(np.diff(guess) >= 0)
    expected = roof(rows.astype(np.float64), 3000.0, 1500.0) * 1.5
    assert np.mean(np.abs(guess / expected - 1)) < 0.04


def _staircase(engines: int, height: float, disagree: float = 0.0) -> m.GemmTable:
    """Nine shapes of 1,024 to 4,096 that step up by `height` after 256 rows; the last engine by `disagree` less."""
    rows = np.array([64, 128, 255, 256, 257, 512, 1024])
    n, k, work, engine = (
        grid.ravel()
        for grid in np.meshgrid([1024, 2048, 4096], [1024, 2048, 4096], rows, range(engines), indexing="ij")
    )
    seconds = (1.0 + 1e-4 * work + (height - disagree * (engine == engines - 1)) * (work > 256)) * n * k * 1e-12
    return m.GemmTable(work, n, k, seconds, engine)


def test_a_step_that_engines_share_is_kept_and_nothing_is_interpolated_across_it() -> None:
    def surface(table: m.GemmTable) -> GemmSurface:
        return GemmSurface(table, lambda rows, n, k: np.full(len(rows), n * k), np.array([64.0, 256.0, 1024.0]))

    shared = surface(_staircase(3, 0.4))
    assert shared.steps.tolist() == [256.0]
    assert shared.m_grid.tolist() == [64.0, 256.0, 257.0, 1024.0]
    for n, k in ((2048.0, 2048.0), (3000.0, 1500.0)):  # measured, and between measured shapes
        before, after = shared.seconds(n, k)[1:3]
        assert before == pytest.approx(1.0256e-12 * n * k, rel=1e-9)
        assert after == pytest.approx(1.4257e-12 * n * k, rel=1e-9)
    for table in (_staircase(1, 0.4), _staircase(3, 0.4, 0.38), _staircase(3, 0.04)):
        assert surface(table).steps.size == 0  # one engine, engines that disagree, and a step within the noise
    assert agreed_steps(np.array([2.0, 3.0]), np.array([1.0, 2.0]), np.array([0, 1])).size == 0


def test_the_law_for_prefixes_recovers_itself(gpu: GpuSpec) -> None:
    heads, tokens = (
        grid.ravel().astype(np.float64) for grid in np.meshgrid([5, 10, 20, 40], [512, 1024, 2048, 4096, 16384])
    )
    unit = 4.0 * 128 * 128
    waves = tokens * heads / (128 * 132)

    def law(cached: float) -> Any:
        spread, longest = waves * (cached + tokens / 2 + 300), cached + tokens + 200
        return 1e-5 + unit / 5e12 * (spread**3 + longest**3) ** (1 / 3)

    fitted = PrefillLaw((heads, tokens, law(0.0)), 128, 132)
    assert fitted.seconds(tokens, heads) == pytest.approx(law(0.0), rel=2e-3)
    slope = (law(2e6) - law(1e6)) / 1e6
    few = waves < 1.0  # where many tiles run, the best rate measured bounds the slope
    assert fitted.cached_token_s(tokens, heads, heads)[few] == pytest.approx(slope[few], rel=2e-2)
    assert np.all(fitted.cached_token_s(tokens, heads, heads) >= slope * (1 - 2e-2))


def test_layouts_follow_the_head_rule(model: ModelSpec) -> None:
    assert (1, 8) in layouts(model) and (8, 1) in layouts(model) and (2, 4) in layouts(model)
    assert all(tp * sp <= 8 for tp, sp in layouts(model))
    from dataclasses import replace

    assert (1, 8) not in layouts(replace(model, num_attention_heads=20, num_key_value_heads=4))


def test_what_was_not_measured_is_named(model: ModelSpec, gpu: GpuSpec) -> None:
    from dataclasses import replace

    data = _stages(model)
    with pytest.raises(InputError, match="neither whole linear stages nor GEMMs"):
        fit(replace(data, linear=None), model, gpu)
    with pytest.raises(InputError, match="all-to-alls were not measured"):
        fit(replace(data, exchange=None), model, gpu)
    with pytest.raises(InputError, match="56 query and 8 KV heads"):
        fit(data, replace(model, num_attention_heads=56), gpu)


def test_split_keys_lift_the_bound_of_the_longest_tile(gpu: GpuSpec) -> None:
    heads, tokens = (grid.ravel().astype(np.float64) for grid in np.meshgrid([5, 10, 20, 40], [512, 2048, 16384]))
    waves = tokens * heads / (128 * 132)
    seconds = 1e-5 + 4.0 * 128 * 128 / 5e12 * ((waves * (tokens / 2 + 300)) ** 3 + (tokens + 200) ** 3) ** (1 / 3)
    law = PrefillLaw((heads, tokens, seconds), 128, 132)
    few, many = np.array([16.0]), np.array([16384.0])
    whole = law.cached_token_s(few, 10, 2)
    split = law.cached_token_s(few, 10, 2, split_kv=True)
    assert whole == pytest.approx(4.0 * 128 * 128 / 5e12, rel=2e-2)  # one SM walks the longest tile
    assert split == pytest.approx(whole * 2 / 132, rel=2e-2)  # two tiles, one a KV head, on 132 SMs
    both = law.cached_token_s(many, 40, 8), law.cached_token_s(many, 40, 8, split_kv=True)
    assert both[0] == pytest.approx(both[1], rel=2e-2)  # the GPU is full anyway
