"""How long the command line takes to answer: `pytest tests/benchmarks/test_bench_cli.py --benchmark-only`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

ROUNDS = 3
LIMIT_S = 0.5


def test_help_is_immediate(benchmark: Any) -> None:
    command = [sys.executable, "-m", "confsim", "--help"]
    benchmark.pedantic(subprocess.run, (command,), {"check": True, "capture_output": True}, rounds=ROUNDS)
    assert benchmark.stats.stats.min < LIMIT_S
