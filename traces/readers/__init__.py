"""Readers of trace files, one format each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from traces.readers.azure import AzureReader
from traces.readers.bailian import BailianReader
from traces.readers.base import Counts, Progress, Reader, ReadOptions
from traces.readers.mooncake import MooncakeReader
from traces.readers.parquet import ParquetReader, write_parquet

READERS: dict[str, Callable[[Path, ReadOptions], Reader]] = {
    "mooncake": MooncakeReader,
    "bailian": BailianReader,
    "azure": AzureReader,
    "parquet": ParquetReader,
}

__all__ = [
    "READERS",
    "AzureReader",
    "BailianReader",
    "Counts",
    "MooncakeReader",
    "ParquetReader",
    "Progress",
    "ReadOptions",
    "Reader",
    "write_parquet",
]
