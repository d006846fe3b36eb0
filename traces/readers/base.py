"""What the readers share: the protocol, options, text by chunks of lines, and checked columns."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.errors import InputError
from traces.readers.sniff import is_gzip
from traces.trace import SCHEMA

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Progress = Callable[[int, float, float], None]  # rows so far, rows per second, share of the file's bytes read

CHUNK_BYTES = 1 << 20  # text parsed at once; Python integers take about six times their text
NS = 1_000_000_000
TIME_LIMIT_NS = 1 << 62
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class ReadOptions:
    """How to read. `zero_output` and `block_mismatch` are `error` or `drop` (the row; the row's block ids)."""

    block_ids: bool = True
    zero_output: str = "error"
    block_mismatch: str = "error"
    progress: Progress | None = None


@dataclass
class Counts:
    """What a reader met: rows in the file, and what it dropped or could not resolve."""

    read: int = 0
    dropped_zero_output: int = 0
    dropped_block_ids: int = 0
    orphans: int = 0
    extra: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, int]:
        """Plain data for the provenance."""
        return {
            "read": self.read,
            "dropped_zero_output": self.dropped_zero_output,
            "dropped_block_ids": self.dropped_block_ids,
            "orphans": self.orphans,
            **self.extra,
        }


class Reader(Protocol):
    """Streams a file of one format as record batches of `SCHEMA`, in file order and bounded memory.

    `arrival_s` counts from the file's first row (a row out of order can be negative). `counts` and `late_parents`
    (request id of a child that precedes its parent in the file, request id of that parent) are complete when
    `batches` is exhausted. Raises `InputError` that names file and line.
    """

    counts: Counts
    late_parents: list[tuple[int, int]]

    @property
    def block_tokens(self) -> int:
        """Tokens a prefix block (0: the format has no ids)."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as record batches."""


class Chunk(NamedTuple):
    """Lines of a text file; `lines[0]` is line number `first` (from 1)."""

    first: int
    lines: list[str]

    def line_of(self, row: int) -> int:
        """Line number of the row-th line that is not blank."""
        numbers = [self.first + i for i, line in enumerate(self.lines) if not line.isspace()]
        return numbers[row]


class Meter:
    """Reports rows per second and the share of the file's bytes read to a callback, a few times a second."""

    def __init__(self, progress: Progress | None, size: int) -> None:
        self._progress = progress
        self._size = max(size, 1)
        self._start = self._last = time.perf_counter()

    def update(self, rows: int, position: int, done: bool = False) -> None:
        """Report `rows` read so far, at byte `position`, unless the last report is recent."""
        if self._progress is None:
            return
        now = time.perf_counter()
        if done or now - self._last > 0.2:
            self._last = now
            self._progress(rows, rows / max(now - self._start, 1e-9), min(position / self._size, 1.0))


def text_chunks(path: Path) -> Iterator[tuple[Chunk, int]]:
    """Chunks of lines of a plain or gzip text file, and the bytes of the file read so far.

    Raises `InputError` for damaged gzip data and text that is not UTF-8.
    """
    first = 1
    with path.open("rb") as raw:
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw) if is_gzip(path) else raw)
        text = TextIOWrapper(stream, encoding="utf-8-sig")
        try:
            while lines := text.readlines(CHUNK_BYTES):
                yield Chunk(first, lines), raw.tell()
                first += len(lines)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text after line {first}; is this a binary or damaged file?") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}: damaged gzip data after line {first} ({error}); download it again") from error


def all_of(values: list[object], kind: type) -> bool:
    """Whether every value has exactly this type (a bool is no int)."""
    return set(map(type, values)) <= {kind}


def integers(values: list[object]) -> Ints:
    """Python integers as int64; raises `TypeError` for any other type and `OverflowError` beyond 64 bits."""
    if not all_of(values, int):
        raise TypeError("not integers")
    return np.array(values, dtype=np.int64)


def nanoseconds(values: list[object], unit_ns: int) -> Ints:
    """Timestamps in units of `unit_ns` as whole nanoseconds.

    Integers are exact; floats are rounded to the microsecond, which their 53 bits still tell apart on epoch times,
    so that a shift of all timestamps changes nothing. Raises `TypeError` or `ValueError`.
    """
    if not set(map(type, values)) <= {int, float}:
        raise TypeError("not numbers")
    if all_of(values, int):
        exact = np.array(values, dtype=np.int64)
        if exact.size and np.abs(exact).max() > TIME_LIMIT_NS // unit_ns:
            raise ValueError("out of range")
        return exact * unit_ns
    floats = np.array(values, dtype=np.float64) * (unit_ns / 1000)
    if not np.isfinite(floats).all() or np.abs(floats).max() > TIME_LIMIT_NS // 1000:
        raise ValueError("out of range")
    return np.rint(floats).astype(np.int64) * 1000


def list_column(values: list[list[int] | None], keep: Mask) -> pa.Array:
    """Block ids as `list<int64>`; rows not in `keep` (or None) are null. Raises `TypeError` for ids of other types."""
    kept = [ids if flag and ids is not None else [] for ids, flag in zip(values, keep.tolist(), strict=True)]
    flat: list[object] = [i for ids in kept for i in ids]
    present = keep & np.array([ids is not None for ids in values], dtype=np.bool_)
    lengths = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(integers(flat)), mask=pa.array(~present))


def null_column(name: str, rows: int) -> pa.Array:
    """A column of nulls of the type that `SCHEMA` gives `name`."""
    return pa.nulls(rows, SCHEMA.field(name).type)


def record_batch(columns: dict[str, pa.Array | Ints | Floats]) -> pa.RecordBatch:
    """A batch of `SCHEMA`; the columns not given are null."""
    rows = len(columns["request_id"])
    arrays = []
    for column in SCHEMA:
        values = columns.get(column.name)
        if values is None:
            arrays.append(null_column(column.name, rows))
        else:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, type=column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def blocks_of(prompt_tokens: Ints, block_tokens: int) -> Ints:
    """Blocks of a prompt, the last one partly filled: ceil(prompt / block)."""
    return -(-prompt_tokens // block_tokens)
