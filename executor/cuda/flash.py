"""Flash attention over paged KV: flash-attn 3, flash-attn 2, or PyTorch's own varlen attention; which is installed.

A page of these kernels is not a block of the KV accounting: flash-attn 2 (also inside PyTorch) takes pages that are
multiples of 256 tokens. Kernels size their grids for the whole device: flash-attn 3 is told how many SMs to leave
alone, flash-attn 2 only how often to split a context.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from confsim.errors import InputError
from executor.attention import AttentionKernels, DecodeBatch, PrefillBatch, SdpaKernels
from executor.config import Device

FLASH2_PAGE = 256
FLASH3_PAGE = 16


@dataclass(frozen=True)
class Flash2Kernels:
    """flash-attn 2; `package` is the module `flash_attn`."""

    package: Any
    version: str
    num_splits: int = 0
    name: str = "flash-attn 2"

    def prefill(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
        """`flash_attn_varlen_func`, causal at the end of each context."""
        out: torch.Tensor = self.package.flash_attn_varlen_func(
            q,
            keys,
            values,
            batch.cu_queries,
            batch.cu_contexts,
            max(batch.queries),
            max(batch.contexts),
            causal=True,
            block_table=batch.block_table,
        )
        return out

    def decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
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


@dataclass(frozen=True)
class Flash3Kernels:
    """flash-attn 3 (Hopper); `package` is the module `flash_attn_interface`. Margins are SMs that a path must leave."""

    package: Any
    version: str
    num_splits: int = 0
    prefill_margin: int = 0
    decode_margin: int = 0
    name: str = "flash-attn 3"

    def prefill(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
        """Chunks against the cache: the varlen function of this release takes no page table."""
        out: torch.Tensor = self.package.flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=batch.context_lengths,
            page_table=batch.block_table,
            cu_seqlens_q=batch.cu_queries,
            max_seqlen_q=max(batch.queries),
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


@dataclass(frozen=True)
class VarlenKernels:
    """`torch.nn.attention.varlen.varlen_attn` (PyTorch 2.11 and newer); `function` is that function."""

    function: Any
    version: str = torch.__version__
    num_splits: int = 0
    name: str = "torch varlen"

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


def choose(device: Device) -> AttentionKernels:
    """The kernels that a device configuration asks for, or the best installed ones.

    Raises:
        InputError: if the kernels asked for are not installed, or cannot take the dtype or the page size.
    """
    kernels = _find(device)
    page = page_multiple(kernels)
    if device.page_tokens is not None and device.page_tokens % page:
        raise InputError(
            f"executor.device.page_tokens={device.page_tokens}: {kernels.name} {kernels.version} takes "
            f"multiples of {page}"
        )
    return kernels


def check_device(device: Device) -> None:
    """Refuse a configuration that this machine cannot run, before ranks are started.

    Raises:
        InputError: naming the key.
    """
    if not torch.cuda.is_available():
        raise InputError("executor.device.kind=cuda: PyTorch sees no CUDA device here, use executor.device.kind=cpu")
    choose(device)


def default_page_tokens(device: Device, block_tokens: int) -> int:
    """The smallest page that the kernels take and that holds whole blocks."""
    return math.lcm(page_multiple(choose(device)), block_tokens)


def page_multiple(kernels: AttentionKernels) -> int:
    """Tokens that a page must be a multiple of, by kernel family and installed version."""
    if isinstance(kernels, (Flash2Kernels, VarlenKernels)):
        return FLASH2_PAGE
    return FLASH3_PAGE if isinstance(kernels, Flash3Kernels) else 1


def _find(device: Device) -> AttentionKernels:
    if device.dtype == "float32" and device.attention in ("flash", "varlen"):
        raise InputError(
            f"executor.device.attention={device.attention} takes bfloat16 or float16, not float32: "
            "use executor.device.dtype=bfloat16 or executor.device.attention=sdpa"
        )
    if device.dtype == "float32" or device.attention == "sdpa":
        return SdpaKernels()
    found = (_flash(device) if device.attention in ("auto", "flash") else None) or (
        _varlen(device) if device.attention in ("auto", "varlen") else None
    )
    if found is not None:
        return found
    if device.attention == "auto":
        return SdpaKernels()
    need = "flash-attn 2.5 or newer" if device.attention == "flash" else "PyTorch 2.11 or newer"
    raise InputError(f"executor.device.attention={device.attention} needs {need}: install it, or use auto")


def _flash(device: Device) -> AttentionKernels | None:
    third = _module("flash_attn_interface")
    if third is not None and torch.cuda.get_device_capability() >= (9, 0):
        version = str(getattr(third, "__version__", "3"))
        margins = _margins(device)
        return Flash3Kernels(third, version, device.num_splits, *margins)
    second = _module("flash_attn")
    if second is None:
        return None
    version = str(second.__version__)
    if _numbers(version) < (2, 5):
        raise InputError(f"flash-attn {version} has no paged KV: install flash-attn 2.5 or newer")
    return Flash2Kernels(second, version, device.num_splits)


def _varlen(device: Device) -> AttentionKernels | None:
    module = _module("torch.nn.attention.varlen")
    if module is None or _numbers(torch.__version__) < (2, 11):
        return None
    return VarlenKernels(module.varlen_attn, num_splits=device.num_splits)


def _margins(device: Device) -> tuple[int, int]:
    """SMs that the prefill path and the decode path leave alone in a partition."""
    if device.overlap != "partition":
        return 0, 0
    total = torch.cuda.get_device_properties(0).multi_processor_count
    return device.decode_sms, total - device.decode_sms


def _module(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _numbers(version: str) -> tuple[int, int]:
    parts = version.split("+")[0].split(".")
    return int(parts[0]), int(parts[1])
