"""Tensors that say they are on a GPU, on a build without CUDA.

`FakeTensorMode` propagates their shapes, dtypes and devices, and refuses to mix devices. On a CPU build the Python
bindings of some functions look for a CUDA device guard before they dispatch; those go to the dispatcher directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class _Dispatched(TorchFunctionMode):
    """Runs a function as it is, or by its operator where the binding insists on a device."""

    def __init__(self, blocking: list[str]) -> None:
        super().__init__()
        self._blocking = blocking

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_blocking(func.__name__, args, kwargs):
            self._blocking.append(func.__name__)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
        name = func.__name__
        if name == "__getitem__":
            return _index(*args)
        if name == "__setitem__":
            return aten.copy_(_index(args[0], args[1]), args[2])
        if name == "to":
            return _to(args[0], *args[1:], **kwargs)
        if name == "contiguous":
            return aten.clone(args[0], memory_format=torch.contiguous_format)
        if name == "rms_norm":
            return aten.rms_norm(*args, **kwargs)
        if name == "mul" and "out" in kwargs:
            return aten.copy_(kwargs["out"], aten.mul(*args))
        return getattr(aten, name)(*args, **kwargs)


def _is_blocking(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call makes the host wait for a stream: copies that are not asynchronous, values read back."""
    first = args[0] if args else None
    on_gpu = isinstance(first, torch.Tensor) and first.device.type == "cuda"
    if name in ("cpu", "nonzero"):
        return on_gpu
    if name in ("__getitem__", "__setitem__"):
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return on_gpu and any(isinstance(part, (list, np.ndarray)) for part in parts)
    if name in ("tensor", "as_tensor"):
        return "cuda" in str(kwargs.get("device"))
    if name == "to" and isinstance(first, torch.Tensor):
        target = kwargs.get("device") or next((item for item in args[1:] if not isinstance(item, torch.dtype)), None)
        crosses = target is not None and torch.device(target).type != first.device.type
        return crosses and not kwargs.get("non_blocking", False)
    return False


def _to(tensor: torch.Tensor, *where: Any, **kwargs: Any) -> torch.Tensor:
    for item in where:
        kwargs["dtype" if isinstance(item, torch.dtype) else "device"] = item
    return aten._to_copy(tensor, **kwargs)


def _index(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (tensor.dim() + 1 - len([item for item in items if item is not None]))
    tensors: list[Any] = []
    dim = 0
    for item in items:
        if item is None:
            tensor, dim = aten.unsqueeze(tensor, dim), dim + 1
        elif isinstance(item, int):
            tensor = aten.select(tensor, dim, item)
        elif isinstance(item, slice):
            tensor = aten.slice(tensor, dim, item.start, item.stop, item.step or 1)
            dim += 1
        else:
            found = item if isinstance(item, torch.Tensor) else torch.tensor(item, device=tensor.device)
            tensors += [None] * (dim - len(tensors)) + [found]
            dim += 1
    return aten.index(tensor, tensors) if tensors else tensor


@contextmanager
def fake_cuda(blocking: list[str] | None = None) -> Iterator[torch.device]:
    """Inside, tensors can be made on the device that is yielded; `blocking` gets the calls that hold up the host."""
    with torch.no_grad(), FakeTensorMode(), _Dispatched([] if blocking is None else blocking):
        yield torch.device("cuda", 0)
