"""Uniform tensor parallelism, both phases in one batch (chunked prefill): their attention runs in turn."""

from __future__ import annotations

from dataclasses import replace

from executor.layouts.base import LayoutKind, Parts, Runner


class Kind(LayoutKind):
    """One group."""

    live_schemes = ("chunked_prefill",)

    def runner(self, parts: Parts) -> Runner:
        """A single group of Conflux whose two paths never overlap."""
        from executor.fork import Fork
        from executor.layouts.xp import XpRunner

        return XpRunner(replace(parts, fork=Fork()))
