"""A trace larger than what memory would take if it were read whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
SCRIPT = """
import resource, sys
from pathlib import Path
limit = 500 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from traces.progress import console_progress
from traces.readers import MooncakeReader, ReadOptions
from traces.source import FileTrace
path = sys.argv[1]
reader = MooncakeReader(Path(path), ReadOptions(progress=console_progress("reading")))
rows = sum(batch.num_rows for batch in reader.batches())
light = FileTrace("mooncake", path).load(block_ids=False)
assert len(light) == rows
status = Path("/proc/self/status").read_text()  # ru_maxrss would count the process that started this one
peak_kib = int(status.split("VmHWM:")[1].split()[0])
print(rows, peak_kib // 1024)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "big.jsonl"
    ids = ", ".join(str(100_000 + i) for i in range(28))
    tail = f'"input_length": 14000, "output_length": 300, "hash_ids": [{ids}]}}\n'
    with path.open("w") as file:
        for row in range(350_000):
            file.write(f'{{"timestamp": {row * 7}, {tail}')
    assert path.stat().st_size > 100 * MIB
    return path


def test_T18_streams_under_a_memory_limit_and_shows_its_speed(big: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(big)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows, peak_mib = map(int, done.stdout.split())
    assert rows == 350_000
    assert peak_mib < 300
    assert "reading: 350,000 rows" in done.stderr
    assert "rows/s" in done.stderr


def test_a_loaded_trace_takes_at_most_one_and_a_half_times_its_file(big: Path) -> None:
    from traces.source import FileTrace

    trace = FileTrace("mooncake", str(big)).load()
    assert trace.table.nbytes < 1.5 * big.stat().st_size
