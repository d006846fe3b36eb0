"""The fidelity page: up to date, and its figures are what the profile predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.validate import fidelity

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> fidelity.IterationBench:
    """Qwen3-14B on the H100 under the default configuration."""
    return fidelity.bench()


def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    fidelity.main(["--output", str(tmp_path / "page.md")])
    written = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert written == (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8"), (
        "run python -m analysis.validate.fidelity"
    )


def test_chunks_fill_the_target(bench: fidelity.IterationBench) -> None:
    fits = bench.largest_chunk(0.050, 0, True)
    assert bench.iteration_s(1, 1, 16, fits) <= 0.050 < bench.iteration_s(1, 1, 16, fits + 1)
    assert bench.largest_chunk(0.100, 16_384, True) < bench.largest_chunk(0.100, 0, True)


def test_a_lone_prompt_is_the_sum_of_its_chunks(bench: fidelity.IterationBench) -> None:
    latency = bench.latency(1, 2)
    terms = 0.0
    for done in (0, 16_384):
        terms += latency.linear_s(8192) + latency.all_to_all_s(8192) + latency.prefill_attention_s(16_384, done)
    # The last chunk's logits; host time is hidden.
    assert bench.prefill_s(1, 2, 32_768) == pytest.approx(terms + latency.head_s(1), rel=1e-9)


def test_least_gpus_is_monotone_in_the_prompt(bench: fidelity.IterationBench) -> None:
    assert 1 <= bench.least_gpus(8192) <= bench.least_gpus(32_768) <= bench.least_gpus(65_536)
    assert bench.least_gpus(2_000_000) == 0


def test_rows_show_deviations_as_they_are() -> None:
    assert fidelity.PublishedFigure("x", 20.0, 19.0, "ms", 1).cells() == ["x", "20.0 ms", "19.0 ms", "-5%"]
    assert fidelity.PublishedFigure("x", None, 1900.0, "tokens").cells() == ["x", "–", "1,900 tokens", "–"]
