"""PyTorch's `scaled_dot_product_attention` on gathered pages: needs no GPU, takes every dtype, serves any machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from executor.fork import Sms
from executor.kernels.base import Bucket, DecodeBatch, PrefillBatch


@dataclass(frozen=True)
class SdpaKernels:
    """Gathers pages, then `scaled_dot_product_attention`; decodes are padded within buckets of similar context."""

    name: str = "sdpa"
    version: str = torch.__version__
    page_multiple: int = 1

    def prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PrefillBatch, sms: Sms = None
    ) -> torch.Tensor:
        """One call a sequence: chunks are few and long."""
        out = torch.empty_like(q)
        start = 0
        for index, (new, context) in enumerate(zip(batch.queries, batch.contexts, strict=True)):
            k = _gather(keys, batch.block_table[index], context)
            v = _gather(values, batch.block_table[index], context)
            mask = batch.masks[index]
            part = F.scaled_dot_product_attention(
                q[start : start + new].transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out[start : start + new] = part[0].transpose(0, 1)
            start += new
        return out

    def decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch, sms: Sms = None
    ) -> torch.Tensor:
        """One call a bucket; the query heads of a KV head stand in as its queries."""
        buckets = batch.buckets
        if len(buckets) == 1 and buckets[0].members is None:
            return _decode_bucket(q, keys, values, buckets[0])
        out = torch.empty_like(q)
        for bucket in buckets:
            assert bucket.members is not None
            out[bucket.members] = _decode_bucket(q[bucket.members], keys, values, bucket)
        return out


def _decode_bucket(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    sequences, pages = bucket.block_table.shape
    _, page_tokens, heads, dim = keys.shape
    flat = bucket.block_table.reshape(-1)
    k = keys.index_select(0, flat).view(sequences, pages * page_tokens, heads, dim).transpose(1, 2)
    v = values.index_select(0, flat).view(sequences, pages * page_tokens, heads, dim).transpose(1, 2)
    queries = q.view(sequences, heads, q.shape[1] // heads, dim)
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=bucket.mask).reshape(q.shape)


def _gather(pages: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    used = table[: -(-tokens // pages.shape[1])]
    return pages.index_select(0, used).flatten(0, 1)[:tokens]
