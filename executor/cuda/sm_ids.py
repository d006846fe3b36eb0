"""Which SMs a stream's kernels run on."""

from __future__ import annotations

from typing import Any

import torch

SOURCE = """
extern "C" __global__ void collect_sm_ids(int* out) {
    unsigned int id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    long long begin = clock64();
    while (clock64() - begin < 200000) {}  // stay, so that later blocks have to go elsewhere
    if (threadIdx.x == 0) out[blockIdx.x] = (int)id;
}
"""


def collect_sm_ids(stream: Any, sms: int) -> set[int]:
    """Ids of the SMs that `stream` reaches, from a kernel with eight blocks for every SM of the device."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel")  # noqa: B009 - no public name in torch 2.13
    kernel = compile_kernel(SOURCE, "collect_sm_ids")
    out = torch.full((8 * sms,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        kernel(grid=(8 * sms, 1, 1), block=(1024, 1, 1), args=[out])
    stream.synchronize()
    return set(out.tolist()) - {-1}
