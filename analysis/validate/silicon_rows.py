"""Measurements of other people's engines: the rows of aiconfigurator-core's silicon sample that are validated against.

`systems/silicon_sample.csv` of the PyPI package `aiconfigurator-core` (NVIDIA, Apache-2.0) holds measured means of the
time to first token and of the time per output token, by model, system, engine, prompt and output tokens, TP degree and
concurrency of a closed-loop load (`batch_size`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from analysis.calibrate.sources.aiconfigurator import PACKAGE, package_folder
from confsim.errors import InputError

SAMPLE = Path("systems") / "silicon_sample.csv"
FIT_TP = 4  # rows of this degree choose the constants of an engine; no other row ever does
LONG_TTFT_S = 5.0  # rows above it waited for KV or for a whole wave of others; they are reported apart
SPLITS = ("fit", "held_out", "kv_limited")


@dataclass(frozen=True)
class Measured:
    """One row: a closed loop of `concurrency` requests and the means over its requests, in seconds."""

    id: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    tp: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Selector:
    """Rows by the columns of the sample; an empty `version` or `precision` means an empty cell."""

    model_path: str
    system: str
    backend: str
    version: str | None  # None: any
    precision: str | None  # None: any

    def __call__(self, row: Mapping[str, str]) -> bool:
        """Whether a row of the sample belongs."""
        wanted = {"model_path": self.model_path, "system": self.system, "backend": self.backend}
        if self.version is not None:
            wanted["backend_version"] = self.version
        if self.precision is not None:
            wanted["precision"] = self.precision
        return all(row[column] == value for column, value in wanted.items())


@dataclass(frozen=True)
class Family:
    """Rows of one model on one GPU under one engine.

    `model` and `gpu` are choices of those config groups, `engine` a key of `silicon_engines.ENGINES`. A family with
    `constants_of` is never fitted: it takes the constants of that one, and all of its rows are held out.
    `estimator` is what the package's own estimator reaches on the same rows: MAPE of TPOT and of TTFT.
    """

    name: str
    select: Selector
    model: str
    gpu: str
    engine: str
    estimator: tuple[float, float]
    constants_of: str = ""
    kv_cache_dtype: str | None = None  # None: as the model of that name

    def split(self, row: Measured) -> str:
        """`fit`, `held_out` or `kv_limited`."""
        if row.ttft_s > LONG_TTFT_S:
            return "kv_limited"
        return "fit" if row.tp == FIT_TP and not self.constants_of else "held_out"


_QWEN, _LLAMA = "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B"
FAMILIES = (
    Family(
        "qwen_vllm", Selector(_QWEN, "h100_sxm", "vllm", "0.12.0", ""), "qwen3_32b", "h100_sxm", "vllm 0.12.0",
        (0.118, 0.394),
    ),
    Family(
        "qwen_sglang", Selector(_QWEN, "h100_sxm", "sglang", "0.5.1.post1", ""), "qwen3_32b", "h100_sxm",
        "sglang 0.5.1", (0.243, 0.842),
    ),
    Family(
        "llama_h100", Selector(_LLAMA, "h100_sxm", "vllm", "", "fp8"), "llama3_1_70b_fp8", "h100_sxm", "vllm fp8",
        (0.051, 0.493), kv_cache_dtype="bfloat16",
    ),
    Family(
        "llama_h200", Selector(_LLAMA, "h200_sxm", "vllm", "", "fp8"), "llama3_1_70b_fp8", "h200_sxm", "vllm fp8",
        (0.047, 0.376), constants_of="llama_h100",
    ),
)  # fmt: skip

# Rows of the same models that are left out, and why.
LEFT_OUT = (
    (
        Selector("nvidia/Llama-3.1-8B-Instruct-FP8", "h200_sxm", "vllm", "0.12.0", "fp8"),
        "Llama-3.1-8B-FP8 on h200_sxm: the load behind a row is not that of one replica",
    ),
    (Selector(_QWEN, "h100_sxm", "sglang", "0.5.8.post1", ""), "Qwen3-32B with sglang 0.5.8 on one GPU: no other TP"),
    (
        Selector(_QWEN, "h100_sxm", "vllm", "0.12.0", "fp8"),
        "Qwen3-32B fp8, 4,000 + 1,000 tokens: single points, some without a TP degree",
    ),
    (
        Selector(_QWEN, "h100_sxm", "sglang", "0.5.6.post2", "fp8"),
        "Qwen3-32B fp8, 4,000 + 1,000 tokens, sglang 0.5.6: single points without a TP degree",
    ),
)


@dataclass(frozen=True)
class Sample:
    """The families' rows in order of TP, prompt, output and concurrency; `left_out` counts rows by reason."""

    rows: Mapping[str, tuple[Measured, ...]]
    left_out: Mapping[str, int]
    total: int
    source: str

    def of(self, family: Family, limit: int | None = None) -> tuple[Measured, ...]:
        """Rows of a family, of each TP degree at most `limit`, those of the smallest loads first."""
        rows = self.rows[family.name]
        if limit is None:
            return rows
        kept: list[Measured] = []
        for tp in sorted({row.tp for row in rows}):
            same = sorted((row for row in rows if row.tp == tp), key=_cost)
            kept += same[:limit]
        return tuple(kept)


def _cost(row: Measured) -> tuple[int, str]:
    return row.concurrency * row.output_tokens, row.id


def sample_path() -> Path:
    """The sample in the installed package.

    Raises:
        InputError: where the package is not installed.
    """
    return package_folder("silicon") / SAMPLE


def load_sample(path: Path | None = None) -> Sample:
    """Read the sample, that of the installed package unless a path is given.

    Raises:
        InputError: where the package or the file is missing, or a column or a number is not there.
    """
    given = path is not None
    path = path or sample_path()
    source = str(path) if given else f"{PACKAGE} {metadata.version(PACKAGE)}, {SAMPLE.as_posix()}"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return _sort(list(csv.DictReader(file)), path, source)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); set silicon.csv to a sample") from error


def _sort(lines: Sequence[Mapping[str, str]], path: Path, source: str) -> Sample:
    rows: dict[str, list[Measured]] = {family.name: [] for family in FAMILIES}
    left_out = {reason: 0 for _, reason in LEFT_OUT}
    for number, line in enumerate(lines, start=2):
        try:
            family = next((family for family in FAMILIES if family.select(line)), None)
            if family is not None:
                rows[family.name].append(_measured(line))
                continue
            for select, reason in LEFT_OUT:
                left_out[reason] += select(line)
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(
                f"{path}:{number}: not a row of a silicon sample ({error!r}); use one of {PACKAGE}"
            ) from error
    return Sample({name: _ordered(found) for name, found in rows.items()}, left_out, len(lines), source)


def _ordered(rows: Iterable[Measured]) -> tuple[Measured, ...]:
    return tuple(sorted(rows, key=lambda r: (r.tp, r.prompt_tokens, r.output_tokens, r.concurrency, r.id)))


def _measured(line: Mapping[str, str]) -> Measured:
    counts = [int(float(line[column])) for column in ("isl", "osl", "batch_size", "tp_size")]
    seconds = [float(line[column]) / 1e3 for column in ("silicon_ttft_ms", "silicon_tpot_ms")]
    if min(counts) < 1 or not all(math.isfinite(value) and value > 0 for value in seconds):
        raise ValueError(f"{counts + seconds}")
    return Measured(line["id"], *counts, *seconds)
