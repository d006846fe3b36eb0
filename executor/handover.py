"""Moving finished prompts: KV shards go once to the group of the decode, layer by layer beside the last chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor.collectives import Groups, Wait
from executor.kv import PagedStore, UnitPool
from executor.place import Place
from executor.upload import upload


@dataclass(frozen=True)
class Move:
    """A prompt of `tokens` tokens that decodes on `group`."""

    request: int
    tokens: int
    group: int


@dataclass(frozen=True)
class _Flight:
    layer: int
    data: torch.Tensor
    wait: Wait


class Handover:
    """The moves of one iteration, from one rank's side.

    Each group that holds a unit of heads first sends it to every target that lacks it; the target's own unit is copied.
    At most two layers are in flight.
    """

    def __init__(
        self, place: Place, groups: Groups, pool: UnitPool, prompts: PagedStore, decodes: PagedStore, moves: list[Move]
    ) -> None:
        self._groups = groups
        self._pool = pool
        self._flights: list[_Flight] = []
        me, device = place.group, pool.keys.device
        width = 2 * place.shared.kv_heads * pool.keys.shape[-1]
        by_group = [[move for move in moves if move.group == group] for group in range(place.groups)]
        totals = [sum(move.tokens for move in batch) for batch in by_group]
        targets = [group for group in range(place.groups) if totals[group] and place.sends(me, group)]
        self._send_sizes = [totals[g] * width if g in targets else 0 for g in range(place.groups)]
        self._sources = [g for g in range(place.groups) if totals[me] and place.sends(g, me)]
        self._sizes = [totals[me] * width if g in self._sources else 0 for g in range(place.groups)]
        self._units = [place.unit(g) for g in self._sources]
        self._send_slots = [_slots(prompts, by_group[group], device)[:, 0] for group in targets]
        self._own = place.unit(me)
        self._mine = totals[me] > 0
        if self._mine:
            self._from = _slots(prompts, by_group[me], device)[:, 0]
            self._to = _slots(decodes, by_group[me], device)

    def start(self, layer: int) -> None:
        """Send a layer whose prompt KV is complete; an earlier layer lands meanwhile."""
        keys, values = self._pool.flat(layer)
        parts = [torch.stack((keys[slots], values[slots])).flatten() for slots in self._send_slots]
        data = torch.cat(parts) if parts else keys.new_empty(0)
        out = keys.new_empty(sum(self._sizes))
        self._groups.count("kv_transfer", data)
        wait = self._groups.transfer.start_all_to_all(out, data, self._sizes, self._send_sizes)
        if self._mine:
            to = self._to[:, self._own]
            keys.index_copy_(0, to, keys[self._from])
            values.index_copy_(0, to, values[self._from])
        self._flights.append(_Flight(layer, out, wait))
        if len(self._flights) > 2:
            self._land(self._flights.pop(0))

    def finish(self) -> None:
        """Wait for what is still in flight."""
        while self._flights:
            self._land(self._flights.pop(0))

    def _land(self, flight: _Flight) -> None:
        flight.wait()
        if not self._sources:
            return
        keys, values = self._pool.flat(flight.layer)
        parts = flight.data.view(len(self._sources), 2, len(self._to), *keys.shape[1:])
        for unit, part in zip(self._units, parts, strict=True):
            keys.index_copy_(0, self._to[:, unit], part[0])
            values.index_copy_(0, self._to[:, unit], part[1])


def _slots(store: PagedStore, moves: list[Move], device: torch.device) -> torch.Tensor:
    found = [
        store.slots(np.full(move.tokens, store.rows[move.request]), np.arange(move.tokens, dtype=np.int64))
        for move in moves
    ]
    return upload(np.concatenate(found), device)
