"""Paged KV memory of one rank.

A *unit* is a page of `page_tokens` tokens for the KV heads that one rank holds of a spread prompt; a decode copy on its
own group keeps `ways` units a page, so that both kinds share one pool and are counted as the simulator counts them.
"""

from __future__ import annotations

import numpy as np
import torch

from confsim.specs import KvConfig


class KvExhausted(RuntimeError):
    """A plan asks for more KV than the pool holds."""


class PagePool:
    """The pages of one group's ranks, counted in units; `pages` None: as many as `units` of one block each."""

    def __init__(self, units: int, page_tokens: int, block_tokens: int, pages: int | None = None) -> None:
        self.page_tokens = page_tokens
        self.block_tokens = block_tokens
        self.units = units
        self.pages = units if pages is None else pages
        self.held = 0  # units held, in blocks of `block_tokens`
        self._free = np.arange(self.pages - 1, -1, -1, dtype=np.int32)
        self._top = self.pages

    def take(self, pages: int, units: int, who: int) -> np.ndarray:
        """`pages` free pages, counted as `units`, for request `who`.

        Raises:
            KvExhausted: if the pool has fewer.
        """
        if self.held + units > self.units:
            raise KvExhausted(
                f"KV pool is full: request {who} needs {units} more units, "
                f"{self.units - self.held} of {self.units} are free"
            )
        if pages > self._top:
            raise KvExhausted(
                f"pages of {self.page_tokens} tokens are used up: request {who} needs {pages} more, {self._top} of "
                f"{self.pages} are free; raise executor.device.max_sequences"
            )
        self.held += units
        self._top -= pages
        return self._free[self._top : self._top + pages].copy()

    def give(self, pages: np.ndarray, units: int) -> None:
        """Free pages, counted as `units`."""
        self._free[self._top : self._top + len(pages)] = pages
        self._top += len(pages)
        self.held -= units


