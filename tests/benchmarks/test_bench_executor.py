"""Speed of the executor on CPU: overhead over its own compute, and co-batching against separate batches.

`pytest tests/benchmarks/test_bench_executor.py --benchmark-only -s`: 2 ranks, 512 prefill and 16 decode tokens, a
4-layer, 1024-wide model. Everything is measured in one run, interleaved, and medians are compared.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from confsim.run.request import Request
from confsim.specs import KvConfig
from executor.config import Device, Layout, ModelConfig, Rope
from executor.runtime import ExecutedIteration, Runtime

MODEL = ModelConfig(
    family="llama",
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    rope=Rope(5e5),
)
PREFILL = 512
DECODES = 16
CONTEXT = 512
ROUNDS = 15
LIMIT = 0.15


class Stand:
    """A runtime with 16 decodes running, eight on each of two groups."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.batches = (DecodeBatch(0), DecodeBatch(1))
        self.idle = (DecodeBatch(0), DecodeBatch(1))
        self.next = 0
        for index in range(DECODES):
            group = index % 2
            request = self._add(CONTEXT)
            half = CONTEXT // 2
            runtime.run(IterationPlan((PrefillChunk(request, 0, (half, half), True, group),), self.idle))
            self.batches[group].members[request.id] = request

    def mixed(self) -> ExecutedIteration:
        """512 prefill tokens, levelled, and 16 decodes in one iteration."""
        return self.runtime.run(IterationPlan((self._chunk(),), self.batches))

    def prefill(self) -> ExecutedIteration:
        """The prefill tokens alone."""
        return self.runtime.run(IterationPlan((self._chunk(),), self.idle))

    def decode(self) -> ExecutedIteration:
        """The decodes alone."""
        return self.runtime.run(IterationPlan((), self.batches))

    def _chunk(self) -> PrefillChunk:
        return PrefillChunk(self._add(PREFILL), 0, (PREFILL // 2, PREFILL // 2), True, -1)

    def _add(self, tokens: int) -> Request:
        request = Request(self.next, 0.0, tokens)
        self.runtime.add(request.id, np.random.default_rng(self.next).integers(0, MODEL.vocab_size, tokens))
        self.next += 1
        return request


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    device = Device(launcher="processes", torch_threads=1)
    with Runtime(MODEL, Layout("xp", 2, 1), device, KvConfig(capacity_tokens=16384)) as runtime:
        yield Stand(runtime)


def median(values: list[float]) -> float:
    return statistics.median(values)


class KernelsAlone:
    """Two processes that run a rank's linear segments and attention kernels, and nothing else, when told to."""

    def __enter__(self) -> KernelsAlone:
        here = Path(__file__).resolve()
        env = {"PYTHONPATH": f"{here.parent}:{here.parents[2]}", "OMP_NUM_THREADS": "1", "PATH": ""}
        command = [sys.executable, "-c", "import test_bench_executor as bench; bench._serve_kernels()"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, bufsize=1)
            for _ in range(2)
        ]
        self.seconds()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.communicate()

    def seconds(self) -> float:
        """Of one pass by both at once, as long as the slower one took."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return max(float(process.stdout.readline()) for process in self._processes if process.stdout is not None)

    def cpu_s(self) -> float:
        """Processor seconds that both have used."""
        return _cpu_s([process.pid for process in self._processes])


def _cpu_s(pids: list[int]) -> float:
    """Processor seconds of processes with all their threads; what others do on the machine counts little."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(row[11]) + int(row[12]) for row in fields) / os.sysconf("SC_CLK_TCK")


def test_iteration_costs_little_over_its_compute(benchmark, stand: Stand) -> None:  # type: ignore[no-untyped-def]
    """Wall time of an iteration, from submit to result, against its linear and attention kernels timed alone.

    The two are measured in turn, round by round. What is over is communication, preparation, the head, messages and
    waiting for the other rank.
    """
    walls: list[float] = []
    alone: list[float] = []
    inside: list[float] = []
    pids = [process.pid for process in stand.runtime._team._processes]  # type: ignore[union-attr]
    with KernelsAlone() as kernels:
        for _ in range(2):
            stand.mixed()
            kernels.seconds()

        def once() -> None:
            done = stand.mixed()
            walls.append(done.wall_s)
            inside.append(done.linear_s + done.prefill_attention_s + done.decode_attention_s)
            alone.append(kernels.seconds())

        used = _cpu_s(pids), kernels.cpu_s()
        benchmark.pedantic(once, rounds=ROUNDS, iterations=1)
        cpu = (_cpu_s(pids) - used[0]) / (kernels.cpu_s() - used[1]) - 1
    over = median(walls) / median(alone) - 1
    benchmark.extra_info.update(wall_s=median(walls), alone_s=median(alone), over=over, cpu_over=cpu)
    print(
        f"\niteration {median(walls) * 1e3:.1f} ms, its kernels alone {median(alone) * 1e3:.1f} ms "
        f"(inside the iteration {median(inside) * 1e3:.1f}): {over:.1%} over; in processor time {cpu:.1%} over; "
        f"quickest {min(walls) * 1e3:.1f} and {min(alone) * 1e3:.1f} ms"
    )
    assert over <= LIMIT


def test_co_batching_beats_separate_batches(benchmark, stand: Stand) -> None:  # type: ignore[no-untyped-def]
    """One mixed iteration against a prefill iteration and a decode iteration, in turn."""
    for _ in range(2):
        stand.mixed(), stand.prefill(), stand.decode()
    mixed: list[float] = []
    apart: list[float] = []

    def once() -> None:
        mixed.append(stand.mixed().wall_s)
        apart.append(stand.prefill().wall_s + stand.decode().wall_s)

    benchmark.pedantic(once, rounds=ROUNDS, iterations=1)
    gain = median(apart) / median(mixed) - 1
    benchmark.extra_info.update(mixed_s=median(mixed), separate_s=median(apart), gain=gain)
    print(f"\nco-batched {median(mixed) * 1e3:.1f} ms, separate {median(apart) * 1e3:.1f} ms: {gain:.1%} longer")
    assert median(mixed) < median(apart)


def test_python_work_does_not_grow_with_context(benchmark) -> None:  # type: ignore[no-untyped-def]
    """Calls of Python functions in a decode iteration are the same at 32 and at 8,192 tokens of context."""
    counts = {context: _python_calls(context) for context in (32, 8192)}
    benchmark.pedantic(lambda: None, rounds=1)
    print(f"\nPython calls of a decode iteration by context: {counts}")
    assert counts[32] == counts[8192]


def _serve_kernels() -> None:
    import torch

    from executor.kernels.base import DecodeBatch as Decodes
    from executor.kernels.base import PrefillBatch
    from executor.kernels.sdpa import SdpaKernels
    from executor.model import EagerLinear, Transformer
    from executor.place import Place
    from executor.weights import load_weights

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    place = Place.of(0, Layout("xp", 2, 1), MODEL)
    linear = EagerLinear(Transformer(MODEL, place, load_weights(MODEL, place, torch.float32, cpu), None))
    rows = PREFILL // 2 + DECODES // 2
    ids = torch.zeros(rows, dtype=torch.int64)
    attention = torch.randn(rows, 1024)
    pages = DECODES // 2 * (CONTEXT // 16 + 2)
    keys, values = torch.randn(pages * 2, 16, 2, 64), torch.randn(pages * 2, 16, 2, 64)
    chunk = PrefillBatch((PREFILL,), (PREFILL,), torch.arange(PREFILL // 16, dtype=torch.int32)[None])
    # A decode's four KV heads are two head units of two.
    table = torch.arange(pages * 2, dtype=torch.int32).view(DECODES, -1)
    decodes = Decodes(np.full(DECODES, CONTEXT + 20), table, 16)
    q, decode_q = torch.randn(PREFILL, 8, 64), torch.randn(DECODES, 8, 64)
    kernels = SdpaKernels()

    def once() -> float:
        begin = time.perf_counter()
        linear.begin(ids, ids)
        for layer in range(MODEL.num_hidden_layers):
            kernels.prefill(q, keys, values, chunk)
            kernels.decode(decode_q, keys, values, decodes)
            if layer < MODEL.num_hidden_layers - 1:
                linear.advance(layer, attention)
        linear.finish(attention)
        return time.perf_counter() - begin

    with torch.inference_mode():
        once()
        while sys.stdin.readline():
            print(once(), flush=True)


def _python_calls(context: int) -> int:
    import sys

    import torch

    from executor.collectives import Groups
    from executor.config import Sampling
    from executor.message import Chunk, Iteration, NewRequest, RankConfig
    from executor.rank import Rank

    small = ModelConfig("llama", 64, 32, 32, 2, 2, 2, 16)
    device = Device(launcher="threads")
    config = RankConfig(0, small, Layout("xp"), device, KvConfig(capacity_tokens=2 * context + 64), "")
    rank = Rank(config, Groups(), torch.device("cpu"))
    new = (NewRequest(0, np.zeros(context, dtype=np.int32), Sampling()),)
    rank.execute(Iteration(0, (Chunk(0, 0, (context,), True, 0),), ((),), (), new))
    rank.execute(Iteration(1, (), ((0,),), (), ()))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection may run callbacks of others
    sys.setprofile(count)
    rank.execute(Iteration(2, (), ((0,),), (), ()))
    sys.setprofile(None)
    gc.enable()
    return calls
