"""What one rank does in one iteration: rows of tokens, where their KV goes, and what is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from executor.exchange import Shards
from executor.fork import Fork, Path
from executor.handover import Handover
from executor.kernels.base import DecodeBatch, PrefillBatch
from executor.message import Chunk


@dataclass(frozen=True)
class PrefillRows:
    """This group's shard of the chunks, `ids` and `positions` `[rows]`, and the chunks as a whole.

    `slots` are the pool slots of all chunk tokens, in chunk order, on this rank.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    batch: PrefillBatch
    shards: Shards


@dataclass(frozen=True)
class DecodeRows:
    """Decoding requests whose rows this group computes, and those whose KV this rank reads (`slots`, `batch`).

    The two differ where decodes are spread over the groups too (`shards` says how).
    """

    members: tuple[int, ...]
    rows: np.ndarray  # of the members in the decode store
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    batch: DecodeBatch
    shards: Shards | None


@dataclass(frozen=True)
class Work:
    """One iteration of one rank; `finished` are the last chunks whose token this group samples."""

    prefill: PrefillRows | None
    decode: DecodeRows | None
    finished: tuple[Chunk, ...]
    logit_rows: torch.Tensor  # of the stack prefill | decode
    handover: Handover | None

    @cached_property
    def joined(self) -> tuple[PrefillBatch, torch.Tensor]:
        """Both phases as one batch of chunks, a decode as one token at the end of its context, and its slots."""
        assert self.prefill is not None and self.decode is not None
        first, second = self.prefill.batch, self.decode.batch
        tables = first.block_table, second.block_table
        pages = max(table.shape[1] for table in tables)
        lengths = tuple(second.lengths.tolist())
        batch = PrefillBatch(
            (*first.queries, *(1,) * len(lengths)),
            (*first.contexts, *lengths),
            torch.cat([F.pad(table, (0, pages - table.shape[1])) for table in tables]),
        )
        return batch, torch.cat((self.prefill.slots, self.decode.slots))

    @property
    def prefill_rows(self) -> int:
        """Prompt tokens that this group computes."""
        return 0 if self.prefill is None else len(self.prefill.ids)

    @property
    def sampled(self) -> list[int]:
        """The requests that get a token from this group, in the order of `logit_rows`."""
        return [chunk.request for chunk in self.finished] + ([] if self.decode is None else list(self.decode.members))

    def stack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions of all rows: prefill, then decode."""
        parts = [rows for rows in (self.prefill, self.decode) if rows is not None]
        return torch.cat([rows.ids for rows in parts]), torch.cat([rows.positions for rows in parts])

    def pick(self, *hidden: torch.Tensor) -> torch.Tensor:
        """The rows that need logits of a stack that came out in one piece or in two."""
        return torch.cat(hidden)[self.logit_rows] if len(hidden) > 1 else hidden[0][self.logit_rows]

    def run_paths(self, fork: Fork, prefill: Path, decode: Path) -> None:
        """Run the attention paths that this iteration has, through the fork where it has both."""
        if self.prefill is None:
            decode(None)
        elif self.decode is None:
            prefill(None)
        else:
            fork.run(prefill, decode)
