"""Two phases multiplexed on one layout (MuxWise-like): separate batches, side by side on every GPU."""

from __future__ import annotations

import torch

from executor.layouts.base import LocalAttention, Parts, run_layers
from executor.work import Work


class MuxRunner:
    """The prefill batch and the decode batch each make their own pass over the layers, the two at the same time."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.local = LocalAttention(parts, parts.place.local.q_heads)

    def forward(self, work: Work) -> torch.Tensor:
        """Hidden states of the rows that need logits: prefill, then decode."""
        found: dict[str, torch.Tensor] = {}

        def prefill() -> None:
            found["prefill"] = self._prefill(work)

        def decode() -> None:
            found["decode"] = self._decode(work)

        if work.prefill is None:
            decode()
        elif work.decode is None:
            prefill()
        else:
            self.parts.fork.run(prefill, decode)
        parts = [found[name] for name in ("prefill", "decode") if name in found]
        return torch.cat(parts)[work.logit_rows]

    def _prefill(self, work: Work) -> torch.Tensor:
        rows, parts, local = work.prefill, self.parts, self.local
        assert rows is not None

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            with parts.clock.stage("prefill_attention"):
                local.append(layer, qkv, rows.slots)
                return local.prefill(layer, qkv, rows).flatten(1)

        return run_layers(parts.second, parts.clock, parts.layers, (rows.ids, rows.positions), attend)

    def _decode(self, work: Work) -> torch.Tensor:
        rows, parts, local = work.decode, self.parts, self.local
        assert rows is not None

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            with parts.clock.stage("decode_attention"):
                local.append(layer, qkv, rows.slots)
                return local.decode(layer, qkv, rows)

        return run_layers(parts.linear, parts.clock, parts.layers, (rows.ids, rows.positions), attend)
