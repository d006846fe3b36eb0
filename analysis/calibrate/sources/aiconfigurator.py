"""Source `aiconfigurator`: kernel measurements shipped as Parquet in the PyPI package `aiconfigurator-core`.

NVIDIA, Apache-2.0. Tables by GPU, operator and engine version; latencies in milliseconds. Of several engines those
that call the same kernel are taken together as replicates.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analysis.calibrate.measurements import (
    CollectiveTable,
    DecodeTable,
    ElementwiseTable,
    GemmTable,
    Measurements,
    PrefillTable,
)
from analysis.calibrate.sources.base import MeasurementSource
from confsim.errors import InputError
from confsim.specs import GpuSpec, ModelSpec

PACKAGE = "aiconfigurator-core"
MS = 1e-3
# Engine versions whose tables are read, per GPU: those with the finest grids, one per engine.
ENGINES = {
    "h100_sxm": {"gemm": ("vllm/0.24.0", "sglang/0.5.14", "trtllm/1.3.0rc20"), "attention": ("vllm/0.24.0",)},
    "h200_sxm": {"gemm": ("vllm/0.24.0", "sglang/0.5.14", "trtllm/1.3.0rc20"), "attention": ("vllm/0.24.0",)},
    "a100_sxm": {"gemm": ("vllm/0.14.0", "sglang/0.5.10", "trtllm/1.0.0"), "attention": ("vllm/0.14.0",)},
}
# Every attention table of the same kernel (FlashAttention 3 on Hopper, 2 on Ampere); the first is fitted, the others
# tell how far replicates differ.
REPLICATES = {"h100_sxm": ("sglang/0.5.14",), "h200_sxm": ("sglang/0.5.14",), "a100_sxm": ("sglang/0.5.10",)}
ALL_REDUCE = {"h100_sxm": "vllm/0.24.0", "h200_sxm": "vllm/0.24.0", "a100_sxm": "vllm/0.14.0"}
QUANTIZE = "vllm/0.24.0"
# NCCL 2.23 is left out: up to 50% slower between 1 and 4 MiB than the later versions, which agree.
NCCL = {"h100_sxm": ("2.27.3", "2.29.2"), "h200_sxm": ("2.26.2", "2.29.2"), "a100_sxm": ("2.27.3",)}


def package_folder(source: str) -> Path:
    """The folder of the installed package, for what a user asked for as `source`.

    Raises:
        InputError: where the package is not installed.
    """
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise InputError(f"source={source} needs the package {PACKAGE}: pip install 'confsim[calibrate]'")
    return Path(spec.origin).parent


def data_root() -> Path:
    """The folder of tables by GPU.

    Raises:
        InputError: where the package is not installed.
    """
    return package_folder("aiconfigurator") / "systems" / "data"


class Source(MeasurementSource):
    """The tables of the installed package."""

    def load(self, model: ModelSpec, gpu: GpuSpec) -> Measurements:
        """All tables of this source for the model on the GPU.

        Raises:
            InputError: where the package is missing, or has no tables of the GPU or of the model's dtypes.
        """
        root = data_root()
        if gpu.name not in ENGINES:
            raise InputError(f"gpu={gpu.name}: source=aiconfigurator is set up for {', '.join(ENGINES)}")
        used: dict[str, Any] = {}
        reader = _Reader(root / gpu.name, used)
        same = model.gemm_dtype in (None, model.torch_dtype)
        return Measurements(
            provenance={
                "source": "aiconfigurator",
                "package": PACKAGE,
                "package_version": metadata.version(PACKAGE),
                "licence": "Apache-2.0",
                "tables": used,
            },
            gemm=reader.gemm(ENGINES[gpu.name]["gemm"], model.gemm_dtype or model.torch_dtype),
            head_gemm=None if same else reader.gemm(ENGINES[gpu.name]["gemm"], model.torch_dtype),
            elementwise=_elementwise(root, gpu, used),
            collectives=reader.collectives(ALL_REDUCE[gpu.name]),
            decode=reader.decode(ENGINES[gpu.name]["attention"] + REPLICATES[gpu.name], model),
            prefill=reader.prefill(ENGINES[gpu.name]["attention"] + REPLICATES[gpu.name], model),
        )


class _Reader:
    """Reads and filters the tables of one GPU, noting each file and the rows taken from it."""

    def __init__(self, root: Path, used: dict[str, Any]) -> None:
        self.root = root
        self.used = used

    def table(self, name: str, **equal: Any) -> pa.Table:
        path = self.root / name
        if not path.is_file():
            raise InputError(f"{PACKAGE} has no table {path}: its layout changed, use the version in constraints.txt")
        table = pq.read_table(path)
        for column, value in equal.items():
            if column in table.column_names:
                table = table.filter(pc.equal(table[column], value))
        self.used[f"{self.root.name}/{name}"] = self.used.get(f"{self.root.name}/{name}", 0) + table.num_rows
        return table

    def gemm(self, engines: tuple[str, ...], dtype: str) -> GemmTable:
        engines = engines if dtype == "bfloat16" else engines[:1]  # other dtypes: each engine has its own kernel
        parts = [self.table(f"gemm/{engine}/gemm_perf.parquet", gemm_dtype=dtype) for engine in engines]
        if not sum(part.num_rows for part in parts):
            raise InputError(f"model.gemm_dtype={dtype}: {PACKAGE} has no GEMM measured in it on {self.root.name}")
        m, n, k = _stack(parts, ("m", "n", "k"))
        return GemmTable(m, n, k, *_times(parts))

    def decode(self, engines: tuple[str, ...], model: ModelSpec) -> DecodeTable:
        parts = [self._attention("generation", engine, model) for engine in engines]
        q_heads, kv_heads, sequences, isl, step = _stack(
            parts, ("num_heads", "num_key_value_heads", "batch_size", "isl", "step")
        )
        return DecodeTable(q_heads, kv_heads, sequences, isl + step, *_times(parts))

    def prefill(self, engines: tuple[str, ...], model: ModelSpec) -> PrefillTable:
        parts = [self._attention("context", engine, model) for engine in engines]
        parts = [part.filter(pc.equal(part["batch_size"], 1)) for part in parts]
        q_heads, kv_heads, tokens, cached = _stack(parts, ("num_heads", "num_key_value_heads", "isl", "step"))
        return PrefillTable(q_heads, kv_heads, tokens, cached, *_times(parts))

    def _attention(self, kind: str, engine: str, model: ModelSpec) -> pa.Table:
        dtype = model.kv_cache_dtype or model.torch_dtype
        table = self.table(
            f"attention/{engine}/{kind}_attention_perf.parquet",
            head_dim=model.head_dim,
            window_size=0,
            kv_cache_dtype=dtype,
        )
        # Queries in fp8 are another kernel; keep bf16 queries where an engine measured both.
        if "attn_dtype" in table.column_names and pc.any(pc.equal(table["attn_dtype"], model.torch_dtype)).as_py():
            table = table.filter(pc.equal(table["attn_dtype"], model.torch_dtype))
        return table

    def collectives(self, engine: str) -> dict[str, CollectiveTable]:
        versions = NCCL[self.root.name]
        parts = [self.table(f"comm/nccl/{version}/nccl_perf.parquet") for version in versions]
        nccl = {name: _nccl(parts, operation) for name, operation in _OPERATIONS.items()}
        custom = self.table(f"comm/{engine}/custom_allreduce_perf.parquet", allreduce_dtype="bfloat16")
        custom = custom.filter(pc.match_substring(custom["kernel_source"], "graph"))
        size = _ints(custom["message_size"]) * 2
        custom_table = CollectiveTable(_ints(custom["num_gpus"]), size, _floats(custom["latency"]) * MS)
        return {**nccl, "custom_all_reduce": custom_table}


_OPERATIONS = {"all_to_all": "alltoall", "all_reduce": "all_reduce", "all_gather": "all_gather"}


def _nccl(parts: list[pa.Table], operation: str) -> CollectiveTable:
    """Rows of one operation; `message_size` counts elements of the whole per-rank buffer."""
    degree, size, seconds = [], [], []
    for part in parts:
        rows = part.filter(pc.equal(part["op_name"], operation))
        itemsize = np.where(np.asarray(rows["nccl_dtype"].to_pylist()) == "half", 2, 1)
        degree.append(_ints(rows["num_gpus"]))
        size.append(_ints(rows["message_size"]) * itemsize)
        seconds.append(_floats(rows["latency"]) * MS)
    return CollectiveTable(np.concatenate(degree), np.concatenate(size), np.concatenate(seconds))


def _elementwise(root: Path, gpu: GpuSpec, used: dict[str, Any]) -> ElementwiseTable:
    """The activation quantisation kernel: reads 2 bytes and writes 1 an element, at the bandwidth such kernels reach.

    Where a GPU has none measured (A100), that of the H100 with its bandwidth part scaled by peak bandwidth: derived.
    """
    name = f"quantize/{QUANTIZE}/scale_matrix_perf.parquet"
    own = (root / gpu.name / name).is_file()
    table = _Reader(root / (gpu.name if own else "h100_sxm"), used).table(name, quant_dtype="fp8")
    size = _ints(table["m"]) * _ints(table["k"]) * 3
    seconds = _floats(table["latency"]) * MS
    if not own:
        used[f"{gpu.name}/elementwise"] = "derived from h100_sxm by the ratio of peak bandwidths"
        floor = float(seconds.min())
        seconds = floor + (seconds - floor) * (3.35e12 / gpu.memory_bandwidth)
    return ElementwiseTable(size, seconds)


def _ints(column: pa.ChunkedArray) -> Any:
    return column.to_numpy().astype(np.int64)


def _floats(column: pa.ChunkedArray) -> Any:
    return column.to_numpy().astype(np.float64)


def _stack(parts: list[pa.Table], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(np.concatenate([_ints(part[name]) for part in parts]) for name in names)


def _times(parts: list[pa.Table]) -> tuple[Any, Any]:
    """Seconds, and the number of the engine that measured each row."""
    seconds = np.concatenate([_floats(part["latency"]) for part in parts]) * MS
    replicate = np.concatenate([np.full(part.num_rows, index, dtype=np.int64) for index, part in enumerate(parts)])
    return seconds, replicate
