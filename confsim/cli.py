"""The command line: `confsim SUBCOMMAND [key=value ...]`; every subcommand is a Hydra application.

Nothing heavy is imported until a subcommand runs, so that help is immediate.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from confsim.setup import search_path
from traces.files import write_whole

USER_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


@dataclass(frozen=True)
class Subcommand:
    """A row of the table: what `confsim --help` says, and the function `module:function` that takes the config.

    `positional` is the key that bare arguments fill (a list), "" where there are none. `folder` tells whether each run
    gets a new output folder, `sweeps` whether -m is resumable, with a table of all results.
    """

    name: str
    help: str
    example: str
    target: str
    positional: str = ""
    folder: bool = True
    sweeps: bool = False


SUBCOMMANDS = (
    Subcommand(
        "simulate",
        "replay a trace through one scheme (-m sweeps)",
        "confsim simulate trace=toolagent rate=3 scheme=conflux policy=deadline_waterfill",
        "analysis.commands.simulate:command",
        sweeps=True,
    ),
    Subcommand(
        "goodput",
        "find the highest rate at which each scheme keeps its SLO",
        "confsim goodput schemes=[conflux,chunked_prefill] slo.ttft_s=2 slo.tbt_s=0.1",
        "analysis.commands.goodput:command",
        sweeps=True,
    ),
    Subcommand(
        "scenario",
        "time prefills beside a decode load that stays the same",
        "confsim scenario decodes_per_gpu=24 prefill_tokens=32768 tbt_s=0.1 scheme=conflux",
        "analysis.commands.scenario:command",
    ),
    Subcommand(
        "advise",
        "say what a trace asks of a scheme, and which one serves it best",
        "confsim advise trace=mooncake trace.path=conversation_trace.jsonl",
        "analysis.commands.advise:command",
    ),
    Subcommand(
        "stats",
        "describe a trace: lengths, rate, burstiness, reusable prefixes",
        "confsim stats trace=mooncake trace.path=conversation_trace.jsonl",
        "analysis.commands.stats:command",
    ),
    Subcommand(
        "fetch",
        "download public traces into the user cache",
        "confsim fetch conversation",
        "analysis.commands.fetch:command",
        positional="names",
        folder=False,
    ),
    Subcommand(
        "report",
        "draw the HTML report of one or more result folders",
        "confsim report outputs/goodput-2031-01-31_12-00-00-3f9a2c",
        "analysis.commands.report:command",
        positional="folders",
        folder=False,
    ),
    Subcommand(
        "profile",
        "measure real ranks for a latency profile of your own hardware",
        "confsim profile executor=cpu_tiny output=profiles/mine",
        "executor.profile.command:command",
        folder=False,
    ),
    Subcommand(
        "fit",
        "fit a latency profile to kernel measurements",
        "confsim fit source=aiconfigurator model=qwen3_14b gpu=h100_sxm",
        "analysis.calibrate.command:command",
        folder=False,
    ),
    Subcommand(
        "validate",
        "compare simulation with measured engines, or with our own executor",
        "confsim validate source=silicon",
        "analysis.validate.command:command",
    ),
    Subcommand(
        "run",
        "generate tokens on real ranks (CPU or GPU) with a parallel layout",
        "confsim run executor=cpu_tiny prompts='once upon a time' max_tokens=8",
        "executor.generate:command",
    ),
    Subcommand(
        "check",
        "check that ranks on this hardware compute what one CPU rank computes",
        "confsim check executor=cpu_tiny",
        "executor.check:command",
    ),
    Subcommand(
        "experiments",
        "run the controlled experiments and write their page",
        "confsim experiments prefill_rate ablation",
        "analysis.commands.experiments:command",
        positional="only",
        folder=False,
    ),
    Subcommand(
        "compile",
        "compile the event loop, for about twice the speed (needs a C compiler)",
        "confsim compile",
        "confsim.setup.compiling:command",
        folder=False,
    ),
    Subcommand(
        "list",
        "show models, GPUs, schemes, policies and all else that has a name",
        "confsim list scheme policy",
        "analysis.commands.listing:command",
        positional="groups",
        folder=False,
    ),
)


@dataclass
class Failures:
    """Jobs of one invocation that failed: their overrides and what was raised, or the exit code they returned."""

    jobs: list[tuple[str, Exception]] = field(default_factory=list)
    started: int = 0
    code: int = 0  # the highest exit code that a job returned
    folder: Path | None = None  # of the job that ran last


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `confsim`; leaves by SystemExit, code 2 for a user's mistake and 1 for any other failure."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _dispatch(_with_user_folders(words))
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _complain("confsim: interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout at exit
        code = FAILURE
    raise SystemExit(code)


def _with_user_folders(words: list[str]) -> list[str]:
    """Take out `--config-dir FOLDER` and search that folder from now on, in worker processes too."""
    kept, words = [], list(words)
    while words:
        flag, equals, folder = words.pop(0).partition("=")
        if flag not in ("--config-dir", "-cd"):
            kept.append(flag + equals + folder)
        else:
            search_path.add(folder if equals else words.pop(0) if words else "")
    return kept


def _missing_folder() -> Path | None:
    return next((folder for folder in search_path.folders() if not folder.is_dir()), None)


def _dispatch(words: list[str]) -> int:
    if (missing := _missing_folder()) is not None:
        line = f"confsim: --config-dir {missing}: no such folder (see also ${search_path.PATH_ENV})"
        return _complain(line, USER_ERROR)
    table = {row.name: row for row in SUBCOMMANDS}
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"confsim {import_module('importlib.metadata').version('confsim')}")
        return 0
    row = table.get(words[0])
    if row is None:
        from confsim.setup.configuration import did_you_mean

        hint = did_you_mean(words[0], list(table))
        return _complain(f"confsim: no subcommand '{words[0]}'{hint}; use one of {', '.join(table)}", USER_ERROR)
    if "--help" in words[1:] or "-h" in words[1:]:
        return _explain(row, [word for word in words[1:] if word not in ("--help", "-h")])
    return run(row, words[1:])


def _complain(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


# --- help ------------------------------------------------------------------------------------------------------------


def _overview() -> str:
    lines = [
        "confsim: simulate LLM serving on a request trace, and find the goodput of serving schemes",
        "",
        "usage: confsim SUBCOMMAND [key=value ...]     (or python -m confsim)",
        "",
    ]
    width = max(len(row.name) for row in SUBCOMMANDS) + 2
    for row in SUBCOMMANDS:
        lines += [f"  {row.name:<{width}}{row.help}", f"  {'':<{width}}{row.example}"]
    lines += [
        "",
        "confsim SUBCOMMAND --help        its keys, their meaning and the choices of each group",
        "confsim SUBCOMMAND --help GROUP  the keys of a group's choices (model, scheme, trace ...)",
        "confsim SUBCOMMAND --cfg job     the configuration as it would run",
        "confsim SUBCOMMAND -m key=a,b    one run for each combination of values (hydra/launcher=joblib: in parallel)",
        "confsim SUBCOMMAND --quiet       no progress and no tables, only errors",
        "confsim ... --config-dir FOLDER  use your own YAML and Python files too (or set CONFSIM_PATH)",
    ]
    return "\n".join(lines)


def _explain(row: Subcommand, words: Sequence[str]) -> int:
    from confsim.setup.configuration import groups

    unknown = [word for word in words if word not in groups() and "=" not in word and not word.startswith("-")]
    if unknown:
        text = f"confsim {row.name} --help {unknown[0]}: no such group, there are {', '.join(groups())}"
        return _complain(text, USER_ERROR)
    print(_manual(row, words))
    return 0


def _manual(row: Subcommand, words: Sequence[str]) -> str:
    from confsim.setup.configuration import groups, options

    wanted = [word for word in words if word in groups()]
    if wanted:
        return "\n".join(_group_manual(group) for group in wanted)
    bare = f" [{row.positional.upper()} ...]" if row.positional else ""
    lines = [f"confsim {row.name}: {row.help}", "", f"usage:   confsim {row.name}{bare} [key=value ...]"]
    lines += [f"example: {row.example}", "", "Keys", _config_text(row.name)]
    entries = _defaults(row.name)
    if "base" in entries:
        lines.append(_config_text("base"))
        entries = _defaults("base")
    choices = {entry: options(entry) for entry in entries if options(entry)}
    if choices:
        lines += ["", "Groups: GROUP=CHOICE, and GROUP.KEY=VALUE for a key inside"]
        width = max(map(len, choices)) + 2
        lines += [f"  {group:<{width}}{', '.join(names)}" for group, names in choices.items()]
        lines.append(f"  (confsim {row.name} --help GROUP shows the keys of each choice)")
    return "\n".join(lines)


def _config_text(name: str) -> str:
    """A primary configuration as its file documents it, without Hydra's own sections."""
    kept: list[str] = []
    hidden = False
    from confsim.setup.configuration import config_text

    for line in config_text(name).splitlines():
        if line and not line[0].isspace() and not line.startswith(("#", "-")):
            hidden = line.split(":")[0] in ("defaults", "hydra")
        if line.strip() and not hidden:
            kept.append("  " + line)
    return "\n".join(kept)


