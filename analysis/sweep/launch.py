"""Starting workers through a Hydra launcher: the basic one (in this process), joblib, submitit or Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
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


class Launcher:
    """A launcher by the overrides of the command line (`hydra/launcher=...`, `hydra.launcher....`).

    `workers` can run at once; if `detached`, on other machines, where they may outlive this process.
    """

    def __init__(self, overrides: Sequence[str], folder: Path, workers: int | None = None) -> None:
        """`workers` replaces the number that the launcher can run.

        Raises:
            InputError: for a launcher or option that does not exist, or one that is not installed.
        """
        from hydra.core.plugins import Plugins

        self._overrides, self._folder = overrides, folder
        with fresh_hydra(WORKER_CONFIG):
            options = self._compose(Path("unused")).hydra.launcher
            target = str(options._target_)
            if target not in Plugins.instance().class_name_to_class:
                extra = next((extra for name, extra in EXTRAS.items() if name in target), None)
                fix = f"pip install 'confsim[{extra}]'" if extra else "install its package"
                raise InputError(f"{GROUP}: {target.rpartition('.')[2]} is not installed here: {fix}")
        self.name, capacity, self.detached = _capacity(target, options)
        self.workers = workers or capacity

    def launch(self, session: Path, runs: int) -> list[Any]:
        """Run workers for so many runs until they end; returns what each returns.

        Raises:
            Exception: what the launcher raises when a worker dies.
        """
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.plugins import Plugins
        from hydra.core.utils import JobStatus
        from hydra.types import HydraContext

        from analysis.sweep.worker import work

        with fresh_hydra(WORKER_CONFIG):
            from hydra._internal.callbacks import Callbacks

            cfg = self._compose(session)
            context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks(cfg))
            launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=work, config=cfg)
            jobs = [[*cfg.hydra.overrides.task, f"worker={number}"] for number in range(self.count(runs))]
            done = launcher.launch(jobs, initial_job_idx=0)
        for job in done:
            if job.status == JobStatus.FAILED:
                raise job._return_value
        return [job.return_value for job in done]

    def count(self, runs: int) -> int:
        """Workers to start for so many runs."""
        return max(1, min(runs, self.workers))

    def _compose(self, session: Path) -> Any:
        from hydra.core.global_hydra import GlobalHydra
        from hydra.types import RunMode

        sweeper = ("hydra.sweep", "hydra/sweep")
        own = [_ours(word) for word in self._overrides if not word.lstrip("+~").startswith(sweeper)]
        places = {"hydra.sweep.dir": self._folder, "folder": self._folder, "session": session}
        words = [*own, *(f"{key}={_quoted(path)}" for key, path in places.items())]
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            return hydra.compose_config(WORKER_CONFIG, words, RunMode.MULTIRUN, from_shell=False)
        except config_errors() as error:
            raise InputError(_complaint(error, words)) from error


def _capacity(target: str, options: Any) -> tuple[str, int, bool]:
    """A launcher's name, the workers that it can run at once, and whether on other machines."""
    cpus = len(os.sched_getaffinity(0))
    if "joblib" in target:
        jobs = int(options.get("n_jobs") or -1)
        return "joblib", jobs if jobs > 0 else max(1, cpus + 1 + jobs), False
    if target.endswith("SlurmLauncher"):
        return "submitit_slurm", int(options.get("array_parallelism") or QUEUED_WORKERS), True
    if "submitit" in target:
        return "submitit_local", cpus, False
    if "ray" in target:
        address = (options.get("ray") or {}).get("init", {}).get("address")
        return "ray", QUEUED_WORKERS if address else cpus, address is not None
    if "basic_launcher" in target:
        return "basic", 1, False
    return target.rpartition(".")[2], cpus, True


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
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"
