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
from executor.kv import PagedStore, UnitPool
from executor.message import Chunk, Iteration, NewRequest
from executor.place import Place
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
        self.prompts = PagedStore(pool, 1)
        ways = place.local.kv_heads // place.shared.kv_heads
        self.decodes = PagedStore(pool, ways) if self.migrates else self.prompts
        self._lengths = np.zeros(16, dtype=np.int64)  # tokens of KV, by row of the decode store
        self._last = torch.zeros(16, dtype=torch.int64, device=pool.keys.device)
        self._members: tuple[tuple[int, ...], np.ndarray] = ((), np.zeros(0, dtype=np.int64))

    def prepare(self, iteration: Iteration) -> Work:
        """Release, admit, reserve, and lay out the iteration's rows.

        Raises:
            PlanError: if the plan names a request that is not there, or tokens out of turn.
            KvExhausted: if the pool is too small for it.
        """
        for request in iteration.released:
            self.drop(request)
        for new in iteration.new:
            self._admit(new)
        for chunk in iteration.chunks:
            self._reserve(chunk)
        decode = self._decode_rows(iteration)
        prefill = self._prefill_rows(iteration.chunks)
        finished = tuple(chunk for chunk in iteration.chunks if chunk.last and self._owner(chunk) == self.place.group)
        return Work(prefill, decode, finished, self._logit_rows(iteration, finished, decode), self._handover(iteration))

    def settle(self, iteration: Iteration, work: Work, tokens: torch.Tensor) -> None:
        """Take over the sampled `tokens [logit rows]`: finished prompts first, then decodes."""
        self._keep_tokens(work, tokens)
        self._pass_first_tokens(iteration, work, tokens)
        for chunk in iteration.chunks:
            self.entries[chunk.request].done = chunk.end
            if chunk.last:
                self._close_prompt(chunk)

    def drop(self, request: int) -> None:
        """Forget a request; harmless if it is not here."""
        self.entries.pop(request, None)
        for store in (self.prompts, self.decodes):
            if request in store:
                store.release(request)
        self._members = ((), self._members[1][:0])

    def _admit(self, new: NewRequest) -> None:
        tokens = torch.from_numpy(new.tokens.astype(np.int64)).to(self.pool.keys.device)
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
        self.prompts.reserve(chunk.request, target if self.whole_prompt else chunk.end)
        if chunk.last and chunk.group >= 0 and (not self.migrates or chunk.group == self.place.group):
            self.decodes.reserve(chunk.request, target + 1)

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
            row = np.array([self.prompts.rows[chunk.request]])
            span = np.arange(chunk.start, chunk.end, dtype=np.int64)
            slots.append(self.prompts.slots(np.repeat(row, len(span)), span)[:, 0])
            tables.append(self.prompts.block_table(row, longest))
        return PrefillRows(
            torch.cat(ids),
            torch.cat(positions),
            torch.from_numpy(np.concatenate(slots)).to(device),
            PrefillBatch(
                tuple(chunk.tokens for chunk in chunks),
                tuple(chunk.end for chunk in chunks),
                torch.from_numpy(np.concatenate(tables)).to(device),
            ),
            shard_order([chunk.shards for chunk in chunks], device),
        )

    def _decode_rows(self, iteration: Iteration) -> DecodeRows | None:
        lists = iteration.decode
        members = sum(lists, ()) if self.spreads_decodes else _at(lists, self.place.group)
        if not members:
            return None
        device = self.pool.keys.device
        rows = self._rows(members)
        lengths = self._lengths[rows]
        self.decodes.grow(members, rows, lengths + 1)
        here = slice(None)
        if self.spreads_decodes:
            start = sum(len(part) for part in lists[: self.place.group])
            here = slice(start, start + len(_at(lists, self.place.group)))
        counts = lengths + 1
        index = torch.from_numpy(rows[here]).to(device)
        return DecodeRows(
            members[here],
            rows[here],
            self._last[index],
            torch.from_numpy(lengths[here]).to(device),
            torch.from_numpy(self.decodes.slots(rows, lengths).reshape(-1)).to(device),
            DecodeBatch(
                np.repeat(counts, self.decodes.ways),
                torch.from_numpy(self.decodes.block_table(rows, int(counts.max()))).to(device),
                self.pool.page_tokens,
            ),
            self._all_shards(iteration, lists, device) if self.spreads_decodes else None,
        )

    def _all_shards(self, iteration: Iteration, lists: tuple[tuple[int, ...], ...], device: torch.device) -> Shards:
        counts = tuple(len(_at(lists, group)) for group in range(self.place.groups))
        return shard_order([chunk.shards for chunk in iteration.chunks] + [counts], device)

    def _rows(self, members: tuple[int, ...]) -> np.ndarray:
        # Membership changes seldom: the rows of the same members are looked up once.
        if self._members[0] != members:
            try:
                rows = [self.decodes.rows[request] for request in members]
            except KeyError as error:
                raise PlanError(f"request {error} decodes here but has no KV on this group") from error
            unfinished = [r for r in members if self.entries[r].done < len(self.entries[r].tokens)]
            if unfinished:
                raise PlanError(f"request {unfinished[0]} decodes before its prompt is computed")
            self._members = (members, np.array(rows, dtype=np.int64))
        return self._members[1]

    def _logit_rows(self, iteration: Iteration, finished: tuple[Chunk, ...], decode: DecodeRows | None) -> torch.Tensor:
        group = self.place.group
        ends = np.cumsum([chunk.shards[group] for chunk in iteration.chunks], dtype=np.int64)
        last = [int(end) - 1 for chunk, end in zip(iteration.chunks, ends, strict=True) if chunk in finished]
        start = int(ends[-1]) if len(ends) else 0
        rows = np.concatenate((last, np.arange(start, start + (0 if decode is None else len(decode.members)))))
        return torch.from_numpy(rows.astype(np.int64)).to(self.pool.keys.device)

    def _handover(self, iteration: Iteration) -> Handover | None:
        moves = [
            Move(chunk.request, chunk.end, chunk.group)
            for chunk in iteration.chunks
            if chunk.last and chunk.group >= 0 and self.migrates
        ]
        if not moves:
            return None
        return Handover(self.place, self.groups, self.pool, self.prompts, self.decodes, moves)

    def _keep_tokens(self, work: Work, tokens: torch.Tensor) -> None:
        if work.decode is not None:
            rows = work.decode.rows
            self._set_last(rows, tokens[len(work.finished) :])
            everyone = self._members[1] if self.spreads_decodes else rows
            self._lengths[everyone] += 1

    def _set_last(self, rows: np.ndarray, tokens: torch.Tensor) -> None:
        if len(rows):
            self._last[torch.from_numpy(rows).to(tokens.device)] = tokens

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
            if chunk.request in self.decodes:
                row = self._row_state(chunk.request)
                self._lengths[row] = chunk.end
                self._last[row] = first[index]

    def _row_state(self, request: int) -> int:
        row = self.decodes.rows[request]
        while row >= len(self._lengths):
            self._lengths = np.pad(self._lengths, (0, len(self._lengths)))
            self._last = torch.cat((self._last, torch.zeros_like(self._last)))
        return row

    def _close_prompt(self, chunk: Chunk) -> None:
        if chunk.group < 0:
            self.drop(chunk.request)
        elif self.migrates:
            self.prompts.release(chunk.request)


def _at(lists: tuple[tuple[int, ...], ...], group: int) -> tuple[int, ...]:
    return lists[group] if group < len(lists) else ()
