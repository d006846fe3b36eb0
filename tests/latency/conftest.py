"""Models, GPUs and compiled layouts that the latency tests share."""

from __future__ import annotations

import pytest

from confsim.latency.compiled import CompiledLatency
from confsim.latency.config import FittedLatency, packaged_path
from confsim.latency.profile import Profile
from confsim.specs import GpuSpec, ModelSpec

QWEN3_14B = ModelSpec(
    name="qwen3_14b",
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=17408,
    vocab_size=151936,
    qk_norm=True,
)
H100 = GpuSpec("h100_sxm", 85520809984, 3.35e12, 9.89e14, 4.5e11, 132)


@pytest.fixture(scope="session")
def model() -> ModelSpec:
    """Qwen3-14B."""
    return QWEN3_14B


@pytest.fixture(scope="session")
def gpu() -> GpuSpec:
    """H100 SXM."""
    return H100


@pytest.fixture(scope="session")
def profile() -> Profile:
    """The packaged profile of Qwen3-14B on the H100."""
    return Profile.load(packaged_path(QWEN3_14B, H100))


@pytest.fixture(scope="session", params=[(1, 1), (1, 4), (2, 4), (8, 1)], ids=lambda p: f"tp{p[0]}sp{p[1]}")
def compiled(request: pytest.FixtureRequest) -> CompiledLatency:
    """Compiled layouts of the packaged profile."""
    return FittedLatency().compile(QWEN3_14B, H100, *request.param)


@pytest.fixture(scope="session")
def spread() -> CompiledLatency:
    """Four groups of one GPU."""
    return FittedLatency().compile(QWEN3_14B, H100, 1, 4)
