"""Progress of a goodput search: live bars on a terminal, one line a probe anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from analysis.search.compare import Listener
from analysis.search.goodput import Probe


def describe(probe: Probe) -> str:
    """A probe in a few words."""
    low, high = probe.attainment_low, probe.attainment_high
    attained = f"{low:.1%}" if low == high else f"{low:.1%} to {high:.1%}, decided early"
    return f"{probe.rate:8.3f} req/s  {'pass' if probe.passed else 'fail'}  attainment {attained}"


def _with_values(scheme: str, values: dict[str, Any]) -> str:
    return scheme + "".join(f" {key.removeprefix('scheme.')}={value}" for key, value in values.items())


class Lines(Listener):
    """One line a probe, in the order in which they end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def probed(self, scheme: str, values: dict[str, Any], probe: Probe) -> None:
        """Print the probe."""
        self._console.print(Text(f"{_with_values(scheme, values)}  {describe(probe)}"), soft_wrap=True)

    def finished(self, scheme: str, goodput: float) -> None:
        """Print the goodput."""
        self._console.print(Text(f"{scheme}  goodput {goodput:.4g} req/s"), soft_wrap=True)


class Bars(Listener):
    """A live line for each scheme: probes done, of those handed out so far, and the latest."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[scheme]}", style="bold"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}
        self._handed_out: dict[str, int] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, scheme: str, tasks: int) -> None:
        """Count the runs of the round."""
        if scheme not in self._bars:
            self._bars[scheme] = self._progress.add_task("starting", scheme=scheme, total=0)
        self._handed_out[scheme] = self._handed_out.get(scheme, 0) + tasks
        self._progress.update(self._bars[scheme], total=self._handed_out[scheme])

    def probed(self, scheme: str, values: dict[str, Any], probe: Probe) -> None:
        """Show the probe."""
        text = " ".join(f"{key.removeprefix('scheme.')}={value}" for key, value in values.items())
        self._progress.update(self._bars[scheme], advance=1, description=f"{text} {describe(probe)}".strip())

    def finished(self, scheme: str, goodput: float) -> None:
        """Show the goodput."""
        self._progress.update(self._bars[scheme], description=f"goodput {goodput:.4g} req/s")


def listener(console: Console) -> Lines | Bars:
    """Bars on a terminal, lines elsewhere."""
    return Bars(console) if console.is_terminal else Lines(console)
