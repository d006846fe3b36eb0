"""flash-attn 2: pages of 256 tokens, and a grid for the whole device whatever stream it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from confsim.errors import InputError
from executor.config import Device
from executor.fork import Sms
from executor.kernels.base import DecodeBatch, PrefillBatch, installed

NEEDS = "flash-attn 2.5 or newer"


def find(device: Device) -> Flash2Kernels | None:
    """The installed ones.

    Raises:
        InputError: for a release that knows no pages.
    """
    package = installed("flash_attn")
    if package is None:
        return None
    version = str(package.__version__)
    if tuple(map(int, version.split("+")[0].split(".")[:2])) < (2, 5):
        raise InputError(f"flash-attn {version} has no paged KV: install {NEEDS}")
    return Flash2Kernels(package, version, device.num_splits)


@dataclass(frozen=True)
class Flash2Kernels:
    """flash-attn 2; `package` is the module `flash_attn`."""

    package: Any
    version: str
    num_splits: int = 0
    name: str = "flash-attn 2"
    page_multiple: int = 256

    def prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch, sms: Sms = None
    ) -> torch.Tensor:
        """`flash_attn_varlen_func`, causal at the end of each context."""
        out: torch.Tensor = self.package.flash_attn_varlen_func(
            q,
            keys,
            values,
            batch.cu_queries,
            batch.cu_contexts,
            batch.most_queries,
            batch.longest,
            causal=True,
            block_table=batch.block_table,
        )
        return out

    def decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch, sms: Sms = None
    ) -> torch.Tensor:
        """`flash_attn_with_kvcache`, one query a sequence."""
        out: torch.Tensor = self.package.flash_attn_with_kvcache(
            q[:, None],
            keys,
            values,
            cache_seqlens=batch.context_lengths,
            block_table=batch.block_table,
            causal=True,
            num_splits=self.num_splits,
        )
        return out[:, 0]
