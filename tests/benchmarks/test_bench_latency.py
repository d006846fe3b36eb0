"""What a scheme pays for a prediction: about a tenth to half a microsecond a term."""

from __future__ import annotations

import pytest

from confsim.latency.compiled import CompiledLatency
from confsim.latency.config import FittedLatency
from confsim.specs import GpuSpec, ModelSpec

CALLS = 1000


@pytest.fixture(scope="module")
def compiled() -> CompiledLatency:
    """Qwen3-14B on four H100."""
    model = ModelSpec("qwen3_14b", 5120, 40, 40, 8, 128, 17408, 151936, qk_norm=True)
    gpu = GpuSpec("h100_sxm", 85520809984, 3.35e12, 9.89e14, 4.5e11, 132)
    return FittedLatency().compile(model, gpu, 1, 4)


@pytest.mark.parametrize("term", ["linear_s", "all_to_all_s", "head_s", "overhead_s", "kv_transfer_s"])
def test_bench_one_argument(benchmark, compiled: CompiledLatency, term: str) -> None:  # type: ignore[no-untyped-def]
    call = getattr(compiled, term)

    def many() -> float:
        total = 0.0
        for tokens in range(CALLS):
            total += call(tokens)
        return total

    assert benchmark(many) > 0.0
    assert benchmark.stats["median"] / CALLS < 2e-6


@pytest.mark.parametrize("term", ["prefill_attention_s", "decode_attention_s", "decode_attention_line"])
def test_bench_two_arguments(benchmark, compiled: CompiledLatency, term: str) -> None:  # type: ignore[no-untyped-def]
    call = getattr(compiled, term)

    def many() -> None:
        for step in range(CALLS):
            call(1 + step % 64, 100_000 + step)

    benchmark(many)
    assert benchmark.stats["median"] / CALLS < 3e-6


def test_bench_compile(benchmark) -> None:  # type: ignore[no-untyped-def]
    model = ModelSpec("qwen3_14b", 5120, 40, 40, 8, 128, 17408, 151936, qk_norm=True)
    gpu = GpuSpec("h100_sxm", 85520809984, 3.35e12, 9.89e14, 4.5e11, 132)
    source = FittedLatency()
    assert benchmark(source.compile, model, gpu, 1, 4).sp == 4
