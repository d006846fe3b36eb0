"""One script for one GPU, under six minutes: `python -m executor.gpu_check --out FILE` (`--device cpu` tries it out).

Equivalence with a CPU rank; the two attention paths alone and together, with and without an SM partition; linear
segments eager and as CUDA graphs; iteration times of a small profile. Writes JSON; a part that fails says why and the
others go on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from confsim.outcome.result import write_json
from confsim.specs import KvConfig
from executor.check import QWEN3, run_checks, summarise
from executor.collectives import Groups
from executor.config import Device, ExecutorConfig, Layout, ModelConfig, Rope
from executor.fork import Fork, Sms, ThreadFork
from executor.kernels import choose, page_tokens
from executor.kernels.base import AttentionKernels, DecodeBatch, PrefillBatch
from executor.kv import PagePool, UnitPool
from executor.model import EagerLinear, Linear, Transformer
from executor.place import Place
from executor.probe import Probe
from executor.runtime import Runtime
from executor.weights import load_weights

QWEN3_14B = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    rope=Rope(1e6),
)


@dataclass(frozen=True)
class Sizes:
    """What is measured: `decodes` of `context` tokens each beside a chunk of `chunk` behind `prefix` tokens."""

    model: ModelConfig
    decodes: int
    context: int
    chunk: int
    prefix: int
    sp: int  # the chunk is computed on 1/sp of the heads
    linear_tokens: tuple[int, ...]
    decode_sms: tuple[int, ...]
    iterations: tuple[tuple[int, int, int], ...]  # prefill tokens, decodes, context
    repeats: int


GPU_SIZES = Sizes(
    replace(QWEN3_14B, num_hidden_layers=4, vocab_size=32768),  # random weights are drawn on the host
    decodes=16,
    context=8192,
    chunk=1024,
    prefix=31744,
    sp=4,
    linear_tokens=(1, 16, 64, 256, 1024, 2048),
    decode_sms=(8, 16, 24, 32, 48, 64),
    iterations=((0, 16, 8192), (1024, 0, 0), (1024, 16, 8192), (2048, 16, 8192), (256, 4, 1024)),
    repeats=15,
)
CPU_SIZES = Sizes(
    QWEN3,
    decodes=4,
    context=64,
    chunk=32,
    prefix=64,
    sp=2,
    linear_tokens=(1, 16),
    decode_sms=(),
    iterations=((0, 2, 32), (16, 0, 0), (16, 2, 32)),
    repeats=3,
)


class Bench:
    """Medians of seconds on a device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats

    def seconds(self, work: Callable[[], object]) -> float:
        """Median over `repeats` runs after two that warm up."""
        for _ in range(2):
            work()
        return statistics.median(self._once(work) for _ in range(self.repeats))

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class AttentionPair:
    """A decode batch and a prefill chunk of one layer, on separate KV, as callables."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype, kernels: AttentionKernels, page: int):
        model, self.kernels = sizes.model, kernels
        q, kv, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        spread = max(1, kv // sizes.sp)
        pages = -(-sizes.context // page) * sizes.decodes
        prompt = sizes.prefix + sizes.chunk
        self.decode_pool = UnitPool(PagePool(pages, page, page), (1, kv, dim), dtype, device)
        self.prefill_pool = UnitPool(PagePool(-(-prompt // page), page, page), (1, spread, dim), dtype, device)
        table = torch.arange(pages, dtype=torch.int32, device=device).view(sizes.decodes, -1)
        self.decodes = DecodeBatch(np.full(sizes.decodes, sizes.context), table, page)
        chunk_table = torch.arange(-(-prompt // page), dtype=torch.int32, device=device)[None]
        self.chunk = PrefillBatch((sizes.chunk,), (prompt,), chunk_table)
        self.decode_q = torch.randn(sizes.decodes, q, dim, dtype=dtype, device=device)
        self.chunk_q = torch.randn(sizes.chunk, q // sizes.sp, dim, dtype=dtype, device=device)
        self.decode_bytes = 2 * sizes.decodes * sizes.context * kv * dim * self.decode_q.element_size()
        self.chunk_flops = 4 * dim * (q // sizes.sp) * sizes.chunk * (sizes.prefix + sizes.chunk / 2)

    def decode(self, sms: Sms = None) -> None:
        """Decode attention of a layer."""
        pool = self.decode_pool
        self.kernels.decode(self.decode_q, pool.keys[0], pool.values[0], self.decodes, sms)

    def prefill(self, sms: Sms = None) -> None:
        """Prefill attention of a layer, this rank's share of the heads."""
        pool = self.prefill_pool
        self.kernels.prefill(self.chunk_q, pool.keys[0], pool.values[0], self.chunk, sms)


