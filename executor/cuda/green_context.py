"""SM partition by green contexts: one split, decode first, prefill the remainder; sizes read back, disjointness proven.

Two separate `torch.cuda.green_contexts.GreenContext.create` calls each split the device anew and may overlap, so the
split is made once through the driver (cuda-bindings).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from executor.cuda.sm_ids import collect_sm_ids


class PartitionError(RuntimeError):
    """This machine offers no SM partition; the message says why."""


@dataclass(frozen=True)
class Partition:
    """Two streams on disjoint SMs, made once; counts as the driver granted them."""

    decode_stream: Any
    prefill_stream: Any
    requested_sms: int
    decode_sms: int
    prefill_sms: int

    @property
    def facts(self) -> dict[str, object]:
        """What results record."""
        return {
            "partition": "green contexts",
            "requested_decode_sms": self.requested_sms,
            "decode_sms": self.decode_sms,
            "prefill_sms": self.prefill_sms,
            "disjoint": True,
        }


def round_sms(requested: int, total: int, capability: tuple[int, int]) -> int:
    """SMs that the driver can grant: a multiple of 8 from compute capability 9.0 on, of 2 (at least 4) before.

    Raises:
        PartitionError: if nothing would be left for the other path.
    """
    step, least = (8, 8) if capability >= (9, 0) else (2, 4)
    granted = max(least, -(-requested // step) * step)
    if requested < 1 or granted + least > total:
        raise PartitionError(f"{requested} of {total} SMs for decode leave none for prefill: use {least} or more less")
    return granted


def partition(device: int, decode_sms: int) -> Partition:
    """Split a device's SMs for the two attention paths and prove that the parts are disjoint and take events.

    Raises:
        PartitionError: if driver, device, bindings or toolkit do not support it, or the parts overlap.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise PartitionError("cuda-bindings is not installed") from error
    try:
        return _partition(driver, device, decode_sms)
    except PartitionError:
        raise
    except Exception as error:  # no toolkit (OSError), NVRTC, a launch or a handle that is refused (RuntimeError), ...
        text = (str(error).strip().splitlines() or [""])[0]
        raise PartitionError(f"{type(error).__name__}: {text}") from error


def _partition(driver: Any, device: int, decode_sms: int) -> Partition:
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(device)
    asked = round_sms(decode_sms, properties.multi_processor_count, (properties.major, properties.minor))
    (decode, decode_count), (prefill, prefill_count) = split_device(driver, device, asked)
    streams = [torch.cuda.ExternalStream(int(handle), device=device) for handle in (decode, prefill)]
    for stream in streams:
        probe_events(stream, torch.cuda.current_stream(device))
    check_disjoint(*(collect_sm_ids(stream, properties.multi_processor_count) for stream in streams))
    return Partition(streams[0], streams[1], decode_sms, decode_count, prefill_count)


def probe_events(stream: Any, caller: Any) -> None:
    """Hand over to a stream and back as every fork does: a driver may refuse events of green contexts."""
    for source, target in ((caller, stream), (stream, caller)):
        event = torch.cuda.Event()
        event.record(source)
        target.wait_event(event)
    event.synchronize()


def split_device(driver: Any, device: int, decode_sms: int) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """Stream handle and SM count of the decode part and of the remainder, from one split of the device resource."""
    handle = _checked(driver, driver.cuDeviceGet(device))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _checked(driver, driver.cuDeviceGetDevResource(handle, kind))
    groups, count, rest = _checked(driver, driver.cuDevSmResourceSplitByCount(1, whole, 0, decode_sms))
    if count != 1:
        raise PartitionError(f"the driver split {decode_sms} SMs into {count} parts")
    return _stream(driver, handle, groups[0], kind), _stream(driver, handle, rest, kind)


def check_disjoint(decode: set[int], prefill: set[int]) -> None:
    """Refuse two sets of SM ids that share one.

    Raises:
        PartitionError: naming them.
    """
    shared = sorted(decode & prefill)
    if shared or not decode or not prefill:
        raise PartitionError(f"partitions share SMs {shared} ({len(decode)} and {len(prefill)} were seen)")


def _stream(driver: Any, device: Any, resource: Any, kind: Any) -> tuple[Any, int]:
    descriptor = _checked(driver, driver.cuDevResourceGenerateDesc([resource], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _checked(driver, driver.cuGreenCtxCreate(descriptor, device, flags))
    granted = _checked(driver, driver.cuGreenCtxGetDevResource(context, kind))
    non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = _checked(driver, driver.cuGreenCtxStreamCreate(context, non_blocking, 0))
    return stream, int(granted.sm.smCount)


def _checked(driver: Any, result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise PartitionError(f"the driver refused an SM partition ({error})")
    return values[0] if len(values) == 1 else tuple(values)
