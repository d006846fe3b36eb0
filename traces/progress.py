"""Rows per second of a long read, on standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from traces.readers.base import Progress

QUIET_S = 1.0  # reads shorter than this show nothing


def console_progress(label: str = "reading", stream: TextIO | None = None) -> Progress:
    """A callback for `FileTrace.load`: shows rows and rows per second of reads longer than a second.

    A terminal gets one line that is rewritten; anything else gets one line at the end.
    """
    out = stream or sys.stderr
    start = time.perf_counter()

    def show(rows: int, rows_per_s: float, share: float) -> None:
        if time.perf_counter() - start < QUIET_S:
            return
        text = f"{label}: {rows:,} rows, {rows_per_s:,.0f} rows/s, {share:.0%}"
        if out.isatty():
            out.write(f"\r{text}" + ("\n" if share >= 1 else ""))
        elif share >= 1:
            out.write(text + "\n")
        out.flush()

    return show