class UnitPool(PagePool):
    """The memory of a rank's pages over all layers, keys and values `[layers, pages, page_tokens, heads, head_dim]`."""

    def __init__(self, pages: PagePool, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pages.units, pages.page_tokens, pages.block_tokens, pages.pages)
        layers, heads, head_dim = shape
        self.keys = torch.zeros(layers, self.pages, self.page_tokens, heads, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer by token slot, `[pages * page_tokens, heads, head_dim]`."""
        return self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)


def page_pool(units: int, page_tokens: int, block_tokens: int, page_lists: int) -> PagePool:
    """Pages for `units` blocks, whatever they are shared out to: a page longer than a block may be partly used.

    `page_lists` is how many lists of pages there may be at once; each leaves less than a page unused.
    """
    pages = -(-units * block_tokens // page_tokens) + page_lists
    return PagePool(units, page_tokens, block_tokens, min(units, pages))


class PagedStore:
    """KV of requests in a pool: a row of `ways` page lists for each."""

    def __init__(self, pool: UnitPool, ways: int) -> None:
        self.pool = pool
        self.ways = ways
        self.rows: dict[int, int] = {}
        self.table = np.zeros((16, ways, 16), dtype=np.int32)
        self.pages = np.zeros(16, dtype=np.int64)  # per way
        self.blocks = np.zeros(16, dtype=np.int64)  # per way, counted
        self._spare = list(range(15, -1, -1))

    def __contains__(self, request: int) -> bool:
        return request in self.rows

    def reserve(self, request: int, tokens: int) -> int:
        """Room for `tokens` of a request, in all; its row."""
        row = self.rows.get(request)
        if row is None:
            row = self.rows[request] = self._new_row()
        pages = -(-tokens // self.pool.page_tokens) - int(self.pages[row])
        blocks = -(-tokens // self.pool.block_tokens) - int(self.blocks[row])
        if blocks > 0 or pages > 0:
            self._extend(request, row, max(0, pages), max(0, blocks))
        return row

    def grow(self, requests: tuple[int, ...], rows: np.ndarray, tokens: np.ndarray) -> None:
        """Room for `tokens[i]` of `requests[i]`; only those that start a block cost Python work."""
        short = np.flatnonzero(-(-tokens // self.pool.block_tokens) > self.blocks[rows])
        for index in short.tolist():
            self.reserve(requests[index], int(tokens[index]))

    def release(self, request: int) -> None:
        """Free what a request holds."""
        row = self.rows.pop(request)
        held = self.table[row, :, : self.pages[row]].reshape(-1)
        self.pool.give(held, int(self.blocks[row]) * self.ways)
        self.pages[row] = self.blocks[row] = 0
        self._spare.append(row)

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Token slots in the pool, `[n, ways]`, of `positions[i]` in `rows[i]`."""
        page = self.table[rows, :, positions // self.pool.page_tokens].astype(np.int64)
        slots: np.ndarray = page * self.pool.page_tokens + (positions % self.pool.page_tokens)[:, None]
        return slots

    def block_table(self, rows: np.ndarray, tokens: int) -> np.ndarray:
        """Pages of the first `tokens` of each row, `[n * ways, pages]`."""
        width = -(-tokens // self.pool.page_tokens)
        return self.table[rows, :, :width].reshape(len(rows) * self.ways, width)

    def _extend(self, request: int, row: int, pages: int, blocks: int) -> None:
        start = int(self.pages[row])
        taken = self.pool.take(pages * self.ways, blocks * self.ways, request)
        if start + pages > self.table.shape[2]:
            width = max(2 * self.table.shape[2], start + pages)
            self.table = np.pad(self.table, ((0, 0), (0, 0), (0, width - self.table.shape[2])))
        self.table[row, :, start : start + pages] = taken.reshape(self.ways, pages)
        self.pages[row] = start + pages
        self.blocks[row] += blocks

    def _new_row(self) -> int:
        if not self._spare:
            rows = len(self.pages)
            self.table = np.pad(self.table, ((0, rows), (0, 0), (0, 0)))
            self.pages = np.pad(self.pages, (0, rows))
            self.blocks = np.pad(self.blocks, (0, rows))
            self._spare = list(range(2 * rows - 1, rows - 1, -1))
        return self._spare.pop()


class GroupKv:
    """KV of one group: copies of prompts (a page list each) and of decodes (`ways` lists each).

    Where the two are not `apart`, a prompt's copy is what its decode reads. Every rank counts all groups, so that a
    full pool stops all of them before anything is computed; only the pages of a rank's own group are memory.
    """

    def __init__(self, pool: PagePool, ways: int, apart: bool) -> None:
        self.pool = pool
        self.apart = apart
        self.prompts = PagedStore(pool, 1)
        self.decodes = PagedStore(pool, ways) if apart else self.prompts
        self.lengths = np.zeros(16, dtype=np.int64)  # tokens of KV, by row of `decodes`
        self._members: tuple[tuple[int, ...], np.ndarray] = ((), np.zeros(0, dtype=np.int64))

    def is_current(self, members: tuple[int, ...]) -> bool:
        """Whether these are the decodes whose rows were asked for last."""
        return self._members[0] == members

    def rows(self, members: tuple[int, ...]) -> np.ndarray:
        """Rows of decodes, all of which have a copy here; those of the same members are looked up once."""
        if self._members[0] != members:
            self._members = members, np.array([self.decodes.rows[request] for request in members], dtype=np.int64)
        return self._members[1]

    def grow(self, members: tuple[int, ...]) -> None:
        """Room for another token of each decode."""
        rows = self.rows(members)
        self.decodes.grow(members, rows, self.lengths[rows] + 1)

    def fill(self, request: int, tokens: int) -> int:
        """A decode copy holds its prompt of so many tokens; its row."""
        row = self.decodes.rows[request]
        while row >= len(self.lengths):
            self.lengths = np.pad(self.lengths, (0, len(self.lengths)))
        self.lengths[row] = tokens
        return row

    def drop(self, request: int) -> None:
        """Free what a request holds; harmless if it holds nothing."""
        for store in (self.prompts, self.decodes):
            if request in store:
                store.release(request)
        self._members = ((), self._members[1][:0])


def pool_units(kv: KvConfig, shards_per_block: int) -> int:
    """Units of a rank's pool: `kv.capacity_tokens` of a group's KV, in whole blocks, counted in shards."""
    assert kv.capacity_tokens is not None
    return kv.capacity_tokens // kv.block_tokens * shards_per_block
