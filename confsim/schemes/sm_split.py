"""How Conflux shares the SMs between its two attention paths: `scheme.sm_split`.

An attention stage maps seconds of communication, prefill attention and decode attention, each alone on all SMs, to the
seconds that they take together. Every stage is monotone in its three arguments, hence in prefill tokens.
"""

from __future__ import annotations

from confsim.errors import InputError
from confsim.latency.base import LatencyModel
from confsim.latency.share import SmShares
from confsim.schemes.cost import AttentionStage, in_turn, overlapped
from confsim.specs import GpuSpec

# Green contexts come in multiples of this many SMs on Hopper; the step is used on every GPU.
SM_STEP = 8
KERNELS = "tma"  # Conflux runs FlashAttention-3
# The first all-to-all (QKV) and the second (output) take about half of the communication each.
FIRST_EXCHANGE = 0.5

SM_SPLITS = ("paper", "fluid", "adaptive")


def fluid(communication_s: float, prefill_s: float, decode_s: float, latency: LatencyModel) -> float:
    """Both paths at their shared rates until one ends; then the other goes on, at once, on the whole GPU.

    Decode attention runs at rate 1 / g_d from the start. The prefill path is the first all-to-all, attention at rate
    1 / g_p while decode runs and 1 afterwards, and the second all-to-all; communication is slowed by nothing. A bound:
    a kernel cannot leave its green context while it runs. In turn where that is shorter.
    """
    turn_s = in_turn(communication_s, prefill_s, decode_s, latency)
    prefill_path_s = communication_s + latency.prefill_slowdown * prefill_s
    decode_path_s = latency.decode_slowdown * decode_s
    if decode_path_s >= prefill_path_s:
        return min(turn_s, prefill_path_s + decode_s - prefill_path_s / latency.decode_slowdown)
    beside_s = decode_path_s - FIRST_EXCHANGE * communication_s  # prefill attention beside decode
    done_s = 0.0 if beside_s <= 0.0 else min(beside_s / latency.prefill_slowdown, prefill_s)
    return min(turn_s, communication_s + prefill_s + done_s * (latency.prefill_slowdown - 1.0))


class Adaptive:
    """The split with the shortest stage, or no overlap where that is shorter: splits made beforehand, one an iteration.

    With `d` of the SMs for decode, a stage takes max(comm + prefill / compute(1 - d), decode / bandwidth(d)). The first
    grows with `d` and the second falls, so that the best one is at their crossing, found by bisection over splits in
    steps of `SM_STEP`.
    """

    def __init__(self, shares: SmShares, gpu: GpuSpec) -> None:
        splits = range(SM_STEP, gpu.sms - SM_STEP + 1, SM_STEP)
        self._prefill = [1.0 / shares.speeds(gpu, gpu.sms - sms, KERNELS).prefill_attention for sms in splits]
        self._decode = [1.0 / shares.speeds(gpu, sms, KERNELS).decode_attention for sms in splits]

    def __call__(self, communication_s: float, prefill_s: float, decode_s: float, latency: LatencyModel) -> float:
        """The shortest stage."""
        alone_s = communication_s + prefill_s + decode_s
        if decode_s == 0.0 or alone_s == decode_s:
            return alone_s
        prefill, decode = self._prefill, self._decode
        low, high = 0, len(decode) - 1  # the first split in which decode is not the longer path, or the last one
        while low < high:
            middle = (low + high) // 2
            if decode_s * decode[middle] <= communication_s + prefill_s * prefill[middle]:
                high = middle
            else:
                low = middle + 1
        stage_s = max(communication_s + prefill_s * prefill[low], decode_s * decode[low])
        if low:  # the split before it, in which decode is the longer path
            stage_s = min(stage_s, decode_s * decode[low - 1])
        return min(stage_s, alone_s)


def attention_stage(sm_split: str, shares: SmShares, gpu: GpuSpec) -> AttentionStage:
    """The stage of a value of `scheme.sm_split`.

    Raises:
        InputError: for an unknown value.
    """
    if sm_split == "paper":
        return overlapped
    if sm_split == "fluid":
        return fluid
    if sm_split == "adaptive":
        return Adaptive(shares, gpu)
    raise InputError(f"scheme.sm_split={sm_split}: unknown, use one of {', '.join(SM_SPLITS)}")
