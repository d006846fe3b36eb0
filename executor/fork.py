"""Running the two attention paths side by side, or in turn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

Path = Callable[[], None]


class Fork(Protocol):
    """Runs two paths that write to separate memory; both see what came before, and what follows sees both."""

    @property
    def name(self) -> str:
        """turn, threads, streams or partition."""

    @property
    def facts(self) -> dict[str, object]:
        """What results record: sizes of a partition, or why there is none."""

    def run(self, prefill: Path, decode: Path) -> None:
        """Run both to their end (on CUDA: enqueue both and their join)."""

    def close(self) -> None:
        """Release threads and streams."""


class TurnFork:
    """One after the other."""

    name = "turn"

    @property
    def facts(self) -> dict[str, object]:
        """Nothing more."""
        return {}

    def run(self, prefill: Path, decode: Path) -> None:
        """Prefill, then decode."""
        prefill()
        decode()

    def close(self) -> None:
        """Nothing is held."""


class ThreadFork:
    """Decode on a second thread: the calls that wait, or release the interpreter, overlap."""

    name = "threads"

    @property
    def facts(self) -> dict[str, object]:
        """Nothing more."""
        return {}

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode-path")

    def run(self, prefill: Path, decode: Path) -> None:
        """Both at once; an error of either is raised here."""
        other = self._pool.submit(_inference, decode)
        try:
            prefill()
        finally:
            failure = other.exception()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


def _inference(path: Path) -> None:
    with torch.inference_mode():
        path()
