"""Synthetic traces as configurations: the presets, and requests of one fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from traces.errors import InputError
from traces.readers.base import INT32_MAX, Progress, record_batch
from traces.select import Selection, is_number
from traces.synthesis.generate import generate
from traces.synthesis.tables import PRESETS, load_population
from traces.trace import SCHEMA, Trace


@dataclass(frozen=True)
class SyntheticTrace:
    """A trace drawn from the tables of a preset; `requests` null: as many as the trace that it is modelled on.

    `limit`, `window` and `sample` are those of `Selection`.
    """

    preset: str
    requests: int | None = None
    limit: int | None = None
    window: Sequence[float | None] | None = None
    sample: float = 1.0

    def check(self) -> None:
        """Raise `InputError` for settings that make no sense."""
        if self.preset not in PRESETS:
            raise InputError(f"trace.preset={self.preset}: unknown, use one of {', '.join(PRESETS)}")
        if self.requests is not None:
            _check_count("trace.requests", self.requests)
        Selection(self.limit, self.window, self.sample).check()

    def load(self, seed: int = 0, block_ids: bool = True, progress: Progress | None = None) -> Trace:
        """Draw the trace with `seed`; block ids are null unless `block_ids`. Raises `InputError`."""
        self.check()
        population = load_population(self.preset)
        requests = self.requests or population.requests
        table = generate(population, requests, seed, block_ids)
        provenance = {
            "name": f"{self.preset} (synthetic)",
            "format": "synthesis",
            "preset": self.preset,
            "source": population.source,
            "requests": requests,
        }
        trace = _selected(table, Selection(self.limit, self.window, self.sample), seed, provenance)
        return Trace(trace.table, population.block_tokens, trace.provenance)


@dataclass(frozen=True)
class FixedTrace:
    """`requests` requests of one size, `interval_s` seconds apart, that share no prefix."""

    prompt_tokens: int = 1024
    output_tokens: int = 128
    requests: int = 1000
    interval_s: float = 1.0
    limit: int | None = None
    window: Sequence[float | None] | None = None
    sample: float = 1.0

    def check(self) -> None:
        """Raise `InputError` for settings that make no sense."""
        for key in ("prompt_tokens", "output_tokens", "requests"):
            _check_count(f"trace.{key}", getattr(self, key))
        if not is_number(self.interval_s) or not 0 <= self.interval_s < float("inf"):
            raise InputError(f"trace.interval_s={self.interval_s}: expected seconds of 0 or more")
        Selection(self.limit, self.window, self.sample).check()

    def load(self, seed: int = 0, block_ids: bool = True, progress: Progress | None = None) -> Trace:
        """The trace; `seed` is that of the sampling, there are no block ids. Raises `InputError`."""
        self.check()
        rows = np.arange(self.requests, dtype=np.int64)
        batch = record_batch(
            {
                "request_id": rows,
                "arrival_s": rows * float(self.interval_s),
                "prompt_tokens": np.full(rows.size, self.prompt_tokens, dtype=np.int64),
                "output_tokens": np.full(rows.size, self.output_tokens, dtype=np.int64),
            }
        )
        provenance = {
            "name": f"fixed {self.prompt_tokens}+{self.output_tokens} (synthetic)",
            "format": "synthesis",
            "preset": "fixed",
            "requests": self.requests,
        }
        table = pa.Table.from_batches([batch], schema=SCHEMA)
        return _selected(table, Selection(self.limit, self.window, self.sample), seed, provenance)


def _check_count(key: str, value: object) -> None:
    if type(value) is not int or not 0 < value <= INT32_MAX:
        raise InputError(f"{key}={value}: expected a whole number above 0")


def _selected(table: pa.Table, selection: Selection, seed: int, provenance: dict[str, Any]) -> Trace:
    table, cut = selection.apply(table, seed)
    return Trace(table, 0, {**provenance, "seed": seed, "synthetic": True, "selection": cut})
