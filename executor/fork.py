"""Running the two attention paths side by side, or in turn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

Sms = int | None  # SMs that a path has to itself; None: no part of the device is set aside for it
Path = Callable[[Sms], None]


class Fork:
    """Runs two paths that write to separate memory: here, one after the other.

    Both see what came before, and what follows sees both. `name` is turn, threads, streams or partition; `facts` are
    what results record: sizes of a partition, or why there is none.
    """

    name: str = "turn"

    def __init__(self, facts: dict[str, object] | None = None) -> None:
        self.facts = facts or {}

    def run(self, prefill: Path, decode: Path) -> None:
        """Run both to their end (on CUDA: enqueue both and their join)."""
        prefill(None)
        decode(None)

    def close(self) -> None:
        """Release threads and streams."""


class ThreadFork(Fork):
    """Decode on a second thread: the calls that wait, or release the interpreter, overlap."""

    name = "threads"

    def __init__(self) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode-path")

    def run(self, prefill: Path, decode: Path) -> None:
        """Both at once; an error of either is raised here."""
        other = self._pool.submit(_inference, decode)
        try:
            prefill(None)
        finally:
            failure = other.exception()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


def _inference(path: Path) -> None:
    with torch.inference_mode():
        path(None)
