"""What a rank knows about requests between iterations, and how a plan becomes its work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor.collectives import Groups
from executor.config import Sampling
from executor.exchange import Shards, shard_order
from executor.handover import Handover, Move
from executor.kernels.base import DecodeBatch, PrefillBatch
from executor.kv import GroupKv, PagePool, UnitPool
from executor.message import Chunk, Iteration, NewRequest
from executor.place import Place
from executor.upload import upload
from executor.work import DecodeRows, PrefillRows, Work


class PlanError(RuntimeError):
    """A plan that cannot be run on what the ranks hold."""


@dataclass
class Entry:
    """A request on a rank: `tokens` to prefill (on the device), `done` of them computed."""

    tokens: torch.Tensor
    sampling: Sampling
    done: int = 0


class Ledger:
    """Requests, their KV and their last tokens on one rank."""

    def __init__(self, place: Place, groups: Groups, pool: UnitPool, whole_prompt: bool) -> None:
        self.place = place
        self.groups = groups
        self.pool = pool
        self.whole_prompt = whole_prompt
        self.migrates = place.layout.migrates
        self.spreads_decodes = place.layout.rules.spreads_decodes
        self.entries: dict[int, Entry] = {}
        ways = place.local.kv_heads // place.shared.kv_heads
        pools: list[PagePool] = [pool]
        if self.migrates:
            counted = (pool.units, pool.page_tokens, pool.block_tokens, pool.pages)
            pools = [pool if group == place.group else PagePool(*counted) for group in range(place.groups)]
        self.kv = tuple(GroupKv(item, ways, self.migrates) for item in pools)  # one where all groups hold the same
        self.own = self.kv[pools.index(pool)]
        self._last = torch.zeros(16, dtype=torch.int64, device=pool.keys.device)  # by row of own.decodes

    def prepare(self, iteration: Iteration) -> Work:
        """Release, admit, reserve, and lay out the iteration's rows.

        Raises:
            PlanError: if the plan names a request that is not there, or tokens out of turn.
            KvExhausted: if a group's pool is too small for it. Both on every rank alike, before anything is computed.
        """
        for request in iteration.released:
            self.drop(request)
        for new in iteration.new:
            self._admit(new)
        for chunk in iteration.chunks:
            self._reserve(chunk)
        for group, kv in enumerate(self.kv):
            self._grow(group, kv, iteration.decode)
        decode = self._decode_rows(iteration)
        prefill = self._prefill_rows(iteration.chunks)
        finished = tuple(chunk for chunk in iteration.chunks if chunk.last and self._owner(chunk) == self.place.group)
        return Work(prefill, decode, finished, self._logit_rows(iteration, finished, decode), self._handover(iteration))

    def settle(self, iteration: Iteration, work: Work, tokens: torch.Tensor) -> None:
        """Take over the sampled `tokens [logit rows]`: finished prompts first, then decodes."""
        if work.decode is not None:
            self._set_last(work.decode.rows, tokens[len(work.finished) :])
        for group, kv in enumerate(self.kv):
            kv.lengths[kv.rows(self._readers(group, iteration.decode))] += 1
        self._pass_first_tokens(iteration, work, tokens)
        for chunk in iteration.chunks:
            self.entries[chunk.request].done = chunk.end
            if chunk.last:
                self._close_prompt(chunk)

    def drop(self, request: int) -> None:
        """Forget a request; harmless if it is not here."""
        self.entries.pop(request, None)
        for kv in self.kv:
            kv.drop(request)

    def _admit(self, new: NewRequest) -> None:
        tokens = upload(new.tokens.astype(np.int64), self.pool.keys.device)
        self.entries[new.request] = Entry(tokens, new.sampling)

    def _reserve(self, chunk: Chunk) -> None:
        entry = self.entries.get(chunk.request)
        if entry is None:
            raise PlanError(f"request {chunk.request} is unknown: add it before a plan names it")
        if chunk.start != entry.done or chunk.end > len(entry.tokens):
            raise PlanError(
                f"request {chunk.request}: tokens {chunk.start} to {chunk.end} are planned, "
                f"{entry.done} of {len(entry.tokens)} are computed"
            )
        if chunk.last != (chunk.end == len(entry.tokens)):
            raise PlanError(f"request {chunk.request}: its chunk to {chunk.end} of {len(entry.tokens)} is mislabelled")
        target = len(entry.tokens)
        for kv in self.kv:
            kv.prompts.reserve(chunk.request, target if self.whole_prompt else chunk.end)
        if chunk.last and chunk.group >= 0:
            self._of(chunk.group).decodes.reserve(chunk.request, target + 1)

    def _of(self, group: int) -> GroupKv:
        return self.kv[group] if self.migrates else self.own

    def _readers(self, group: int, lists: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        """Decodes whose KV a group reads."""
        return sum(lists, ()) if self.spreads_decodes else _at(lists, group)

    def _grow(self, group: int, kv: GroupKv, lists: tuple[tuple[int, ...], ...]) -> None:
        members = self._readers(group, lists)
        if not kv.is_current(members):  # membership changes seldom
            for request in members:
                if request not in kv.decodes:
                    raise PlanError(f"request {request} decodes on group {group} but has no KV there")
                if self.entries[request].done < len(self.entries[request].tokens):
                    raise PlanError(f"request {request} decodes before its prompt is computed")
        kv.grow(members)

    def _owner(self, chunk: Chunk) -> int:
        """The group that computes the chunk's last token."""
        return max(group for group, tokens in enumerate(chunk.shards) if tokens)

    def _prefill_rows(self, chunks: tuple[Chunk, ...]) -> PrefillRows | None:
        if not chunks:
            return None
        device, group = self.pool.keys.device, self.place.group
        ids, positions, slots, tables = [], [], [], []
        longest = max(chunk.end for chunk in chunks)
        for chunk in chunks:
            first = chunk.start + sum(chunk.shards[:group])
            after = first + chunk.shards[group]
            ids.append(self.entries[chunk.request].tokens[first:after])
            positions.append(torch.arange(first, after, device=device))
            row = np.array([self.own.prompts.rows[chunk.request]])
            span = np.arange(chunk.start, chunk.end, dtype=np.int64)
            slots.append(self.own.prompts.slots(np.repeat(row, len(span)), span)[:, 0])
            tables.append(self.own.prompts.block_table(row, longest))
        return PrefillRows(
            torch.cat(ids),
            torch.cat(positions),
            upload(np.concatenate(slots), device),
            PrefillBatch(
                tuple(chunk.tokens for chunk in chunks),
                tuple(chunk.end for chunk in chunks),
                upload(np.concatenate(tables), device),
            ),
            shard_order([chunk.shards for chunk in chunks], device),
        )

    def _decode_rows(self, iteration: Iteration) -> DecodeRows | None:
        lists = iteration.decode
        members = self._readers(self.place.group, lists)
        if not members:
            return None
        device, store = self.pool.keys.device, self.own.decodes
        rows = self.own.rows(members)
        lengths = self.own.lengths[rows]
        here = slice(None)
        if self.spreads_decodes:
            start = sum(len(part) for part in lists[: self.place.group])
            here = slice(start, start + len(_at(lists, self.place.group)))
        counts = lengths + 1
        index = upload(rows[here], device)
        return DecodeRows(
            members[here],
            rows[here],
            self._last[index],
            upload(lengths[here], device),
            upload(store.slots(rows, lengths).reshape(-1), device),
            DecodeBatch(
                np.repeat(counts, store.ways),
                upload(store.block_table(rows, int(counts.max())), device),
                self.pool.page_tokens,
            ),
            self._all_shards(iteration, lists, device) if self.spreads_decodes else None,
        )

    def _all_shards(self, iteration: Iteration, lists: tuple[tuple[int, ...], ...], device: torch.device) -> Shards:
        counts = tuple(len(_at(lists, group)) for group in range(self.place.groups))
        return shard_order([chunk.shards for chunk in iteration.chunks] + [counts], device)

    def _logit_rows(self, iteration: Iteration, finished: tuple[Chunk, ...], decode: DecodeRows | None) -> torch.Tensor:
        group = self.place.group
        ends = np.cumsum([chunk.shards[group] for chunk in iteration.chunks], dtype=np.int64)
        last = [int(end) - 1 for chunk, end in zip(iteration.chunks, ends, strict=True) if chunk in finished]
        start = int(ends[-1]) if len(ends) else 0
        rows = np.concatenate((last, np.arange(start, start + (0 if decode is None else len(decode.members)))))
        return upload(rows.astype(np.int64), self.pool.keys.device)

    def _handover(self, iteration: Iteration) -> Handover | None:
        moves = [
            Move(chunk.request, chunk.end, chunk.group)
            for chunk in iteration.chunks
            if chunk.last and chunk.group >= 0 and self.migrates
        ]
        if not moves:
            return None
        return Handover(self.place, self.groups, self.pool, self.own.prompts, self.own.decodes, moves)

    def _set_last(self, rows: np.ndarray, tokens: torch.Tensor) -> None:
        if len(rows):
            self._last[upload(rows, tokens.device)] = tokens

    def _pass_first_tokens(self, iteration: Iteration, work: Work, tokens: torch.Tensor) -> None:
        """First tokens go from the group that sampled them to the group that decodes on."""
        chunks = [chunk for chunk in iteration.chunks if chunk.last and chunk.group >= 0]
        if not chunks:
            return
        first = torch.zeros(len(chunks), dtype=torch.int64, device=self.pool.keys.device)
        for index, chunk in enumerate(chunks):
            if chunk in work.finished:
                first[index] = tokens[work.finished.index(chunk)]
        if any(self._owner(chunk) != chunk.group for chunk in chunks):
            self.groups.count("first_tokens", first)
            self.groups.transfer.all_reduce(first)
        for index, chunk in enumerate(chunks):
            kv = self._of(chunk.group)
            row = kv.fill(chunk.request, chunk.end)
            if kv is self.own:
                while row >= len(self._last):
                    self._last = torch.cat((self._last, torch.zeros_like(self._last)))
                self._last[row] = first[index]

    def _close_prompt(self, chunk: Chunk) -> None:
        if chunk.group < 0:
            self.drop(chunk.request)
        elif self.migrates:
            for kv in self.kv:
                kv.prompts.release(chunk.request)


def _at(lists: tuple[tuple[int, ...], ...], group: int) -> tuple[int, ...]:
    return lists[group] if group < len(lists) else ()
