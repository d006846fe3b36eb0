"""`confsim SUBCOMMAND -m ...`: a sweep on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from analysis.commands.shared import shown
from analysis.sweep.driver import Sweep, SweepOutcome
from analysis.sweep.expand import expand
from analysis.sweep.folder import TABLE

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130
FLAGS = ("-m", "--multirun")


def main(command: str, words: Sequence[str]) -> int | None:
    """Run a sweep and return the exit code; None where Hydra itself has to do it (other flags, another sweeper).

    Raises:
        InputError: for a mistake that concerns the whole sweep.
    """
    own = [word for word in words if word not in FLAGS]
    grid = None if any(word.startswith("-") for word in own) else expand(command, own)
    if grid is None:
        return None
    console = None if grid.option("quiet", False) else Console(soft_wrap=True)
    outcome = Sweep(grid, console).run()
    if console is not None:
        reused = f" ({outcome.reused} from before)" if outcome.reused else ""
        console.print(Text(f"{outcome.present} of {outcome.planned} results{reused}: {shown(outcome.folder / TABLE)}"))
        if outcome.best:
            console.print(Text(f"best: {outcome.best}"))
        console.print(Text(f"draw them: confsim report {shown(outcome.folder)}"))
    for line in _missing(command, outcome):  # said even if quiet
        print(line, file=sys.stderr)
    return _code(outcome)


def _code(outcome: SweepOutcome) -> int:
    if outcome.interrupted:
        return INTERRUPTED
    if outcome.failures and all(failure.mistake for failure in outcome.failures) and not outcome.disk_full:
        return MISTAKE
    return 0 if outcome.complete else FAILURE


def _missing(command: str, outcome: SweepOutcome) -> Iterator[str]:
    """Lines about the runs that have no result."""
    if outcome.failures:
        yield f"confsim {command}: {len(outcome.failures)} of {outcome.planned} runs failed"
    for failure in outcome.failures:
        yield f"  {failure.text}: {failure.error} ({shown(failure.traceback)})"
    if outcome.present + len(outcome.failures) < outcome.planned:
        why = "interrupted" if outcome.interrupted else "the disk is full" if outcome.disk_full else "stopped"
        there = f"{outcome.present} of {outcome.planned} results are there"
        yield f"confsim {command}: {why}, {there}; the same command goes on where this one ended"
