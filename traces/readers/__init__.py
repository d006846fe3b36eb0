"""Readers of trace files, one format each."""

from __future__ import annotations

from traces.readers.azure import Reader as AzureReader
from traces.readers.bailian import Reader as BailianReader
from traces.readers.base import Counts, Progress, Reader, ReadOptions
from traces.readers.mooncake import Reader as MooncakeReader
from traces.readers.parquet import Reader as ParquetReader
from traces.readers.parquet import write_parquet
from traces.registry import READERS

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
