"""Two phases multiplexed on one group (MuxWise-like): separate batches, side by side on every GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.layouts.base import LayoutKind, LocalAttention, Parts, Runner, run_layers

if TYPE_CHECKING:
    import torch

    from executor.fork import Sms
    from executor.work import Work


class Kind(LayoutKind):
    """One group whose phases never share a batch."""

    side_by_side = True
    two_passes = True

    def runner(self, parts: Parts) -> Runner:
        """A pass over the layers for each phase."""
        return MuxRunner(parts)


class MuxRunner:
    """The prefill batch and the decode batch each make their own pass over the layers, the two at the same time."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.local = LocalAttention(parts, parts.place.local.q_heads)

    def forward(self, work: Work) -> torch.Tensor:
        """Hidden states of the rows that need logits: prefill, then decode."""
        found: dict[str, torch.Tensor] = {}

        def prefill(sms: Sms) -> None:
            found["prefill"] = self._prefill(work, sms)

        def decode(sms: Sms) -> None:
            found["decode"] = self._decode(work, sms)

        work.run_paths(self.parts.fork, prefill, decode)
        return work.pick(*(found[name] for name in ("prefill", "decode") if name in found))

    def _prefill(self, work: Work, sms: Sms) -> torch.Tensor:
        rows, local = work.prefill, self.local
        assert rows is not None
        return run_layers(
            self.parts,
            self.parts.second,
            (rows.ids, rows.positions),
            lambda layer, qkv: local.prefill(layer, qkv, rows, sms).flatten(1),
        )

    def _decode(self, work: Work, sms: Sms) -> torch.Tensor:
        rows, local = work.decode, self.local
        assert rows is not None
        return run_layers(
            self.parts,
            self.parts.linear,
            (rows.ids, rows.positions),
            lambda layer, qkv: local.decode(layer, qkv, rows, sms),
        )
