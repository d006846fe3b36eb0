"""Progress of a sweep: one live line on a terminal, one line per run anywhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from analysis.commands.shared import seconds, share
from analysis.sweep.expand import SweepRun
from analysis.sweep.folder import RUN, SweepFolder, failure_of, read_record
from analysis.sweep.session import Session

POLL_S = 0.2


class Progress:
    """Counts the runs of `todo` that end, as seen in their folders, and says so; nothing is said without a console."""

    def __init__(self, folder: SweepFolder, todo: Sequence[SweepRun], planned: int, console: Console | None) -> None:
        self.ended = self.failed = self.running = 0
        self.best = ""
        self._best_rank: tuple[float, ...] = ()
        self._folder = folder
        self._open = {run.number: run for run in todo}
        self._there = planned - len(todo)
        self._planned = planned
        self._console = console
        self._began = time.monotonic()
        self._bar = _bar(console) if console is not None and console.is_terminal else None

    @contextmanager
    def following(self, session: Session) -> Iterator[None]:
        """Look at what a session does until the block ends, and once more then."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(POLL_S):
                self.look(session.claimed())

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.look(session.claimed())

    def look(self, claimed: set[int]) -> None:
        """Count what ended among the runs that were taken."""
        self.running = 0
        for run in [self._open[number] for number in sorted(claimed & self._open.keys())]:
            if self._folder.state(run.id) == "missing":
                self.running += 1
            else:
                self._end(self._open.pop(run.number))
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                total=self._planned,
                completed=self._there + self.ended,
                description=self.describe(),
            )

    def close(self) -> None:
        """Stop drawing."""
        if self._bar is not None:
            self._bar.stop()

    def describe(self) -> str:
        """Everything so far in words."""
        parts = [f"{self.running} running"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.ended:
            left_s = int((time.monotonic() - self._began) / self.ended * (self._planned - self._there - self.ended))
            parts.append(f"{left_s // 60}:{left_s % 60:02d} left")
        if self.best:
            parts.append(f"best {self.best}")
        return ", ".join(parts)

    def _end(self, run: SweepRun) -> None:
        self.ended += 1
        folder = self._folder.run(run.id)
        failure = failure_of(folder)
        if failure is not None:
            self.failed += 1
            self._say(run, f"FAILED, {failure.get('error')}", "red")
            return
        content = read_record(folder / "summary.json") or read_record(folder / "goodput.json")
        rank, text = merit(content)
        if rank > self._best_rank:
            self._best_rank, self.best = rank, f"{run.text} ({text})"
        if self._bar is None:
            self._say(run, f"{gist(content)}, {read_record(folder / RUN).get('wall_s', 0.0):.2f} s")

    def _say(self, run: SweepRun, text: str, style: str = "") -> None:
        console = self._bar.console if self._bar is not None else self._console
        if console is not None:
            line = f"[{self._there + self.ended}/{self._planned}] {run.text or '(no overrides)'}: {text}"
            console.print(Text(line, style=style), soft_wrap=True)


def _bar(console: Console) -> Bar:
    text = TextColumn("{task.description}", markup=False)
    bar = Bar(BarColumn(bar_width=20), MofNCompleteColumn(), text, console=console)
    bar.add_task("starting", total=None)
    bar.start()
    return bar


def merit(content: Mapping[str, Any]) -> tuple[tuple[float, ...], str]:
    """How good a result is, and that in words: its goodput; or the rate of a run that attains, else its attainment.

    `content` is that of summary.json or goodput.json.
    """
    if "schemes" in content:
        found = {name: entry["goodput"] for name, entry in content["schemes"].items()}
        name, value = max(found.items(), key=lambda item: (item[1], item[0]), default=("", 0.0))
        return (1.0, value), f"{name} {value:.4g} req/s"
    attainment, rate = float(content["attainment"] or 0.0), content["offered_rate"] or 0.0
    text = share(attainment) + (f" at {rate:.4g} req/s" if rate else "")
    return ((1.0, rate, attainment) if content["attained"] else (0.0, attainment, rate)), text


def gist(content: Mapping[str, Any]) -> str:
    """A result in a few words."""
    if "schemes" in content:
        return ", ".join(f"{name} {entry['goodput']:.4g} req/s" for name, entry in content["schemes"].items())
    text, ttft = f"attainment {merit(content)[1]}", (content.get("ttft_s") or {}).get("p95")
    if content["attainment"] is None:
        text = "no SLO"
    return text + (f", P95 TTFT {seconds(ttft)}" if ttft is not None else "")
