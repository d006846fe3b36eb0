"""What layouts are made of: what tells one from another, the layer loop, and attention against local KV.

Nothing here loads torch, so that a configuration can ask a layout what it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from confsim.run.plan import IterationPlan
    from confsim.schemes.base import Scheme
    from confsim.schemes.cost import CoBatchCost
    from executor.clock import StageClock
    from executor.collectives import Groups
    from executor.exchange import Exchange
    from executor.fork import Fork, Sms
    from executor.kernels.base import AttentionKernels, PrefillBatch
    from executor.kv import UnitPool
    from executor.model import Linear
    from executor.place import Place
    from executor.work import DecodeRows, PrefillRows, Work


class LayoutKind(ABC):
    """What tells one layout from another; the defaults are those of one group that runs both phases in one batch."""

    live_schemes: ClassVar[tuple[str, ...]] = ()  # schemes that `backend=live` runs on this layout
    one_group: ClassVar[bool] = True
    spreads_decodes: ClassVar[bool] = False  # over the groups, as prefill is
    moves_prompts: ClassVar[bool] = False  # a prompt's KV is sent to the group of its decode
    side_by_side: ClassVar[bool] = False  # the two attention paths, or passes, may run at the same time
    two_passes: ClassVar[bool] = False  # the phases have linear segments and communicators of their own

    def planner(self, max_batched_tokens: int) -> Scheme:
        """The simulator's scheme that plans for these ranks; `max_batched_tokens` are those stacked on a group."""
        from confsim.schemes.chunked_prefill import ChunkedPrefill

        return ChunkedPrefill(max_batched_tokens=max_batched_tokens)

    def refusal(self, cost: CoBatchCost) -> str:
        """Why these ranks cannot execute an ablation of the scheme, or an empty string."""
        return "" if cost.co_batch else "scheme.co_batch=false has no live layout: the executor stacks both phases"

    def arranged(self, plan: IterationPlan, groups: int) -> IterationPlan:
        """A plan of the scheme as the ranks of `groups` groups take it."""
        return plan

    @abstractmethod
    def runner(self, parts: Parts) -> Runner:
        """The layout at work on one rank."""


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
    one_kernel: bool = False


Attend = Callable[[int, "torch.Tensor"], "torch.Tensor"]


class Runner(Protocol):
    """A layout at work."""

    def forward(self, work: Work) -> torch.Tensor:
        """Hidden states `[logit rows, hidden]` of an iteration that is not empty on this rank."""


def run_layers(parts: Parts, linear: Linear, rows: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
    """The chain of linear segments over `rows` (ids and positions) with `attend` between; states `[rows, hidden]`."""
    clock, last = parts.clock, parts.layers - 1
    with clock.stage("linear"):
        qkv = linear.begin(*rows)
    for layer in range(last):
        attention = attend(layer, qkv)
        with clock.stage("linear"):
            qkv = linear.advance(layer, attention)
    attention = attend(last, qkv)
    with clock.stage("linear"):
        return linear.finish(attention)


class LocalAttention:
    """Both phases against KV of this rank; heads are those of `qkv`, a slice of the stack of rows."""

    def __init__(self, parts: Parts, q_heads: int) -> None:
        self.parts = parts
        self.q_heads = q_heads

    def append(self, layer: int, qkv: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values of `qkv [tokens, q + 2 kv, d]` to pool slots; a token's head units are its rows."""
        keys, values = self.parts.pool.flat(layer)
        k, v = qkv[:, self.q_heads :].chunk(2, dim=1)
        keys.index_copy_(0, slots, k.reshape(-1, *keys.shape[1:]))
        values.index_copy_(0, slots, v.reshape(-1, *values.shape[1:]))

    def attend_prefill(self, layer: int, qkv: torch.Tensor, rows: PrefillRows, sms: Sms = None) -> torch.Tensor:
        """Attention of whole chunks whose KV is in the pool, `[tokens, q, d]`."""
        return self.attend_batch(layer, qkv, rows.batch, sms)

    def attend_batch(self, layer: int, qkv: torch.Tensor, batch: PrefillBatch, sms: Sms = None) -> torch.Tensor:
        """One variable-length call, `[tokens, q, d]`."""
        pool = self.parts.pool
        q = qkv[:, : self.q_heads]
        return self.parts.kernels.prefill(q, pool.keys[layer], pool.values[layer], batch, sms)

    def prefill(self, layer: int, qkv: torch.Tensor, rows: PrefillRows, sms: Sms = None) -> torch.Tensor:
        """Append whole chunks and attend, `[tokens, q, d]`."""
        with self.parts.clock.stage("prefill_attention"):
            self.append(layer, qkv, rows.slots)
            return self.attend_prefill(layer, qkv, rows, sms)

    def decode(self, layer: int, qkv: torch.Tensor, rows: DecodeRows, sms: Sms = None) -> torch.Tensor:
        """Append decodes and attend, `[tokens, q * d]`; each head unit of a request is a sequence of its own."""
        pool, sequences = self.parts.pool, len(rows.batch.lengths)
        with self.parts.clock.stage("decode_attention"):
            self.append(layer, qkv, rows.slots)
            q = qkv[:, : self.q_heads].reshape(sequences, -1, qkv.shape[-1])
            out = self.parts.kernels.decode(q, pool.keys[layer], pool.values[layer], rows.batch, sms)
            return out.view(len(qkv), -1)
