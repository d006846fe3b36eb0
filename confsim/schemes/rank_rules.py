"""What real ranks do that the simulated schemes do not by themselves, said once.

Planning on ranks, fitting a profile to them and comparing with them all have to price the same: the host's time is in
series with the ranks' work (no asynchronous scheduling), the attention paths may run one after the other, and on CPU
the rank itself moves a prompt's KV, which lengthens the iteration of its last chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confsim.schemes.cost import CoBatchCost, in_turn


@dataclass(frozen=True)
class RankRules:
    """`in_turn`: attention paths run one after the other. `moves_in_line`: moving KV lengthens an iteration."""

    in_turn: bool
    moves_in_line: bool

    @classmethod
    def of(cls, device: Mapping[str, Any], side_by_side: bool = True, moves_prompts: bool = True) -> RankRules:
        """The rules of ranks on a device (`kind`, `overlap`) in a layout.

        `side_by_side`: the layout can run both paths at once. `moves_prompts`: KV changes its group when a prompt ends.
        """
        turn = not side_by_side or device.get("overlap", "turn") == "turn"
        return cls(turn, moves_prompts and device.get("kind", "cpu") == "cpu")

    def options(self) -> dict[str, bool]:
        """Options of a scheme, as far as it has them, that make it price what these ranks do."""
        changed = {"async_schedule": False}
        if self.in_turn:
            changed["overlap"] = False
        if self.moves_in_line:
            changed["overlap_transfer"] = False
        return changed

    def apply(self, cost: CoBatchCost) -> CoBatchCost:
        """Make a cost price what these ranks do; returns it."""
        cost.async_schedule = False
        if self.in_turn:
            cost.stage = in_turn
        if self.moves_in_line:
            cost.overlap_transfer = False
        return cost
