"""The same configuration and seed give the same bytes; another seed does not."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("summary.json", "requests.parquet", "iterations.parquet")

SCRIPT = """
import sys
from pathlib import Path
import confsim
cfg = confsim.compose(sys.argv[2:])
confsim.simulate(cfg).write(Path(sys.argv[1]))
"""

BASE = (
    "trace=toolagent", "trace.limit=60", "rate=4", "arrivals=poisson", "latency=affine", "latency.noise=0.05",
    "kv.capacity_tokens=60000",
)  # fmt: skip


def digests(folder: Path, hash_seed: str, *overrides: str) -> list[str]:
    """Hashes of what a process of its own writes."""
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), *overrides],
        check=True,
        env={"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        cwd=Path(__file__).resolve().parents[2],
    )
    assert (folder / "timing.json").is_file()
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES]


@pytest.mark.parametrize("overrides", [("scheme=conflux", "policy=deadline_waterfill"), ("scheme=chunked_prefill",)])
def test_two_processes_write_the_same_bytes(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    first = digests(tmp_path / "a", "1", *BASE, *overrides, "seed=3")
    second = digests(tmp_path / "b", "2", *BASE, *overrides, "seed=3")
    assert first == second
    other = digests(tmp_path / "c", "1", *BASE, *overrides, "seed=4")
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_noise_has_a_stream_of_its_own() -> None:
    """Noise changes what is charged, not what arrives; its mean is the prediction."""
    import confsim

    calm = confsim.simulate(confsim.compose([*BASE[:-2], "kv.capacity_tokens=60000", "seed=3"]))
    noisy = confsim.simulate(confsim.compose([*BASE, "seed=3"]))
    assert calm.requests["arrival_s"].equals(noisy.requests["arrival_s"])
    assert calm.requests["prompt_tokens"].equals(noisy.requests["prompt_tokens"])
    table = noisy.iterations.to_pandas()
    ratio = (table["end_s"] - table["start_s"]) / table["predicted_s"]
    with_prefill = ratio[table["prefill_tokens"] > 0]
    assert with_prefill.std() == pytest.approx(0.05, rel=0.25)
    assert with_prefill.mean() == pytest.approx(1.0, abs=0.02)
