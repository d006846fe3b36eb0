"""PyTorch's own variable-length attention, `torch.nn.attention.varlen.varlen_attn`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from executor.config import Device
from executor.kernels.base import DecodeBatch, PrefillBatch, installed

NEEDS = "PyTorch 2.11 or newer"


def find(device: Device) -> VarlenKernels | None:
    """The installed ones."""
    module = installed("torch.nn.attention.varlen")
    if module is None or tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11):
        return None
    return VarlenKernels(module.varlen_attn, num_splits=device.num_splits)


@dataclass(frozen=True)
class VarlenKernels:
    """`torch.nn.attention.varlen.varlen_attn` (PyTorch 2.11 and newer); `function` is that function."""

    function: Any
    version: str = torch.__version__
    num_splits: int = 0
    name: str = "torch varlen"
    page_multiple: int = 256

    def prefill(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
        """Causal: a window without a right side."""
        return self._call(q, keys, values, batch, max(batch.queries), max(batch.contexts), None)

    def decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One query a sequence."""
        return self._call(q, keys, values, batch, 1, batch.longest, self.num_splits or None)

    def _call(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
        max_queries: int,
        max_context: int,
        num_splits: int | None,
    ) -> torch.Tensor:
        out: torch.Tensor = self.function(
            q.contiguous(),
            keys,
            values,
            batch.cu_queries,
            batch.cu_contexts,
            max_queries,
            max_context,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=batch.context_lengths,
            block_table=batch.block_table,
            num_splits=num_splits,
        )
        return out
