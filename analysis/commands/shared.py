"""What subcommands share: their folder, and how numbers and warnings look on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from confsim.errors import InputError

PIPED_WIDTH = 160  # columns of tables that go to a file or a pipe


def run_folder() -> Path:
    """The output folder of the running job.

    Raises:
        InputError: if it holds a result already (only where the user named the folder).
    """
    from hydra.core.hydra_config import HydraConfig

    folder = Path(HydraConfig.get().runtime.output_dir)
    for name in ("summary.json", "goodput.json"):
        if (folder / name).exists():
            raise InputError(f"{folder} already holds a result ({name}): name a new folder in hydra.run.dir")
    return folder


def in_sweep() -> bool:
    """Whether the running job is one of a sweep (-m)."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.get().mode == RunMode.MULTIRUN


def make_console() -> Console:
    """Standard output; a table keeps its width where nobody looks at it in a window."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=PIPED_WIDTH)


def shown(path: Path) -> str:
    """A path as short as it can be said from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def seconds(value: float | None) -> str:
    """Seconds with a unit that fits; a dash where there is no finite value."""
    if value is None or not math.isfinite(value):
        return "–"
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms"


def share(value: float | None) -> str:
    """A share in percent; a dash where there is none."""
    return "–" if value is None else f"{value:.1%}"


def rate(value: float | None) -> str:
    """Requests per second with three digits that count."""
    return "–" if value is None else f"{value:.3g}"


def print_warnings(console: Console, lines: Iterable[str]) -> None:
    """One line a warning; text of the results is never taken for markup."""
    for line in lines:
        console.print(Text("warning: ", style="yellow") + Text(line))


def percentiles(summary: dict[str, Any], key: str) -> list[str]:
    """p50, p95 and p99 of a statistic as text."""
    values = summary.get(key) or {}
    return [seconds(values.get(name)) for name in ("p50", "p95", "p99")]
