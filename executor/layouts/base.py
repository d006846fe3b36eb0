"""The parts that layouts are made of: the layer loop and attention against local KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from executor.attention import AttentionKernels
from executor.clock import StageClock
from executor.collectives import Groups
from executor.exchange import Exchange
from executor.fork import Fork
from executor.kv import UnitPool
from executor.model import Linear
from executor.place import Place
from executor.work import DecodeRows, PrefillRows, Work

Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Parts:
    """What a rank has to build a layout from; `second` is the linear side of a batch that runs beside the first."""

    place: Place
    groups: Groups
    pool: UnitPool
    kernels: AttentionKernels
    clock: StageClock
    fork: Fork
    exchange: Exchange
    linear: Linear
    second: Linear
    layers: int


class Runner(Protocol):
    """A layout at work."""

    def forward(self, work: Work) -> torch.Tensor:
        """Hidden states `[logit rows, hidden]` of an iteration that is not empty on this rank."""


def run_layers(
    linear: Linear, clock: StageClock, layers: int, rows: tuple[torch.Tensor, torch.Tensor], attend: Attend
) -> torch.Tensor:
    """The chain of linear segments with `attend` between them; hidden states `[rows, hidden]`."""
    with clock.stage("linear"):
        qkv = linear.begin(*rows)
    for layer in range(layers - 1):
        attention = attend(layer, qkv)
        with clock.stage("linear"):
            qkv = linear.advance(layer, attention)
    attention = attend(layers - 1, qkv)
    with clock.stage("linear"):
        return linear.finish(attention)


class LocalAttention:
    """Both phases against KV of this rank; heads are those of `qkv`, a slice of the stack of rows."""

    def __init__(self, parts: Parts, q_heads: int) -> None:
        self.parts = parts
        self.q_heads = q_heads

    def append(self, layer: int, qkv: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values of `qkv [tokens, q + 2 kv, d]` to pool slots; a token's head units are its rows."""
        pool = self.parts.pool
        keys, values = pool.flat(layer)
        k, v = qkv[:, self.q_heads :].chunk(2, dim=1)
        keys.index_copy_(0, slots, k.reshape(-1, *keys.shape[1:]))
        values.index_copy_(0, slots, v.reshape(-1, *values.shape[1:]))

    def prefill(self, layer: int, qkv: torch.Tensor, rows: PrefillRows) -> torch.Tensor:
        """Attention of whole chunks whose KV is in the pool, `[tokens, q, d]`."""
        pool = self.parts.pool
        q = qkv[:, : self.q_heads]
        return self.parts.kernels.prefill(q, pool.keys[layer], pool.values[layer], rows.batch)

    def decode(self, layer: int, qkv: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        """Attention of decodes, `[tokens, q * d]`; each head unit of a request is a sequence of its own."""
        pool = self.parts.pool
        sequences = len(rows.batch.lengths)
        q = qkv[:, : self.q_heads].reshape(sequences, -1, qkv.shape[-1])
        out = self.parts.kernels.decode(q, pool.keys[layer], pool.values[layer], rows.batch)
        return out.view(len(qkv), -1)