def _defaults(name: str) -> list[str]:
    """Names in the defaults list of a primary configuration: groups, and other configurations."""
    from confsim.setup.configuration import config_text

    lines = (line for line in config_text(name).splitlines() if line.startswith("  - "))
    return [line.removeprefix("  - ").split(":")[0].strip() for line in lines]


def _group_manual(group: str) -> str:
    from confsim.setup.configuration import config_text, options

    parts = []
    for name in options(group):
        text = "\n".join("  " + line for line in config_text(f"{group}/{name}").splitlines() if line.strip())
        parts.append(f"{group}={name}\n{text}\n")
    return "\n".join(parts)


# --- running ---------------------------------------------------------------------------------------------------------


def run(row: Subcommand, words: list[str]) -> int:
    """Run a subcommand as a Hydra application and return the exit code."""
    failures = Failures()
    sweep = any(word in ("-m", "--multirun") for word in words)
    arguments = ["quiet=true" if word == "--quiet" else word for word in _with_positionals(row, words)]
    if sweep and row.sweeps:
        code = _run_sweep(row, arguments)
        if code is not None:
            return code
    try:
        _run_hydra(row, _with_folders(row, _rewritten(arguments, row, sweep)), sweep, failures)
    except Exception as error:
        if failures.started and sweep:
            return _report_failures(row, failures, error)
        return _report_error(row, arguments, error, bool(failures.started))
    if failures.jobs:
        _drop_empty(failures.folder)
        return _report_error(row, arguments, failures.jobs[0][1], True)
    return failures.code


