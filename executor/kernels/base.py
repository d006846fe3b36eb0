"""Attention over paged KV: what a kernel family is given, and what it must do."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from executor.fork import Sms
from executor.upload import upload


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of prompts: `queries[i]` new tokens at the end of `contexts[i]` tokens of KV, none of them empty.

    `block_table` is `[sequences, pages]` int32 on the device.
    """

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    block_table: torch.Tensor

    @property
    def most_queries(self) -> int:
        """Tokens of the largest chunk."""
        return max(self.queries)

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max(self.contexts)

    @cached_property
    def cu_queries(self) -> torch.Tensor:
        """Offsets of the sequences in the stacked queries, int32 `[sequences + 1]`."""
        return _offsets(self.queries, self.block_table.device)

    @cached_property
    def cu_contexts(self) -> torch.Tensor:
        """Offsets of the contexts as if they were stacked, int32 `[sequences + 1]`."""
        return _offsets(self.contexts, self.block_table.device)

    @cached_property
    def context_lengths(self) -> torch.Tensor:
        """Tokens of KV of each sequence, int32."""
        return upload(self.contexts, self.block_table.device, torch.int32)

    @cached_property
    def masks(self) -> tuple[torch.Tensor | None, ...]:
        """Causal masks `[queries, context]`, aligned at the end; None where the chunk starts the prompt."""
        device = self.block_table.device
        return tuple(
            None if new == context else _causal(new, context, device)
            for new, context in zip(self.queries, self.contexts, strict=True)
        )


@dataclass(frozen=True)
class Bucket:
    """Decodes that one padded call serves: `members` of the batch (None: all), `mask` `[members, 1, 1, context]`."""

    members: torch.Tensor | None
    block_table: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class DecodeBatch:
    """One query a sequence against `lengths[i]` tokens of KV, its own included.

    A request with `ways` head units counts as `ways` sequences of fewer heads. `block_table` is
    `[sequences, pages]` int32 on the device, `lengths` numpy on the host.
    """

    lengths: np.ndarray
    block_table: torch.Tensor
    page_tokens: int
    most_queries: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return int(self.lengths.max())

    @cached_property
    def context_lengths(self) -> torch.Tensor:
        """`lengths`, int32 on the device."""
        return upload(self.lengths, self.block_table.device, torch.int32)

    @cached_property
    def cu_queries(self) -> torch.Tensor:
        """0, 1, 2 ... as int32."""
        return torch.arange(len(self.lengths) + 1, dtype=torch.int32, device=self.block_table.device)

    @cached_property
    def cu_contexts(self) -> torch.Tensor:
        """Offsets of the contexts as if they were stacked, int32."""
        zero = torch.zeros(1, dtype=torch.int32, device=self.block_table.device)
        return torch.cat((zero, self.context_lengths.cumsum(0, dtype=torch.int32)))

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Groups of sequences whose contexts differ by less than a factor of two: padding at most doubles work."""
        lengths = self.lengths
        if len(lengths) * int(lengths.max()) <= 2 * int(lengths.sum()):
            return [_bucket(self, None, lengths)]
        level = np.ceil(np.log2(lengths)).astype(np.int64)
        return [_bucket(self, np.flatnonzero(level == value), lengths[level == value]) for value in np.unique(level)]


class AttentionKernels(Protocol):
    """Causal attention with grouped KV heads; `name` and `version` go into results and profiles.

    `sms` of a call is the part of the device that it has to itself, for kernels that size their grids.
    """

    @property
    def name(self) -> str:
        """The kernel family."""

    @property
    def version(self) -> str:
        """Of the package that the kernels come from."""

    @property
    def page_multiple(self) -> int:
        """Tokens that a page must be a multiple of."""

    def prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch, sms: Sms = None
    ) -> torch.Tensor:
        """`q [tokens, q_heads, d]` over pages `[pages, page_tokens, kv_heads, d]`; like `q`."""

    def decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch, sms: Sms = None
    ) -> torch.Tensor:
        """`q [sequences, q_heads, d]` over pages `[pages, page_tokens, kv_heads, d]`; like `q`."""


def installed(name: str) -> Any | None:
    """A module, or None where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _bucket(batch: DecodeBatch, members: np.ndarray | None, lengths: np.ndarray) -> Bucket:
    device = batch.block_table.device
    pages = -(-int(lengths.max()) // batch.page_tokens)
    index = None if members is None else upload(members, device)
    table = (batch.block_table if index is None else batch.block_table[index])[:, :pages]
    positions = torch.arange(pages * batch.page_tokens, device=device)
    mask = positions[None] < upload(lengths.astype(np.int64), device)[:, None]
    return Bucket(index, table.contiguous(), mask[:, None, None])


def _causal(new: int, context: int, device: torch.device) -> torch.Tensor:
    rows = torch.arange(context - new, context, device=device)
    return torch.arange(context, device=device)[None] <= rows[:, None]


def _offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return upload(np.concatenate(([0], np.cumsum(lengths))), device, torch.int32)
