"""flash-attn 3, for Hopper: told how many SMs to leave alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from executor.config import Device
from executor.kernels.base import DecodeBatch, PrefillBatch, installed

NEEDS = "flash-attn 3"


def find(device: Device) -> Flash3Kernels | None:
    """The installed ones, on a GPU that they run on."""
    package = installed("flash_attn_interface")
    if package is None or torch.cuda.get_device_capability() < (9, 0):
        return None
    version = str(getattr(package, "__version__", "3"))
    return Flash3Kernels(package, version, device.num_splits, *_margins(device))


@dataclass(frozen=True)
class Flash3Kernels:
    """flash-attn 3 (Hopper); `package` is the module `flash_attn_interface`. Margins are SMs that a path must leave."""

    package: Any
    version: str
    num_splits: int = 0
    prefill_margin: int = 0
    decode_margin: int = 0
    name: str = "flash-attn 3"
    page_multiple: int = 16

    def prefill(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
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
            sm_margin=self.prefill_margin,
        )
        return out

    def decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One query a sequence."""
        out: torch.Tensor = self.package.flash_attn_with_kvcache(
            q[:, None],
            keys,
            values,
            cache_seqlens=batch.context_lengths,
            page_table=batch.block_table,
            causal=True,
            num_splits=self.num_splits,
            sm_margin=self.decode_margin,
        )
        return out[:, 0]


def _margins(device: Device) -> tuple[int, int]:
    """SMs that the prefill path and the decode path leave alone in a partition."""
    if device.overlap != "partition":
        return 0, 0
    total = torch.cuda.get_device_properties(0).multi_processor_count
    return device.decode_sms, total - device.decode_sms
