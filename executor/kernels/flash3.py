"""flash-attn 3, for Hopper: told how many SMs to leave alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from executor.config import Device
from executor.fork import Sms
from executor.kernels.base import DecodeBatch, PrefillBatch, installed

NEEDS = "flash-attn 3"


def find(device: Device) -> Flash3Kernels | None:
    """The installed ones, on a GPU that they run on."""
    package = installed("flash_attn_interface")
    if package is None or torch.cuda.get_device_capability() < (9, 0):
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return Flash3Kernels(package, str(getattr(package, "__version__", "3")), device.num_splits, total)


@dataclass(frozen=True)
class Flash3Kernels:
    """flash-attn 3 (Hopper); `package` is the module `flash_attn_interface`, `total_sms` what the GPU has."""

    package: Any
    version: str
    num_splits: int = 0
    total_sms: int = 0
    name: str = "flash-attn 3"
    page_multiple: int = 16

    def prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch, sms: Sms = None
    ) -> torch.Tensor:
        """Chunks against the cache: the varlen function of this release takes no page table."""
        out: torch.Tensor = self.package.flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=batch.context_lengths,
            page_table=batch.block_table,
            cu_seqlens_q=batch.cu_queries,
            max_seqlen_q=batch.most_queries,
            causal=True,
            num_splits=1,
            sm_margin=self._margin(sms),
        )
        return out

    def decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch, sms: Sms = None
    ) -> torch.Tensor:
        """One query a sequence."""
        out: torch.Tensor = self.package.flash_attn_with_kvcache(
            q[:, None],
            keys,
            values,
            cache_seqlens=batch.context_lengths,
            page_table=batch.block_table,
            causal=True,
            num_splits=self.num_splits,
            sm_margin=self._margin(sms),
        )
        return out[:, 0]

    def _margin(self, sms: Sms) -> int:
        """SMs that a call leaves alone."""
        return 0 if sms is None else self.total_sms - sms