def measure_equivalence(settings: Device) -> dict[str, Any]:
    """The suite of `confsim check`; several ranks share the GPU as threads of one process."""
    config = ExecutorConfig(QWEN3, device=replace(settings, launcher="threads"))
    layouts = (Layout("xp", 1, 1), Layout("xp", 2, 1), Layout("xp", 4, 1), Layout("sp", 2, 1), Layout("mux", 1, 1))
    return {**summarise(run_checks(config, layouts), config), "in_process": True}


def measure_overlap(settings: Device, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Decode bandwidth and prefill rate alone and together, by fork; in a partition by its SM counts."""
    kernels, page = choose(settings), page_tokens(settings, 16)
    pair = AttentionPair(sizes, device, getattr(torch, settings.dtype), kernels, page)
    bench = Bench(device, sizes.repeats)
    decode_alone, prefill_alone = bench.seconds(pair.decode), bench.seconds(pair.prefill)
    rows = [_overlap_row(bench, pair, name, fork) for name, fork in _forks(settings, sizes)]
    return {
        "kernels": f"{kernels.name} {kernels.version}",
        "decode_alone_s": decode_alone,
        "decode_alone_bytes_per_s": pair.decode_bytes / decode_alone,
        "prefill_alone_s": prefill_alone,
        "prefill_alone_flops_per_s": pair.chunk_flops / prefill_alone,
        "in_turn_s": decode_alone + prefill_alone,
        "together": rows,
    }


def measure_graphs(settings: Device, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Seconds of all linear segments of the model by tokens, eager and replayed from graphs."""
    model = _transformer(sizes.model, settings, device)
    graphed = _graphed(model, sizes.linear_tokens, device)
    bench = Bench(device, sizes.repeats)
    rows = []
    for tokens in sizes.linear_tokens:
        passes = [_linear_pass(side, model, tokens, device) for side in (EagerLinear(model), graphed)]
        with torch.inference_mode():
            eager, graph = (bench.seconds(run) for run in passes)
        rows.append({"tokens": tokens, "eager_s": eager, "graph_s": graph})
    return {"layers": sizes.model.num_hidden_layers, "rows": rows, "captured": device.type == "cuda"}


def measure_iterations(settings: Device, sizes: Sizes) -> dict[str, Any]:
    """Whole iterations on one rank: prefill tokens beside decodes of some context."""
    rows = []
    device = replace(settings, launcher="threads", graph_tokens=sizes.linear_tokens)
    tokens = max(count * context for _, count, context in sizes.iterations) + 4096
    with Runtime(sizes.model, Layout("xp"), device, KvConfig(capacity_tokens=2 * tokens)) as runtime:
        facts = runtime.ready[0].facts
        probe = Probe(runtime)
        for prefill, decodes, context in sizes.iterations:
            rows.append(_iteration_row(probe, prefill, decodes, context, sizes.repeats))
    return {"facts": facts, "rows": rows}


def run(settings: Device, sizes: Sizes, limit_s: float) -> dict[str, Any]:
    """All parts; those that would start after the limit are left out."""
    device = torch.device(settings.kind)
    begin = time.monotonic()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "equivalence": lambda: measure_equivalence(settings),
        "overlap": lambda: measure_overlap(settings, sizes, device),
        "graphs": lambda: measure_graphs(settings, sizes, device),
        "iterations": lambda: measure_iterations(settings, sizes),
    }
    result: dict[str, Any] = {
        "kind": "gpu_check",
        "device": torch.cuda.get_device_name() if settings.kind == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": settings.dtype,
        "left_out": [],
    }
    for name, part in parts.items():
        if time.monotonic() - begin > limit_s:
            result["left_out"].append(name)
            continue
        started = time.monotonic()
        result[name] = _guarded(part)
        result[name]["part_s"] = time.monotonic() - started
    result["wall_s"] = time.monotonic() - begin
    return result


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 if a part failed or a case of the equivalence did."""
    parser = argparse.ArgumentParser(prog="python -m executor.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--limit-s", type=float, default=270.0, help="start no part after so many seconds")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: PyTorch sees no CUDA device; --device cpu tries the script out", file=sys.stderr)
        return 2
    is_gpu = given.device == "cuda"
    settings = Device("cuda", "bfloat16", overlap="partition") if is_gpu else Device()
    result = run(settings, GPU_SIZES if is_gpu else CPU_SIZES, given.limit_s)
    write_json(given.out, result)
    failed = [name for name, part in result.items() if isinstance(part, dict) and "error" in part]
    wrong = result.get("equivalence", {}).get("failed", 0)
    print(f"{result['device']}: {result['wall_s']:.0f} s, written to {given.out}")
    print(f"equivalence: {wrong} cases failed; parts that failed: {', '.join(failed) or 'none'}")
    return 1 if failed or wrong else 0


def _guarded(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "details": traceback.format_exc()}


def _forks(settings: Device, sizes: Sizes) -> list[tuple[dict[str, Any], Fork | str]]:
    """Forks to compare, each with what is said about it; a text in place of one that this machine lacks."""
    if settings.kind == "cpu":
        return [({"fork": "turn"}, Fork()), ({"fork": "threads"}, ThreadFork())]
    from executor.cuda.green_context import PartitionError, partition
    from executor.cuda.streams import StreamFork, cuda_api, partition_fork

    api = cuda_api()
    plain = StreamFork(torch.cuda.Stream(), torch.cuda.Stream(), api, "streams", {})
    forks: list[tuple[dict[str, Any], Fork | str]] = [({"fork": "turn"}, Fork()), ({"fork": "streams"}, plain)]
    for count in sizes.decode_sms:
        said: dict[str, Any] = {"fork": "partition", "asked_decode_sms": count}
        try:
            found = partition(0, count)
        except PartitionError as error:
            forks.append((said, str(error)))
            continue
        fork = partition_fork(found, api)
        forks.append(({**said, **found.facts}, fork))
    return forks


def _overlap_row(bench: Bench, pair: AttentionPair, said: dict[str, Any], fork: Fork | str) -> dict[str, Any]:
    if isinstance(fork, str):
        return {**said, "unavailable": fork}

    def nothing(sms: Sms) -> None:
        return None

    with torch.inference_mode():
        decode = bench.seconds(lambda: fork.run(nothing, pair.decode))
        prefill = bench.seconds(lambda: fork.run(pair.prefill, nothing))
        both = bench.seconds(lambda: fork.run(pair.prefill, pair.decode))
    fork.close()
    return {
        **said,
        "decode_s": decode,
        "decode_bytes_per_s": pair.decode_bytes / decode,
        "prefill_s": prefill,
        "prefill_flops_per_s": pair.chunk_flops / prefill,
        "both_s": both,
    }


def _transformer(config: ModelConfig, settings: Device, device: torch.device) -> Transformer:
    place = Place.of(0, Layout("tp"), config)
    shape = replace(config, vocab_size=1024)  # the linear segments do not depend on it
    return Transformer(shape, place, load_weights(shape, place, getattr(torch, settings.dtype), device), None)


def _graphed(model: Transformer, sizes: tuple[int, ...], device: torch.device) -> Linear:
    from executor.cuda.graphs import GraphedLinear, graphed_linear

    if device.type == "cuda":
        return graphed_linear(model, sizes, device, Groups().counts)
    return GraphedLinear(model, sizes, lambda segment: segment, device)


def _linear_pass(side: Linear, model: Transformer, tokens: int, device: torch.device) -> Callable[[], None]:
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    width = model.place.local.q_heads * model.config.head_dim
    attention = torch.randn(tokens, width, dtype=model.dtype, device=device)

    def run_pass() -> None:
        side.begin(ids, ids)
        for layer in range(model.config.num_hidden_layers - 1):
            side.advance(layer, attention)
        side.finish(attention)

    return run_pass


def _iteration_row(probe: Probe, prefill: int, decodes: int, context: int, repeats: int) -> dict[str, Any]:
    """Decodes are set up by prefilling them; then the mixed iteration is repeated with a fresh chunk each time."""
    members = [probe.request(context) for _ in range(decodes)]
    for request in members:
        probe.run([(request, context, 0)])
    done = []
    for _ in range(repeats + 2):
        chunks = [probe.request(prefill)] if prefill else []
        done.append(probe.run([(request, prefill, -1) for request in chunks], [members]))
        probe.drop(*chunks)
    probe.drop(*members)
    probe.flush()
    middle = sorted(done[2:], key=lambda item: item.duration_s)[repeats // 2]
    return {
        "prefill_tokens": prefill,
        "decodes": decodes,
        "context": context,
        "duration_s": middle.duration_s,
        **middle.ranks[0].stages,
        "overlap": middle.overlap,
        "overlap_valid": middle.overlap_valid,
        "busy_share": middle.ranks[0].busy_share,
        "launch_s_per_layer": middle.ranks[0].launch_s_per_layer,
    }


if __name__ == "__main__":
    sys.exit(main())
