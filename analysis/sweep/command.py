"""`confsim SUBCOMMAND -m ...`: a sweep on the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from analysis.commands.shared import shown
from analysis.sweep.driver import Outcome, Sweep
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
    if any(word.startswith("-") for word in own):
        return None
    grid = expand(command, own)
    if grid is None:
        return None
    quiet = bool(grid.option("quiet", False))
    console = Console(soft_wrap=True)
    outcome = Sweep(grid, quiet, console).run()
    _report(console, command, outcome, quiet)
    return _code(outcome)


def _code(outcome: Outcome) -> int:
    if outcome.interrupted:
        return INTERRUPTED
    if outcome.failures and all(failure.mistake for failure in outcome.failures) and not outcome.disk_full:
        return MISTAKE
    return 0 if outcome.complete else FAILURE


def _report(console: Console, command: str, outcome: Outcome, quiet: bool) -> None:
    """Where the results are, and what is missing: that goes to standard error and is said even if quiet."""
    if not quiet:
        path = outcome.folder / TABLE
        reused = f" ({outcome.reused} from before)" if outcome.reused else ""
        console.print(Text(f"{outcome.present} of {outcome.planned} results{reused}: {shown(path)}"))
        if outcome.best:
            console.print(Text(f"best: {outcome.best}"))
        console.print(Text(f"draw them: confsim report {shown(outcome.folder)}"))
    for line in _missing(command, outcome):
        print(line, file=sys.stderr)


def _missing(command: str, outcome: Outcome) -> list[str]:
    lines = []
    if outcome.failures:
        lines.append(f"confsim {command}: {len(outcome.failures)} of {outcome.planned} runs failed")
        lines += [f"  {failure.text}: {failure.error} ({shown(failure.traceback)})" for failure in outcome.failures]
    absent = outcome.planned - outcome.present - len(outcome.failures)
    if absent:
        why = "interrupted" if outcome.interrupted else "the disk is full" if outcome.disk_full else "stopped"
        lines.append(
            f"confsim {command}: {why}, {outcome.present} of {outcome.planned} results are there; "
            "the same command goes on where this one ended"
        )
    return lines
