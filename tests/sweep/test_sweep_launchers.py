"""The same sweep on every launcher gives the same bytes."""

from __future__ import annotations

import importlib.util
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sweep_harness import CHEAP

from analysis.sweep.launch import Launcher, names
from confsim.errors import InputError

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]
WORDS = [*CHEAP, "rate=1,2,4", "scheme=conflux,chunked_prefill"]
PLUGINS = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
    "ray": "hydra_ray_launcher",
}
# A cluster of one machine, with the commands of Slurm that submitit calls: jobs of an array run here.
SLURM = {
    "srun": """#!/bin/sh
while true; do case $1 in --output|--error) shift 2;; --*) shift;; *) break;; esac; done
exec "$@"
""",
    "sacct": "#!/bin/sh\necho 'JobID|State|NodeList'\n",
    "scontrol": "#!/bin/sh\necho localhost\n",
    "scancel": "#!/bin/sh\n",
    "sbatch": """#!{python}
import os, re, subprocess, sys
script = sys.argv[-1]
last = int(re.search(r"--array=0-([0-9]+)", open(script).read()).group(1))
for task in range(last + 1):
    env = dict(os.environ, SLURM_JOB_ID=str(100 + task), SLURM_ARRAY_JOB_ID="77", SLURM_ARRAY_TASK_ID=str(task),
               SLURM_JOB_NODELIST="localhost", SLURM_NNODES="1", SLURM_JOB_NUM_NODES="1", SLURM_NODEID="0",
               SLURM_NTASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0")
    subprocess.Popen(["sh", script], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("Submitted batch job 77")
""",
}  # fmt: skip


def need(launcher: str) -> None:
    if importlib.util.find_spec("hydra_plugins") is None or not importlib.util.find_spec(
        f"hydra_plugins.{PLUGINS[launcher]}"
    ):
        pytest.skip(f"hydra/launcher={launcher} is not installed")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table by the basic launcher, in this process."""
    from analysis.sweep.driver import Sweep
    from analysis.sweep.expand import expand

    folder = tmp_path_factory.mktemp("basic")
    grid = expand("simulate", [*WORDS, f"hydra.sweep.dir={folder / 's'}", f"output.dir={folder}"])
    assert grid is not None
    assert Sweep(grid).run().complete
    return (folder / "s" / "results.parquet").read_bytes()


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_launchers_agree(launcher: str, expected: bytes, tmp_path: Path, command_line: CommandLine) -> None:
    need(launcher)
    done = command_line("simulate", "-m", *WORDS, f"hydra/launcher={launcher}", "sweep.workers=2", "hydra.sweep.dir=s")
    assert done.returncode == 0, done.stderr
    assert f"6 runs planned, 2 workers ({launcher})" in done.stdout
    assert "6 of 6 results" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "s" / "results.parquet").read_bytes() == expected


def test_slurm_array_of_workers(
    expected: bytes,
    tmp_path: Path,
    command_line: CommandLine,
    environment: dict[str, str],
) -> None:
    need("submitit_slurm")
    for name, text in SLURM.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("{python}", sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=short", "hydra.launcher.array_parallelism=2"]
    done = command_line("simulate", "-m", *WORDS, *words, "hydra.sweep.dir=s")
    assert done.returncode == 0, done.stderr
    assert "6 runs planned, 2 workers (submitit_slurm)" in done.stdout
    assert (tmp_path / "s" / "results.parquet").read_bytes() == expected
    script = next((tmp_path / "s").rglob("submission_file_*.sh"), None) or next((tmp_path / "s").rglob("*.sh"))
    text = script.read_text()
    assert "#SBATCH --partition=short" in text and "#SBATCH --array=0-1%2" in text


def test_options_of_launchers(tmp_path: Path) -> None:
    assert names() == ["basic", "joblib", "ray", "submitit_local", "submitit_slurm"]
    assert Launcher((), tmp_path).workers == 1
    need("joblib")
    assert Launcher(("hydra/launcher=joblib", "hydra.launcher.n_jobs=3"), tmp_path).workers == 3
    need("submitit_slurm")
    slurm = Launcher(("hydra/launcher=submitit_slurm",), tmp_path)
    assert slurm.detached and slurm.workers == 64
    with pytest.raises(InputError, match=r"hydra/launcher=nope: unknown, use one of basic, joblib, ray"):
        Launcher(("hydra/launcher=nope",), tmp_path)
    with pytest.raises(InputError, match=r"hydra.launcher.jobs: no such key; hydra.launcher has n_jobs"):
        Launcher(("hydra/launcher=joblib", "hydra.launcher.jobs=3"), tmp_path)


def test_a_launcher_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.core.plugins import Plugins

    monkeypatch.setattr(Plugins.instance(), "class_name_to_class", {})
    with pytest.raises(InputError, match=r"JoblibLauncher is not installed here: pip install 'confsim\[joblib\]'"):
        Launcher(("hydra/launcher=joblib",), tmp_path)
