"""The two all-to-alls of sequence-parallel attention (Ulysses), with uneven shards and replicated KV heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from executor.collectives import Groups
from executor.place import Place
from executor.upload import upload


@dataclass(frozen=True)
class Shards:
    """Rows of every group in one exchange, and how the received rows become whole sequences.

    Rows arrive group by group; `order` lists them sequence by sequence (None: they are in order already).
    """

    rows: tuple[int, ...]
    order: torch.Tensor | None

    @property
    def total(self) -> int:
        """Rows over all groups."""
        return sum(self.rows)

    @cached_property
    def inverse(self) -> torch.Tensor | None:
        """From sequence order back to arrival order."""
        return None if self.order is None else torch.argsort(self.order)


def shard_order(pieces: list[tuple[int, ...]], device: torch.device) -> Shards:
    """Shards of sequences whose `pieces[s][g]` rows lie on group g, stacked there in sequence order."""
    table = np.array(pieces, dtype=np.int64)  # [sequences, groups]
    rows = tuple(int(n) for n in table.sum(axis=0))
    if len(pieces) == 1 or len(rows) == 1:
        return Shards(rows, None)
    group_start = np.concatenate(([0], np.cumsum(rows)))[:-1]
    start = group_start[None] + np.cumsum(table, axis=0) - table  # of each piece among the arrived rows
    sizes, starts = table.reshape(-1), start.reshape(-1)
    ends = np.cumsum(sizes)
    order = np.repeat(starts - (ends - sizes), sizes) + np.arange(int(ends[-1]))
    return Shards(rows, upload(order, device))


class Exchange:
    """Between "my rows, all heads of my TP share" and "all rows, my heads"."""

    def __init__(self, place: Place, groups: Groups) -> None:
        self.place = place
        self.groups = groups
        slots = [slot for group in place.kv_slots for slot in group]
        self._slots = None if slots == list(range(place.local.kv_heads)) else np.array(slots)
        self._replicas: torch.Tensor | None = None  # `_slots` where the tensors are, made once

    def to_heads(self, qkv: torch.Tensor, shards: Shards) -> torch.Tensor:
        """`qkv [rows here, q + 2 kv, d]` of the TP share to `[all rows, shared q + 2 shared kv, d]`."""
        place = self.place
        count, own = place.groups, len(qkv)
        q, kv, dim = place.local.q_heads, place.local.kv_heads, qkv.shape[-1]
        q_part, kv_part = place.shared.q_heads, place.shared.kv_heads
        data = qkv.new_empty(count, own, q_part + 2 * kv_part, dim)
        data[:, :, :q_part] = qkv[:, :q].view(own, count, q_part, dim).transpose(0, 1)
        for at, first in ((q_part, q), (q_part + kv_part, q + kv)):
            heads = qkv[:, first : first + kv]
            spread = heads if self._slots is None else heads.index_select(1, self._index(qkv.device))
            data[:, :, at : at + kv_part] = spread.reshape(own, count, kv_part, dim).transpose(0, 1)
        out = qkv.new_empty(shards.total, q_part + 2 * kv_part, dim)
        self.groups.count("qkv_exchange", data)
        self.groups.exchange.all_to_all(out, data.flatten(0, 1), list(shards.rows), [own] * count)
        return out if shards.order is None else out[shards.order]

    def _index(self, device: torch.device) -> torch.Tensor:
        if self._replicas is None:
            assert self._slots is not None
            self._replicas = upload(self._slots, device)
        return self._replicas

    def to_rows(self, attention: torch.Tensor, shards: Shards) -> torch.Tensor:
        """`attention [all rows, shared q, d]` to `[rows here, q * d]` of the TP share."""
        count, own = self.place.groups, shards.rows[self.place.group]
        data = attention if shards.inverse is None else attention[shards.inverse]
        out = attention.new_empty(count, own, *attention.shape[1:])
        self.groups.count("output_exchange", out)
        self.groups.exchange.all_to_all(out.flatten(0, 1), data.contiguous(), [own] * count, list(shards.rows))
        return out.transpose(0, 1).reshape(own, count * attention.shape[1] * attention.shape[2])
