"""Attention kernels, one file for each family behind `AttentionKernels`; which of them a rank runs.

A page of these kernels is not a block of the KV accounting: flash-attn 2 (also inside PyTorch) takes pages that are
multiples of 256 tokens.
"""

from __future__ import annotations

import math

from confsim.errors import InputError
from executor.config import Device
from executor.kernels import flash2, flash3, varlen
from executor.kernels.base import AttentionKernels
from executor.kernels.sdpa import SdpaKernels

FAMILIES = {"flash": (flash3, flash2), "varlen": (varlen,)}  # `device.attention`, the preferred first


def choose(device: Device) -> AttentionKernels:
    """The kernels that a device configuration asks for, or the best installed ones.

    Raises:
        InputError: if the kernels asked for are not installed, or cannot take the dtype or the page size.
    """
    kernels = _find(device)
    if device.page_tokens is not None and device.page_tokens % kernels.page_multiple:
        raise InputError(
            f"executor.device.page_tokens={device.page_tokens}: {kernels.name} {kernels.version} takes "
            f"multiples of {kernels.page_multiple}"
        )
    return kernels


def page_tokens(device: Device, block_tokens: int) -> int:
    """Tokens of a page: as asked, or the smallest that the kernels take and that holds whole blocks."""
    return device.page_tokens or math.lcm(choose(device).page_multiple, block_tokens)


def _find(device: Device) -> AttentionKernels:
    if device.kind == "cpu":
        return SdpaKernels()
    if device.dtype == "float32" and device.attention in FAMILIES:
        raise InputError(
            f"executor.device.attention={device.attention} takes bfloat16 or float16, not float32: "
            "use executor.device.dtype=bfloat16 or executor.device.attention=sdpa"
        )
    if device.dtype == "float32":
        return SdpaKernels()
    asked = list(FAMILIES) if device.attention == "auto" else [device.attention]
    families = [family for name in asked for family in FAMILIES.get(name, ())]
    for family in families:
        found: AttentionKernels | None = family.find(device)
        if found is not None:
            return found
    if device.attention in FAMILIES:
        raise InputError(
            f"executor.device.attention={device.attention} needs {families[-1].NEEDS}: install it, or use auto"
        )
    return SdpaKernels()
