"""Uniform tensor parallelism, both phases in one batch (chunked prefill): attention in turn, or in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from executor.layouts.base import LayoutKind, Parts, Runner
from executor.layouts.xp import XpRunner

if TYPE_CHECKING:
    import torch

    from executor.work import Work


class Kind(LayoutKind):
    """One group."""

    live_schemes = ("chunked_prefill",)

    def runner(self, parts: Parts) -> Runner:
        """A single group of Conflux whose two paths never overlap."""
        from executor.fork import Fork

        kind = OneCallRunner if parts.one_kernel else XpRunner
        return kind(replace(parts, fork=Fork()))


class OneCallRunner(XpRunner):
    """Attention of both phases in one variable-length call, in which a decode is a chunk of one token."""

    def _attend(self, work: Work, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        if work.prefill is None or work.decode is None:
            return super()._attend(work, layer, qkv)
        batch, slots = work.joined
        with self.parts.clock.stage("prefill_attention"):
            self.local.append(layer, qkv, slots)
            return self.local.attend_batch(layer, qkv, batch).flatten(1)
