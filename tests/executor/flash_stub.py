"""Functions with the signatures that flash-attn documents, computed by hand: a call with a wrong argument fails.

flash-attn 2.8 (`flash_attn.flash_attn_interface`) and flash-attn 3 (`hopper/flash_attn_interface.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor


def _attend(q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, cu_q: Tensor, lengths: Tensor) -> Tensor:
    """Causal attention, aligned at the end of each context."""
    assert table.dtype == torch.int32
    assert cu_q.dtype == torch.int32
    assert lengths.dtype == torch.int32
    assert q.stride(-1) == 1
    if q.device.type != "cpu":
        return torch.empty_like(q)  # fake tensors: shapes, dtypes and devices only
    out = torch.empty_like(q)
    groups = q.shape[1] // pages[0].shape[2]
    for index, length in enumerate(lengths.tolist()):
        begin, end = cu_q[index].item(), cu_q[index + 1].item()
        k, v = (
            page[table[index].long()].flatten(0, 1)[:length].repeat_interleave(groups, 1).transpose(0, 1)
            for page in pages
        )
        scores = q[begin:end].transpose(0, 1) @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        seen = torch.arange(length)[None] <= torch.arange(length - (end - begin), length)[:, None]
        out[begin:end] = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)
    return out


def _page_check(k: Tensor, multiple: int) -> None:
    if k.shape[1] % multiple:
        raise RuntimeError(f"Paged KV cache block size must be divisible by {multiple}")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn 2."""
    assert causal and block_table is not None
    assert cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_k.device == q.device
    _page_check(k, 256)
    return _attend(q, (k, v), block_table, cu_seqlens_q, _lengths(cu_seqlens_k))


def _lengths(offsets: Tensor) -> Tensor:
    return torch.ops.aten.slice(offsets, 0, 1) - torch.ops.aten.slice(offsets, 0, 0, -1)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """flash-attn 2."""
    assert q.dim() == 4 and block_table is not None
    _page_check(k_cache, 256)
    offsets = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return _attend(q.squeeze(1), (k_cache, v_cache), block_table, offsets, cache_seqlens).unsqueeze(1)


def flash_attn_3_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """flash-attn 3."""
    assert page_table is not None and causal
    if cu_seqlens_q is not None:
        assert q.dim() == 3 and max_seqlen_q is not None
        return _attend(q, (k_cache, v_cache), page_table, cu_seqlens_q, cache_seqlens)
    offsets = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return _attend(q.squeeze(1), (k_cache, v_cache), page_table, offsets, cache_seqlens).unsqueeze(1)


FLASH2 = SimpleNamespace(
    flash_attn_varlen_func=flash_attn_varlen_func,
    flash_attn_with_kvcache=flash_attn_with_kvcache,
    __version__="2.8.3",
)
FLASH3 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_3_with_kvcache, __version__="3.0.0")
