"""Progress of a sweep: one live display on a terminal, one line a run anywhere else."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from analysis.commands.shared import seconds, share
from analysis.sweep.session import EventReader, Session

POLL_S = 0.2


@dataclass
class Tally:
    """A sweep in numbers; `present` runs were there when it started."""

    planned: int
    present: int
    texts: dict[int, str]
    workers: int = 1
    done: int = 0
    failed: int = 0
    running: set[int] = field(default_factory=set)
    wall_s: float = 0.0  # of the runs done, together
    best: tuple[float, ...] = ()
    best_text: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest will take at the pace so far; None before a run is done."""
        ended = self.done + self.failed
        rest = self.planned - self.present - ended
        if not ended or rest < 0:
            return None
        return (time.monotonic() - self.started) / ended * rest

    def take(self, event: dict[str, Any]) -> None:
        """Count an event."""
        number = event.get("run")
        if event["event"] == "start" and isinstance(number, int):
            self.running.add(number)
        elif event["event"] in ("done", "failed") and isinstance(number, int):
            self.running.discard(number)
            if event["event"] == "failed":
                self.failed += 1
                return
            self.done += 1
            self.wall_s += event["wall_s"]
            rank, text = merit(event["note"])
            if rank > self.best:
                self.best, self.best_text = rank, f"{self.texts.get(number, '')} ({text})"


def merit(note: dict[str, Any]) -> tuple[tuple[float, ...], str]:
    """How good a run is, and that in words: a goodput; or the rate of a run that attains, else its attainment."""
    if "goodput" in note:
        name, value = max(note["goodput"].items(), key=lambda item: (item[1], item[0]), default=("", 0.0))
        return (1.0, value), f"{name} {value:.4g} req/s"
    attainment = float(note["attainment"])
    rate = note.get("rate") or 0.0
    text = share(attainment) + (f" at {rate:.4g} req/s" if rate else "")
    return ((1.0, rate, attainment) if note.get("attained") else (0.0, attainment, rate)), text


def describe(note: dict[str, Any]) -> str:
    """A result in a few words."""
    if "goodput" in note:
        return ", ".join(f"{name} {value:.4g} req/s" for name, value in note["goodput"].items())
    text = f"attainment {share(note['attainment'])}"
    if note.get("rate") is not None:
        text += f" at {note['rate']:.4g} req/s"
    return text + (f", P95 TTFT {seconds(note['ttft_p95_s'])}" if note.get("ttft_p95_s") is not None else "")


class Display(Protocol):
    """Shows a tally as it changes."""

    def show(self, tally: Tally, events: list[dict[str, Any]]) -> None:
        """What happened since the last call."""

    def close(self) -> None:
        """Nothing more will come."""


class Quiet:
    """Shows nothing."""

    def show(self, tally: Tally, events: list[dict[str, Any]]) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing is held."""


class Lines:
    """One line a run that ends, in the order in which they end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ended = 0

    def show(self, tally: Tally, events: list[dict[str, Any]]) -> None:
        """Print what ended."""
        for event in events:
            if event["event"] not in ("done", "failed"):
                continue
            text = tally.texts.get(event["run"], "") or "(no overrides)"
            if event["event"] == "done":
                text += f": {describe(event['note'])}, {event['wall_s']:.2f} s"
            else:
                text += f": FAILED, {event['error']}"
            self._ended += 1
            self._console.print(Text(f"[{tally.present + self._ended}/{tally.planned}] {text}"), soft_wrap=True)

    def close(self) -> None:
        """Nothing is held."""


class Bar:
    """A live line: done, running, failed, time left, best so far."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def show(self, tally: Tally, events: list[dict[str, Any]]) -> None:
        """Redraw; failures stay on the screen."""
        for event in events:
            if event["event"] == "failed":
                text = f"failed: {tally.texts.get(event['run'], '')}: {event['error']}"
                self._progress.console.print(Text(text, style="red"), soft_wrap=True)
        self._progress.update(
            self._task,
            total=tally.planned,
            completed=tally.present + tally.done + tally.failed,
            description=status(tally),
        )

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


def status(tally: Tally) -> str:
    """A tally in words."""
    parts = [f"{len(tally.running)} running"]
    if tally.failed:
        parts.append(f"{tally.failed} failed")
    left = tally.left_s
    if left is not None and math.isfinite(left):
        parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
    if tally.best_text:
        parts.append(f"best {tally.best_text}")
    return ", ".join(parts)


def display(console: Console, quiet: bool) -> Display:
    """A bar on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        return Quiet()
    return Bar(console) if console.is_terminal else Lines(console)


@contextmanager
def watching(session: Session, tally: Tally, show: Callable[[Tally, list[dict[str, Any]]], None]) -> Iterator[None]:
    """Follow a session's events in a thread; the last ones are shown on the way out."""
    reader = EventReader(session)
    over = threading.Event()

    def look() -> None:
        events = reader.new()
        for event in events:
            tally.take(event)
        show(tally, events)

    def follow() -> None:
        while not over.wait(POLL_S):
            look()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
        tally.running.clear()
