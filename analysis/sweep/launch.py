"""Starting workers through a Hydra launcher: the basic one (in this process), joblib, submitit or Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from confsim.setup.configuration import config_errors, explain, fresh_hydra, options

WORKER_CONFIG = "sweep_worker"
QUEUED_WORKERS = 256  # worker jobs at most where the launcher's own queue decides how many run at once
GROUP = "hydra/launcher"
OURS = "confsim_"  # files conf/hydra/launcher/confsim_NAME.yaml stand for hydra/launcher=NAME
# Module of a launcher -> the extra that installs it.
EXTRAS = {"hydra_joblib_launcher": "joblib", "hydra_submitit_launcher": "slurm", "hydra_ray_launcher": "ray"}


@dataclass(frozen=True)
class Launcher:
    """A launcher by the overrides of the command line (`hydra/launcher=...`, `hydra.launcher....`)."""

    overrides: tuple[str, ...] = ()
    workers: int | None = None

    def check(self, folder: Path) -> Capacity:
        """What the launcher can run.

        Raises:
            InputError: for a launcher or option that does not exist, or one that is not installed.
        """
        with fresh_hydra(WORKER_CONFIG):
            cfg = self._compose(folder, Path("unused"))
            target = str(cfg.hydra.launcher._target_)
            self._installed(target)
            return _capacity(target, cfg.hydra.launcher)

    def count(self, runs: int, capacity: Capacity) -> int:
        """Workers to start for so many runs."""
        return max(1, min(runs, self.workers or capacity.workers))

    def launch(self, folder: Path, session: Path, workers: int) -> list[dict[str, Any]]:
        """Run workers until they end; returns what each says.

        Raises:
            Exception: what the launcher raises when a worker dies.
        """
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.plugins import Plugins
        from hydra.core.utils import JobStatus
        from hydra.types import HydraContext

        from analysis.sweep.worker import task

        with fresh_hydra(WORKER_CONFIG):
            from hydra._internal.callbacks import Callbacks

            cfg = self._compose(folder, session)
            context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks(cfg))
            launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=cfg)
            own = list(cfg.hydra.overrides.task)
            jobs = [[*own, f"worker={number}"] for number in range(workers)]
            returned = launcher.launch(jobs, initial_job_idx=0)
        for job in returned:
            if job.status == JobStatus.FAILED:
                raise job._return_value
        return [job.return_value for job in returned]

    def _compose(self, folder: Path, session: Path) -> Any:
        from hydra.core.global_hydra import GlobalHydra
        from hydra.types import RunMode

        sweeper = ("hydra.sweep", "hydra/sweep")
        own = [_ours(word) for word in self.overrides if not word.lstrip("+~").startswith(sweeper)]
        words = [*own, f"hydra.sweep.dir={_quoted(folder)}", f"folder={_quoted(folder)}", f"session={_quoted(session)}"]
        try:
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            return hydra.compose_config(
                config_name=WORKER_CONFIG,
                overrides=words,
                run_mode=RunMode.MULTIRUN,
                from_shell=False,
                with_log_configuration=False,
            )
        except config_errors() as error:
            raise InputError(_complaint(error, words)) from error

    def _installed(self, target: str) -> None:
        from hydra.core.plugins import Plugins

        if target in Plugins.instance().class_name_to_class:
            return
        extra = next((extra for name, extra in EXTRAS.items() if name in target), None)
        fix = f"pip install 'confsim[{extra}]'" if extra else "install its package"
        raise InputError(f"hydra/launcher: {target.rpartition('.')[2]} is not installed here: {fix}")


@dataclass(frozen=True)
class Capacity:
    """`workers` that can run at once; `detached`: on other machines, where they may outlive this process."""

    name: str
    workers: int
    detached: bool = False


def _capacity(target: str, options: Any) -> Capacity:
    cpus = len(os.sched_getaffinity(0))
    if "joblib" in target:
        jobs = int(options.get("n_jobs") or -1)
        return Capacity("joblib", jobs if jobs > 0 else max(1, cpus + 1 + jobs))
    if target.endswith("SlurmLauncher"):
        return Capacity("submitit_slurm", int(options.get("array_parallelism") or QUEUED_WORKERS), True)
    if "submitit" in target:
        return Capacity("submitit_local", cpus)
    if "ray" in target:
        address = (options.get("ray") or {}).get("init", {}).get("address")
        return Capacity("ray", QUEUED_WORKERS if address else cpus, address is not None)
    if "basic_launcher" in target:
        return Capacity("basic", 1)
    return Capacity(target.rpartition(".")[2], cpus, True)


def names() -> list[str]:
    """Launchers that sweeps know, sorted."""
    return sorted(["basic", *(name.removeprefix(OURS) for name in options(GROUP) if name.startswith(OURS))])


def _ours(word: str) -> str:
    """`hydra/launcher=NAME` as the file that the package has for it."""
    name = word.removeprefix(f"{GROUP}=")
    return f"{GROUP}={OURS}{name}" if word != name and f"{OURS}{name}" in options(GROUP) else word


def _complaint(error: Exception, words: Sequence[str]) -> str:
    missing = re.search(rf"Could not find '{GROUP}/(?P<name>[^']+)'", str(error))
    if missing:
        return f"{GROUP}={missing['name']}: unknown, use one of {', '.join(names())}"
    key = re.search(r"'(?P<key>hydra\.[^']+)'", str(error))
    if key is None or "Could not override" not in str(error):
        return explain(error, words, WORKER_CONFIG)
    chosen = [word.partition("=")[2] for word in words if word.startswith(f"{GROUP}=")]
    file = resources.files("conf").joinpath(*GROUP.split("/"), f"{chosen[-1] if chosen else 'basic'}.yaml")
    keys = re.findall(r"(?m)^([a-z]\w*):", file.read_text(encoding="utf-8")) if file.is_file() else []
    return f"{key['key']}: no such key" + (f"; hydra.launcher has {', '.join(keys)}" if keys else "")


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
