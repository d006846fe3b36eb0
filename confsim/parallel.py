"""How heads split over parallel degrees, and the bytes that collectives move.

Shared by the latency model, the KV accounting and the executor, so that none of them can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from confsim.errors import InputError


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Attention heads held by one of `degree` ranks; `kv_replicas` ranks hold the same KV head."""

    q_heads: int
    kv_heads: int
    kv_replicas: int


def split_heads(q_heads: int, kv_heads: int, degree: int) -> HeadSplit:
    """Split heads over `degree` ranks; KV heads are replicated when there are fewer than ranks.

    Raises:
        InputError: if the query heads, or the KV heads either way, do not divide evenly.
    """
    if degree < 1:
        raise InputError(f"a parallel degree of {degree} is not possible: use 1 or more")
    if q_heads % degree:
        raise InputError(
            f"{q_heads} query heads cannot be split over {degree} ranks: use a degree that divides {q_heads}"
        )
    if kv_heads % degree == 0:
        return HeadSplit(q_heads // degree, kv_heads // degree, 1)
    if degree % kv_heads == 0:
        return HeadSplit(q_heads // degree, 1, degree // kv_heads)
    raise InputError(
        f"{kv_heads} KV heads can be neither split nor replicated over {degree} ranks: "
        f"use a degree that divides {kv_heads} or is a multiple of it"
    )


def split_heads_xp(q_heads: int, kv_heads: int, tp: int, sp: int) -> tuple[HeadSplit, HeadSplit]:
    """Heads of one GPU of a `tp` group, and of its share when `sp` groups exchange heads (Ulysses).

    The second split refines the first: GPU `r` of group `g` computes heads of rank `r * sp + g` of `tp * sp`.
    """
    return split_heads(q_heads, kv_heads, tp), split_heads(q_heads, kv_heads, tp * sp)


def qkv_exchange_bytes(tokens: int, q_heads: int, kv_heads: int, head_dim: int, itemsize: int, tp: int, sp: int) -> int:
    """Bytes of one rank's buffer in the first all-to-all for a shard of `tokens` (its own part included).

    tokens * (q + 2 * max(kv, sp)) * head_dim * itemsize with q, kv the heads of a GPU in its TP group: KV heads
    fewer than the exchange degree are replicated inside the send buffer.
    """
    local, shared = split_heads_xp(q_heads, kv_heads, tp, sp)
    return tokens * (local.q_heads + 2 * shared.kv_heads * sp) * head_dim * itemsize


def output_exchange_bytes(tokens: int, q_heads: int, head_dim: int, itemsize: int, tp: int) -> int:
    """Bytes of one rank's buffer in the second all-to-all for a shard of `tokens` (its own part included)."""
    return tokens * (q_heads // tp) * head_dim * itemsize


def all_reduce_bytes(tokens: int, hidden_size: int, itemsize: int) -> int:
    """Bytes of the buffer that a TP all-reduce sums; a layer has two."""
    return tokens * hidden_size * itemsize


def kv_token_bytes(kv_heads: int, head_dim: int, layers: int, itemsize: int) -> int:
    """Bytes of keys and values of one token over all layers for `kv_heads` heads."""
    return 2 * kv_heads * head_dim * layers * itemsize