def _run_sweep(row: Subcommand, arguments: list[str]) -> int | None:
    """The exit code of a resumable sweep, or None where Hydra itself has to run it (another sweeper, --cfg)."""
    try:
        code: int | None = import_module("analysis.sweep.command").main(
            row.name, _with_folders(row, _rewritten(arguments, row, True))
        )
    except Exception as error:
        return _report_error(row, arguments, error, True)
    return code


def _report_error(row: Subcommand, arguments: list[str], error: Exception, started: bool) -> int:
    """One line for a mistake of the user's; the traceback for a defect, or where HYDRA_FULL_ERROR=1 asks for it."""
    from confsim.setup.configuration import config_errors, explain, input_error

    mistake = input_error(error) is not None or isinstance(error, config_errors()) or not started
    if not mistake or os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    if mistake:
        return _complain(f"confsim {row.name}: {explain(error, arguments, row.name)}", USER_ERROR)
    return FAILURE


def _rewritten(words: list[str], row: Subcommand, sweep: bool) -> list[str]:
    from confsim.setup.configuration import rewrite

    return rewrite(words, row.name, sweep)


def _with_positionals(row: Subcommand, words: list[str]) -> list[str]:
    """Bare words as the list that the subcommand's configuration keeps them in."""
    if not row.positional:
        return words
    bare = [word for word in words if not word.startswith("-") and ("=" not in word or Path(word).exists())]
    if not bare:
        return words
    quoted = ",".join("'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in bare)
    return [word for word in words if word not in bare] + [f"{row.positional}=[{quoted}]"]


def _with_folders(row: Subcommand, words: list[str]) -> list[str]:
    """A folder that no other run has, unless the user named one or the subcommand has no use for one."""
    if not row.folder:
        return [*words, "hydra.run.dir=."]
    token = f"{row.name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(4)}"
    defaults = {"hydra.run.dir": f"${{output.dir}}/{token}", "hydra.sweep.dir": f"${{output.dir}}/{token}"}
    given = {word.split("=")[0] for word in words}
    return words + [f"{key}={value}" for key, value in defaults.items() if key not in given]


def _run_hydra(row: Subcommand, words: list[str], sweep: bool, failures: Failures) -> None:
    import hydra

    from confsim.setup.config_source import register

    def job(cfg: Any) -> None:
        _run_job(row, cfg, sweep, failures)

    register()
    with _patched(words, row):
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name=row.name)(job)()


