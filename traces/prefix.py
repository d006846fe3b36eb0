"""Prefix identity of block ids: which blocks of a prompt earlier prompts have in common."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
WORD = np.uint64(0x9E3779B97F4A7C15)


def chained_ids(block_ids: pa.Array | pa.ChunkedArray) -> pa.ListArray:
    """Ids that are equal exactly where the whole prefix up to the block is.

    A format's own ids may name a block's content alone (Qwen-Bailian): equal ids after different beginnings share
    no KV. The result is a list column of the same shape; its ids are 63-bit hashes of position and all ids so far
    (a sum of mixed words; two prefixes collide with a chance of 1e-6 among three million blocks). Null rows stay.
    """
    lists = block_ids.combine_chunks() if isinstance(block_ids, pa.ChunkedArray) else block_ids
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = lists.flatten().to_numpy().astype(np.uint64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    start = np.repeat(offsets[:-1], lengths)
    position = np.arange(flat.size, dtype=np.int64) - start
    with np.errstate(over="ignore"):
        words = mix64(mix64(flat) + position.astype(np.uint64) * WORD)
        running = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)))
        chained = mix64(running[1:] - running[start])
    values = (chained >> np.uint64(1)).astype(np.int64)
    mask = lists.is_null() if lists.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values), mask=mask)


def reusable_blocks(block_ids: pa.Array | pa.ChunkedArray) -> tuple[int, int]:
    """Blocks whose whole prefix occurred in an earlier request, and all blocks (an unbounded cache's hits)."""
    values = chained_ids(block_ids).flatten().to_numpy()
    return int(values.size - np.unique(values).size), int(values.size)


def mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: a bijection of 64-bit words that spreads every bit."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
