"""A profile's folder: what was measured on what, and one Parquet file a round, so that a profile can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from analysis.calibrate.rounds import COMMON, FORMAT, kernels, read_head
from confsim.errors import InputError
from confsim.outcome.result import write_json, write_table
from confsim.specs import GpuSpec
from executor.config import ExecutorConfig
from executor.profile.plan import Grid

SCHEMA = pa.schema(
    [
        ("part", pa.string()),
        ("cell", pa.string()),
        ("round", pa.int32()),
        ("position", pa.int32()),
        ("kind", pa.string()),
        ("tp", pa.int32()),
        ("sp", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("cached", pa.list_(pa.int32())),
        ("last", pa.bool_()),
        ("shard_tokens", pa.int32()),
        ("sequences", pa.int32()),
        ("busy_groups", pa.int32()),
        ("context_tokens", pa.int64()),
        ("duration_s", pa.float64()),
        ("linear_s", pa.float64()),
        ("prefill_attention_s", pa.float64()),
        ("decode_attention_s", pa.float64()),
        ("communication_s", pa.float64()),
        ("head_s", pa.float64()),
        ("transfer_s", pa.float64()),
        ("overhead_s", pa.float64()),
        ("wall_s", pa.float64()),
        ("fastest_rank_s", pa.float64()),
        ("busy_share", pa.float64()),
        ("overlap", pa.string()),
    ]
)


class Store:
    """The folder of one layout."""

    def __init__(self, folder: Path, executor: ExecutorConfig, gpu: GpuSpec, grid: Grid) -> None:
        self.folder = folder
        # More rounds may be added later, within another budget: neither changes what a cell is.
        cells = {key: value for key, value in asdict(grid).items() if key not in ("rounds", "budget_s")}
        self.head: dict[str, Any] = {
            "kind": "executor_profile",
            "format": FORMAT,
            "model": asdict(executor.model.spec(executor.device.dtype)),
            "gpu": asdict(gpu),
            "layout": asdict(executor.layout),
            "device": asdict(executor.device),
            "grid": cells,
        }

    @property
    def identity(self) -> str:
        """Sixteen hex digits over what is measured on what."""
        return hashlib.sha256(json.dumps(self.head, sort_keys=True).encode()).hexdigest()[:16]

    def open(self) -> list[int]:
        """Rounds that are there already; makes the folder where it is new.

        Raises:
            InputError: if the folder, or one beside it, holds the profile of something else, or it cannot be made.
        """
        for file in sorted(self.folder.parent.glob("*/profile.json")):
            if file.parent != self.folder:
                self._check_beside(file)
        file = self.folder / "profile.json"
        if file.is_file():
            if read_head(file).get("identity") != self.identity:
                raise InputError(
                    f"{self.folder} holds the profile of another model, layout, device or grid: name a new folder in "
                    "output, or remove it"
                )
            return sorted(int(path.stem.split("-")[1]) for path in self.folder.glob("round-*.parquet"))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output={self.folder.parent}: cannot be made ({error.strerror or error})") from error
        return []

    def _check_beside(self, file: Path) -> None:
        """Layouts of one folder are fitted together."""
        found, own = read_head(file), json.loads(json.dumps(self.head))
        for key in COMMON:
            if found[key] != own[key]:
                raise InputError(f"{file}: measured another {key}: name a new folder in output")

    def describe(self, facts: list[Mapping[str, Any]]) -> None:
        """Write what was measured on what; `facts` are the ranks' own account.

        Raises:
            InputError: if what is there, here or beside, was measured with other attention kernels.
        """
        head = {"identity": self.identity, **self.head, "ranks": facts}
        for file in sorted(self.folder.parent.glob("*/profile.json")):
            if (found := kernels(read_head(file))) != kernels(head):
                raise InputError(
                    f"{file}: measured {found}, these ranks have {kernels(head)}: name a new folder in output"
                )
        write_json(self.folder / "profile.json", head)

    def add(self, number: int, rows: list[dict[str, Any]]) -> None:
        """Keep a round, whole or not at all."""
        write_table(self.folder / f"round-{number:03d}.parquet", pa.Table.from_pylist(rows, SCHEMA))
