"""Attention over paged KV: what a kernel family must do, and the family that needs no GPU (PyTorch's SDPA)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of prompts: `queries[i]` new tokens at the end of `contexts[i]` tokens of KV, none of them empty.

    `block_table` is `[sequences, pages]` int32 on the device.
    """

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    block_table: torch.Tensor

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
        return torch.tensor(self.contexts, dtype=torch.int32, device=self.block_table.device)

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

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return int(self.lengths.max())

    @cached_property
    def context_lengths(self) -> torch.Tensor:
        """`lengths`, int32 on the device."""
        return torch.from_numpy(self.lengths.astype(np.int32)).to(self.block_table.device)

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
    """Causal attention with grouped KV heads; `name` and `version` go into results and profiles."""

    @property
    def name(self) -> str:
        """The kernel family."""

    @property
    def version(self) -> str:
        """Of the package that the kernels come from."""

    def prefill(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
        """`q [tokens, q_heads, d]` over pages `[pages, page_tokens, kv_heads, d]`; like `q`."""

    def decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """`q [sequences, q_heads, d]` over pages `[pages, page_tokens, kv_heads, d]`; like `q`."""


@dataclass(frozen=True)
class SdpaKernels:
    """Gathers pages, then `scaled_dot_product_attention`; decodes are padded within buckets of similar context."""

    name: str = "sdpa"
    version: str = torch.__version__

    def prefill(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
        """One call a sequence: chunks are few and long."""
        out = torch.empty_like(q)
        start = 0
        for index, (new, context) in enumerate(zip(batch.queries, batch.contexts, strict=True)):
            k = _gather(keys, batch.block_table[index], context)
            v = _gather(values, batch.block_table[index], context)
            mask = batch.masks[index]
            part = F.scaled_dot_product_attention(
                q[start : start + new].transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out[start : start + new] = part[0].transpose(0, 1)
            start += new
        return out

    def decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One call a bucket; the query heads of a KV head stand in as its queries."""
        buckets = batch.buckets
        if len(buckets) == 1 and buckets[0].members is None:
            return _decode_bucket(q, keys, values, buckets[0])
        out = torch.empty_like(q)
        for bucket in buckets:
            assert bucket.members is not None
            out[bucket.members] = _decode_bucket(q[bucket.members], keys, values, bucket)
        return out


def _bucket(batch: DecodeBatch, members: np.ndarray | None, lengths: np.ndarray) -> Bucket:
    device = batch.block_table.device
    pages = -(-int(lengths.max()) // batch.page_tokens)
    index = None if members is None else torch.from_numpy(members).to(device)
    table = (batch.block_table if index is None else batch.block_table[index])[:, :pages]
    positions = torch.arange(pages * batch.page_tokens, device=device)
    mask = positions[None] < torch.from_numpy(lengths.astype(np.int64)).to(device)[:, None]
    return Bucket(index, table.contiguous(), mask[:, None, None])


def _decode_bucket(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    sequences, pages = bucket.block_table.shape
    _, page_tokens, heads, dim = keys.shape
    flat = bucket.block_table.reshape(-1)
    k = keys.index_select(0, flat).view(sequences, pages * page_tokens, heads, dim).transpose(1, 2)
    v = values.index_select(0, flat).view(sequences, pages * page_tokens, heads, dim).transpose(1, 2)
    queries = q.view(sequences, heads, q.shape[1] // heads, dim)
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=bucket.mask).reshape(q.shape)


def _gather(pages: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    used = table[: -(-tokens // pages.shape[1])]
    return pages.index_select(0, used).flatten(0, 1)[:tokens]


def _causal(new: int, context: int, device: torch.device) -> torch.Tensor:
    rows = torch.arange(context - new, context, device=device)
    return torch.arange(context, device=device)[None] <= rows[:, None]


def _offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)).to(device)
