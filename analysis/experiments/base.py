"""What the experiments share: their settings, the cells they ask for, the sections they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.markdown import table
from analysis.pages.charts import Figure
from confsim.errors import InputError
from confsim.setup.configuration import options
from traces.catalog import CATALOG, cache_directory

WORKLOADS = ("toolagent", "conversation", "synthetic", "qwen_a")
MODELS = {  # of the comparison: the GPUs they run on, and GPUs of a group
    "llama3_1_8b": (4, 1),
    "qwen3_14b": (4, 1),
    "qwen3_32b": (8, 2),
}


@dataclass(frozen=True)
class Settings:
    """What a run of the experiments is asked for.

    `requests` of a slice (None: whole traces); `full` runs every combination; `trace_folder` is searched for public
    traces besides the user's cache. Searches end at `tolerance`, zero-load attainment is of `zero_load_requests`.
    """

    requests: int | None = 1000
    seed: int = 0
    tolerance: float = 0.02
    zero_load_requests: int = 128
    models: tuple[str, ...] = tuple(MODELS)
    workloads: tuple[str, ...] = WORKLOADS
    trace_folder: Path | None = None
    full: bool = False

    def __post_init__(self) -> None:
        for key, known in (("models", tuple(MODELS)), ("workloads", WORKLOADS)):
            for name in getattr(self, key):
                if name not in known:
                    raise InputError(f"{key}={name}: unknown, use {', '.join(known)}")
        if self.requests is not None and self.requests < 1:
            raise InputError(f"requests={self.requests}: use 1 or more, or null for whole traces")
        if not 0 < self.tolerance < 1:
            raise InputError(f"tolerance={self.tolerance}: use a share between 0 and 1, such as 0.02")

    def trace(self, workload: str) -> tuple[str, ...]:
        """Overrides that read the recorded trace of a workload where there is one, else the synthetic preset."""
        entry = CATALOG[workload]
        for folder in (self.trace_folder, cache_directory()):
            path = folder / entry.filename if folder is not None else None
            if path is not None and path.is_file():
                return (f"trace={entry.format}", f"trace.path='{path}'")
        return (f"trace={workload}", *(("trace.requests=null",) if self.requests is None else ()))

    def is_recorded(self, workload: str) -> bool:
        """Whether its recorded trace is there."""
        return self.trace(workload)[0] != f"trace={workload}"

    def title(self, workload: str) -> str:
        """Name of a workload in tables."""
        return workload if self.is_recorded(workload) else f"{workload} (preset)"


@dataclass(frozen=True)
class ExperimentCell:
    """One piece of work: what to run (`kind`), and its parameters as plain JSON data; `label` is for people."""

    kind: str
    label: str
    params: dict[str, Any]

    @property
    def size(self) -> int:
        """About how long it takes beside others: a search for each of a lane's variants, nothing to speak of else."""
        return len(self.params.get("variants", ()))


@dataclass
class Section:
    """A page's part: Markdown, and figures by file name; `![...](NAME)` in the text shows one."""

    title: str
    lines: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)

    def text(self, *paragraphs: str) -> None:
        """Add paragraphs."""
        for paragraph in paragraphs:
            self.lines += [paragraph, ""]

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table; the first column is text, the others are numbers."""
        self.lines += [table(head, rows), ""]

    def figure(self, name: str, figure: Figure, caption: str) -> None:
        """Add a figure."""
        self.figures[name] = figure
        self.lines += [f"![{caption}](experiments/{name}.svg)", ""]


Results = Mapping[str, dict[str, Any]]  # by the keys of `cells`


@dataclass(frozen=True)
class Experiment:
    """An experiment: the cells of a run by key, and the section that their results make."""

    name: str
    title: str
    cells: Callable[[Settings], dict[str, ExperimentCell]]
    section: Callable[[Settings, Results], Section]


# --- schemes ---------------------------------------------------------------------------------------------------------

PLAIN = {  # rows of the scenarios, by name
    "Conflux": ("scheme=conflux",),
    "Conflux, adaptive split": ("scheme=conflux", "scheme.sm_split=adaptive"),
    "uniform SP": ("scheme=uniform_sp",),
    "chunked prefill, TP": ("scheme=chunked_prefill",),
    "data parallel": ("scheme=data_parallel",),
    "MuxWise": ("scheme=muxwise",),
    "LoongServe": ("scheme=loongserve",),
    "disaggregated 1+3": ("scheme=disaggregated", "scheme.split=1+3"),
    "disaggregated 1+1": ("scheme=disaggregated", "scheme.split=1+1"),
}


def registered(rows: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The rows whose scheme exists, and a row with its defaults for every scheme that none names."""
    known = options("scheme")
    named = {row[0].removeprefix("scheme=") for row in rows.values()}
    found = {name: row for name, row in rows.items() if row[0].removeprefix("scheme=") in known}
    return found | {name: (f"scheme={name}",) for name in known if name not in named}


def scenario(label: str, *overrides: str, **keys: Any) -> ExperimentCell:
    """A cell that runs `confsim scenario` with these overrides and keys."""
    written = [f"{key}={_written(value)}" for key, value in keys.items()]
    return ExperimentCell("scenario", label, {"overrides": [*overrides, *written]})


def _written(value: Any) -> str:
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, (list, tuple)) else str(value)


def kilo(tokens: int) -> str:
    """A length in binary thousands of tokens, as people say it."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def mean_s(result: dict[str, Any]) -> float | None:
    """Mean prefill time of a scenario; None where it was refused."""
    times = result.get("prefill_s")
    return sum(times) / len(times) if times else None


def number(value: float | None, digits: int = 3) -> str:
    """A number of so many digits, a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}g}"


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds."""
    return "–" if value is None else f"{value * 1e3:.1f}"


def refusals(results: Results) -> list[str]:
    """A line for each result that a scheme refused."""
    return [f"- {key}: {result['refused']}" for key, result in results.items() if "refused" in result]
