"""What only a GPU can show; skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from executor.config import Device, ExecutorConfig, Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_partition_is_disjoint_and_keeps_its_sizes() -> None:
    """E7: sizes read back, disjointness seen by a kernel that collects SM ids."""
    from executor.cuda.green_context import PartitionError, partition

    try:
        found = partition(0, 32)
    except PartitionError as error:
        pytest.skip(f"no SM partition here: {error}")
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert found.decode_sms >= 32
    assert found.decode_sms + found.prefill_sms <= total


def test_delayed_prefill_stream_is_waited_for() -> None:
    """E8: the caller's stream sees the results of a path that sleeps first."""
    from executor.cuda.streams import StreamFork, cuda_api

    fork = StreamFork(torch.cuda.Stream(), torch.cuda.Stream(), cuda_api(), "streams", {})
    source = torch.zeros(1 << 20, device="cuda")
    out = torch.zeros(2, 1 << 20, device="cuda")

    def prefill(sms: int | None) -> None:
        torch.cuda._sleep(100_000_000)
        out[0] = source + 1

    for value in range(3):
        source.fill_(value)
        fork.run(prefill, lambda sms: out[1].copy_(source))
        assert (out[0] - out[1]).eq(1).all()
        assert out[1].eq(value).all()


def test_equivalence_with_cpu_in_bfloat16() -> None:
    """Graphs, streams and the installed kernels against one CPU rank in float32."""
    from executor.check import QWEN3, run_checks

    device = Device("cuda", "bfloat16", launcher="threads", overlap="partition", graph_tokens=(1, 8, 64))
    outcomes = run_checks(ExecutorConfig(QWEN3, device=device), (Layout("xp", 1, 1), Layout("xp", 2, 1)))
    assert [outcome for outcome in outcomes if not outcome.passed] == []


def test_gpu_script(tmp_path: Path) -> None:
    from executor.gpu_check import main

    out = tmp_path / "gpu_check.json"
    assert main(["--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["wall_s"] < 360
