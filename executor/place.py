"""Where a rank stands: which heads it computes, and which KV heads travel when a prompt changes hands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from confsim.parallel import HeadSplit
from executor.config import Layout, ModelConfig


@dataclass(frozen=True)
class Place:
    """Rank `group * tp + position`; in the exchange over groups it computes heads of rank `position * groups + group`.

    `local` are the heads of a rank in its TP group, `shared` those of its part in the exchange.
    """

    rank: int
    layout: Layout
    local: HeadSplit
    shared: HeadSplit
    kv_heads: int  # of the whole model

    @classmethod
    def of(cls, rank: int, layout: Layout, model: ModelConfig) -> Place:
        """Place of `rank` for a model whose heads the layout can split."""
        local, shared = layout.heads(model)
        return cls(rank, layout, local, shared, model.num_key_value_heads)

    @property
    def group(self) -> int:
        """Group of this rank."""
        return self.rank // self.layout.tp

    @property
    def position(self) -> int:
        """Position in the TP group."""
        return self.rank % self.layout.tp

    @property
    def groups(self) -> int:
        """Groups of the layout."""
        return self.layout.groups

    @property
    def first_kv_head(self) -> int:
        """First KV head, of the whole model, that this rank's TP share holds."""
        tp = self.layout.tp
        return self.position * self.local.kv_heads if self.kv_heads % tp == 0 else self.position * self.kv_heads // tp

    @cached_property
    def kv_slots(self) -> tuple[tuple[int, ...], ...]:
        """For each group, the local KV heads (positions in the TP share) that its peer in the exchange computes."""
        degree = self.layout.tp * self.groups
        slots = []
        for group in range(self.groups):
            head = self.position * self.groups + group
            first = head * self.shared.kv_heads if self.kv_heads % degree == 0 else head * self.kv_heads // degree
            slots.append(tuple(range(first - self.first_kv_head, first - self.first_kv_head + self.shared.kv_heads)))
        return tuple(slots)

    def unit(self, group: int) -> int:
        """Which head unit of a block the exchange gives to `group` (a unit: `shared.kv_heads` neighbouring heads)."""
        return self.kv_slots[group][0] // self.shared.kv_heads

    def sends(self, source: int, target: int) -> bool:
        """Whether `source` sends its unit when a prompt moves to `target`: one replica of each that is not there."""
        unit = self.unit(source)
        first = next(group for group in range(self.groups) if self.unit(group) == unit)
        return unit != self.unit(target) and first == source
