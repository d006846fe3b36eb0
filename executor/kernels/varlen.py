"""PyTorch's own variable-length attention, `torch.nn.attention.varlen.varlen_attn`, where it knows pages.

The function is there before its arguments for pages and grouped heads are (PyTorch 2.11 has neither, 2.12 both), so
that its signature decides, not the version.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from executor.config import Device
from executor.fork import Sms
from executor.kernels.base import DecodeBatch, PrefillBatch, installed

NEEDED = ("enable_gqa", "seqused_k", "block_table")
NEEDS = "a PyTorch whose varlen_attn takes block_table, seqused_k and enable_gqa (2.12 or newer)"


def find(device: Device) -> VarlenKernels | None:
    """The installed ones."""
    module = installed("torch.nn.attention.varlen")
    if module is None:
        return None
    known = inspect.signature(module.varlen_attn).parameters
    if not all(name in known for name in NEEDED):
        return None
    splits = {"num_splits": device.num_splits} if device.num_splits and "num_splits" in known else {}
    return VarlenKernels(module.varlen_attn, splits)


@dataclass(frozen=True)
class VarlenKernels:
    """`function` is `varlen_attn`, `splits` what it is told of the context's parts in a decode."""

    function: Any
    splits: dict[str, int]
    version: str = torch.__version__
    name: str = "torch varlen"
    page_multiple: int = 256

    def prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch, sms: Sms = None
    ) -> torch.Tensor:
        """Causal: a window without a right side."""
        return self._call(q, keys, values, batch, (-1, 0), {})

    def decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch, sms: Sms = None
    ) -> torch.Tensor:
        """One query a sequence sees all keys: any window would keep its grouped heads from being packed."""
        return self._call(q, keys, values, batch, (-1, -1), self.splits)

    def _call(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
        window_size: tuple[int, int],
        splits: dict[str, int],
    ) -> torch.Tensor:
        out: torch.Tensor = self.function(
            q.contiguous(),
            keys,
            values,
            batch.cu_queries,
            batch.cu_contexts,
            batch.most_queries,
            batch.longest,
            window_size=window_size,
            enable_gqa=True,
            seqused_k=batch.context_lengths,
            block_table=batch.block_table,
            **splits,
        )
        return out
