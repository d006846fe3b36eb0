"""Host data to where a rank computes, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch


def upload(data: np.ndarray | Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on `device`; on CPU it shares an array's memory.

    A copy from pageable memory would hold up the host until the stream has got there, and with it every launch behind.
    """
    host = torch.from_numpy(data) if isinstance(data, np.ndarray) else torch.tensor(data)
    if dtype is not None:
        host = host.to(dtype)
    if device.type == "cpu":
        return host
    return (host.pin_memory() if _can_pin() else host).to(device, non_blocking=True)


@cache
def _can_pin() -> bool:
    return torch.cuda.is_available()