@contextmanager
def _patched(words: list[str], row: Subcommand) -> Iterator[None]:
    """Hydra reads the process's arguments, and prints errors itself unless told to raise them."""
    saved, flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"confsim {row.name}", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = saved
        if flag is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = flag


def _run_job(row: Subcommand, cfg: Any, sweep: bool, failures: Failures) -> None:
    from hydra.core.hydra_config import HydraConfig

    from confsim.setup.configuration import check

    overrides = list(HydraConfig.get().overrides.task)
    failures.started += 1
    failures.folder = Path(HydraConfig.get().runtime.output_dir)
    if sweep:
        print(f"[{HydraConfig.get().job.num}] {' '.join(overrides)}", flush=True)
    try:
        check(cfg, overrides, row.name)
        failures.code = max(failures.code, load(row.target)(cfg) or 0)
    except Exception as error:
        failures.jobs.append((" ".join(overrides), error))
        if sweep:  # Hydra runs the others and raises at the end; of a single run it would print a line of its own
            _keep_traceback(Path(HydraConfig.get().runtime.output_dir), error)
            raise


def _drop_empty(folder: Path | None) -> None:
    """Remove the folder of a run that wrote no result: it holds Hydra's notes alone."""
    if folder is not None and folder.is_dir() and {path.name for path in folder.iterdir()} == {".hydra"}:
        shutil.rmtree(folder)


def load(target: str) -> Callable[[Any], int | None]:
    """The function that `module:function` names; it takes the configuration and may return an exit code."""
    module, _, name = target.partition(":")
    function: Callable[[Any], int | None] = getattr(import_module(module), name)
    return function


def _keep_traceback(folder: Path, error: Exception) -> None:
    write_whole(folder / "error.txt", "".join(traceback.format_exception(error)))


def _report_failures(row: Subcommand, failures: Failures, error: Exception) -> int:
    """Name the jobs of a sweep that failed; their tracebacks are in their folders."""
    from confsim.setup.configuration import input_error, one_line

    jobs = failures.jobs or [("", error)]
    print(f"confsim {row.name}: {len(jobs)} of {failures.started} runs failed", file=sys.stderr)
    for overrides, failure in jobs:
        text = str(input_error(failure) or f"{type(failure).__name__}: {failure}")
        print(f"  {overrides}: {one_line(text)}", file=sys.stderr)
    mistakes = all(input_error(failure) for _, failure in jobs)
    return USER_ERROR if mistakes else FAILURE
