"""A worker of a sweep: takes runs from the session's plan until none is left.

Started by a Hydra launcher on this machine or another; it knows nothing of the command line. What it runs are
resolved configurations.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from analysis.identity import code_version
from analysis.sweep.expand import SweepRun
from analysis.sweep.folder import SweepFolder
from analysis.sweep.session import Session, is_orphaned
from confsim.errors import InputError
from confsim.setup.configuration import input_error, one_line
from traces.files import is_full
from traces.trace import Trace

INTERRUPTED = 130
TRACE_KEYS = ("trace", "seed", "kv", "cluster", "cache")
KEPT_TRACES = 4  # of a worker, so that sweeps over traces stay small


def work(cfg: Any) -> bool:
    """What a launcher calls: `cfg` is `conf/sweep_worker.yaml`. Returns whether the disk is full.

    Raises:
        KeyboardInterrupt: where it runs inside the sweep's own process, which has to end.
    """
    session = Session(Path(str(cfg.session)))
    first, *lines = session.plan() or [b"null"]
    about = json.loads(first)
    if about is None:
        return False
    folder = SweepFolder(Path(str(cfg.folder)), Path(about["index"]))
    owner = about["owner"]
    is_inside = owner == [socket.gethostname(), os.getpid()]
    try:
        with nullcontext() if is_inside else session.attended(int(cfg.worker), owner):
            for line in lines:
                if session.is_over:
                    break
                run = SweepRun(**json.loads(line))
                if session.claim(run.number):
                    make(run, about["command"], folder, session)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and is_inside:
            raise
        if is_full(error):
            session.stop()
            return True
        if is_orphaned(owner):  # nobody takes the answer, and the launcher's pool would wait for more work
            os._exit(INTERRUPTED)
        if not session.is_over:
            raise
    finally:
        _trace.cache_clear()  # files may change until the next sweep of this process
        _compiled.cache_clear()
    return False


def make(run: SweepRun, command: str, folder: SweepFolder, session: Session) -> None:
    """Make one run; what it raises is recorded in its folder.

    Raises:
        BaseException: if the disk is full or the session over: the run is not to blame, and is made again.
    """
    about: dict[str, Any] = {"command": command, "text": run.text, "identity": run.identity, "config": run.config}
    began = time.perf_counter()
    try:
        if run.mistake:
            raise InputError(run.mistake)
        if code_version(command, run.config) != run.identity["code"]:
            raise RuntimeError("the code changed while the sweep ran, or differs on this machine: start it again")
        with folder.draft(run.id) as draft:
            COMMANDS[command](run.config, draft)
            folder.finish(draft, run.id, about | {"wall_s": round(time.perf_counter() - began, 3)})
    except BaseException as error:  # sys.exit in a run ends the run, not the sweep
        if isinstance(error, KeyboardInterrupt) or is_full(error) or session.is_over:
            raise
        about |= {"error": _message(error), "mistake": input_error(error) is not None}
        folder.fail(run.id, about, "".join(traceback.format_exception(error)))


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the run called sys.exit({error.code!r})"
    known = input_error(error)
    return one_line(str(known) if known is not None else f"{type(error).__name__}: {error}")


# --- what a sweep can run --------------------------------------------------------------------------------------------


def simulate(config: Mapping[str, Any], folder: Path) -> None:
    """Write one replay to a folder; the runs of a worker share traces and compiled latency models."""
    from omegaconf import OmegaConf

    from analysis.pages.timeline import write_timeline
    from analysis.search.knee import attainment_band
    from confsim import api

    cfg = OmegaConf.create(dict(config))
    trace = _trace(json.dumps({key: config.get(key) for key in TRACE_KEYS}))
    compiled = _compiled(json.dumps([config[key] for key in ("latency", "model", "gpu")]))
    result = replace(api.build(cfg, trace), compiled=compiled).run()
    if config["output"].get("band") is True and result.summary["slo"] is not None:
        result = replace(result, summary={**result.summary, "band": attainment_band(cfg, result)})
    result.write(folder)
    if config["output"]["timeline"] is True:
        write_timeline(folder / "timeline.json.gz", result, config["output"]["timeline_iterations"])


@lru_cache(KEPT_TRACES)
def _trace(parts: str) -> Trace:
    from omegaconf import OmegaConf

    from confsim import api

    return api.load_trace(OmegaConf.create(json.loads(parts)))


@lru_cache
def _compiled(parts: str) -> dict[tuple[int, int], Any]:
    """Where simulations of one latency model keep it, compiled by layout."""
    return {}


def goodput(config: Mapping[str, Any], folder: Path) -> None:
    """Write one search to a folder; it takes a single process, since the sweep's workers share the machine."""
    from omegaconf import OmegaConf

    from analysis.search.compare import compare

    compare(OmegaConf.create({**config, "goodput": {**config["goodput"], "workers": 1}}), folder)


COMMANDS: dict[str, Callable[[Mapping[str, Any], Path], None]] = {"simulate": simulate, "goodput": goodput}
