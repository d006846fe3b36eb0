"""The aiconfigurator source: tables read as they are, and predictions beside raw measured rows."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.calibrate import command
from analysis.calibrate.fit import ROWS
from analysis.calibrate.gemm import GemmSurface, Roof
from analysis.calibrate.measurements import Measurements
from analysis.calibrate.sources.aiconfigurator import Source
from analysis.calibrate.stages import gemm_shapes
from confsim.errors import InputError
from confsim.latency.config import packaged_path
from confsim.latency.profile import Profile, profile_to_text
from confsim.setup.configuration import compose
from confsim.specs import GpuSpec, ModelSpec

pytestmark = pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core")


@pytest.fixture(scope="module")
def data(model: ModelSpec, gpu: GpuSpec) -> Measurements:
    """Tables for Qwen3-14B on the H100."""
    return Source().load(model, gpu)


def _one(table: Any, replicate: int = 0, **where: int) -> float:
    rows = np.ones(len(table.seconds), dtype=bool)
    if hasattr(table, "replicate"):
        rows &= table.replicate == replicate
    for column, value in where.items():
        rows &= getattr(table, column) == value
    assert rows.sum() == 1, (where, rows.sum())
    return float(table.seconds[rows][0])


def test_raw_rows_are_read_in_seconds(data: Measurements) -> None:
    """Values as vLLM 0.24.0 on the H100 was measured; milliseconds in the tables."""
    assert data.gemm is not None
    assert _one(data.gemm, m=16, n=7168, k=5120) == pytest.approx(27.509e-6, rel=1e-3)
    assert _one(data.decode, q_heads=40, kv_heads=8, sequences=16, context=8192) == pytest.approx(211.02e-6, rel=1e-3)
    assert _one(data.prefill, q_heads=10, kv_heads=2, tokens=8192) == pytest.approx(309.7e-6, rel=1e-3)
    assert set(np.unique(data.prefill.cached).tolist()) == {0}
    exchange = data.collectives["all_to_all"]
    # message_size counts elements: 268,435,456 halves are 512 MiB.
    rows = (exchange.degree == 4) & (exchange.bytes == 2**29)
    assert exchange.seconds[rows].min() == pytest.approx(1.21e-3, rel=0.02)


def test_predictions_beside_raw_rows(data: Measurements, profile: Profile, model: ModelSpec, gpu: GpuSpec) -> None:
    compiled = profile.compile(model, gpu, 1, 4)
    layers = model.num_hidden_layers
    for sequences, context in ((1, 32768), (16, 8192), (64, 1024), (128, 2048), (4, 16384)):
        raw = _one(data.decode, q_heads=40, kv_heads=8, sequences=sequences, context=context)
        assert compiled.decode_attention_s(sequences, sequences * context) == pytest.approx(layers * raw, rel=0.02)
    for tokens in (512, 2048, 8192, 16384):
        raw = _one(data.prefill, q_heads=10, kv_heads=2, tokens=tokens)
        assert compiled.prefill_attention_s(tokens, 0) == pytest.approx(layers * raw, rel=1e-3)
    assert data.gemm is not None
    for tokens in (1, 16, 256, 1024, 4096):
        raws = [_one(data.gemm, replicate, m=tokens, n=7168, k=5120) for replicate in range(3)]
        curve = profile.linear[1]["qkv"]
        assert min(raws) * 0.9 < float(curve(np.array([float(tokens)]))[0]) < max(raws) * 1.1


def test_measured_steps_of_gemms_are_kept(data: Measurements, model: ModelSpec, gpu: GpuSpec) -> None:
    """From 1,024 to 1,025 rows; after the step the level is that of the plateau, not of its first, slowest row."""
    assert data.gemm is not None
    surface = GemmSurface(data.gemm, Roof(gpu.flops, gpu.memory_bandwidth, 2), ROWS)
    at = int(np.searchsorted(surface.m_grid, 1024.0))
    assert surface.m_grid[at : at + 2].tolist() == [1024.0, 1025.0]
    for n, k, least in ((5120, 5120, 1.35), (10240, 5120, 1.25), (5120, 16384, 1.2)):
        before, after = surface.seconds(n, k)[at : at + 2]
        raw = [_one(data.gemm, replicate, m=1024, n=n, k=k) for replicate in range(3)]
        assert min(raw) * 0.95 < before < max(raw)
        assert least < after / before < 1.6
        assert after < max(_one(data.gemm, replicate, m=1025, n=n, k=k) for replicate in range(3))
    before, after = surface.seconds(7168, 5120)[at : at + 2]
    assert after / before < 1.002
    assert np.all(np.diff(surface.seconds(5120, 5120)) >= 0.0)


def test_the_packaged_profile_is_what_the_fit_gives(model: ModelSpec, gpu: GpuSpec, profile: Profile) -> None:
    assert packaged_path(model, gpu).read_text() == profile_to_text(profile)
    if metadata.version("aiconfigurator-core") != profile.provenance["package_version"]:
        pytest.skip("another version of aiconfigurator-core is installed")
    again = command.fit_from("aiconfigurator", model, gpu)
    for tp, terms in profile.linear.items():
        for name, curve in terms.items():
            assert again.linear[tp][name].y == pytest.approx(curve.y, rel=1e-3), (tp, name)
    for degree, table in profile.prefill.items():
        assert again.prefill[degree].own.y == pytest.approx(table.own.y, rel=1e-3)
        assert again.prefill[degree].cached.y == pytest.approx(table.cached.y, rel=1e-2)
    for tp, decode in profile.decode.items():
        assert np.allclose(again.decode[tp].seconds, decode.seconds, rtol=1e-3)
    assert again.provenance["tables"] == profile.provenance["tables"]


def test_unmeasured_shapes_lie_between_their_neighbours(profile: Profile, model: ModelSpec) -> None:
    n, k = gemm_shapes(model, 1)["gate_up"]
    assert (n, k) == (34816, 5120)
    curve = profile.linear[1]["gate_up"]
    rate = 2.0 * 4096 * n * k / float(curve(np.array([4096.0]))[0])
    assert 0.6e15 < rate < 0.9e15


def test_command_writes_a_profile_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    assert command.command(compose([f"output={path}", "model=llama3_1_8b"], command="fit")) == 0
    out = capsys.readouterr().out
    assert "decode_attention" in out and f"latency.profile={path}" in out
    assert Profile.load(path).name == "llama3_1_8b"


def test_what_the_source_lacks_is_one_line(model: ModelSpec) -> None:
    from dataclasses import replace

    with pytest.raises(InputError, match="use one of aiconfigurator"):
        command.fit_from("guess", model, GpuSpec("h100_sxm", 1, 1.0, 1.0, 1.0, 1))
    with pytest.raises(InputError, match="set up for h100_sxm"):
        Source().load(model, GpuSpec("b200_sxm", 1, 1.0, 1.0, 1.0, 1))
    with pytest.raises(InputError, match="gemm_dtype=fp8"):
        Source().load(replace(model, gemm_dtype="fp8"), GpuSpec("a100_sxm", 1, 2e12, 3e14, 3e11, 108))
