"""The examples of docs/architecture.md as they stand on the page, run from a folder outside the package."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
FILE = re.compile(r"^`(?P<path>mine/[^`]+)`\n\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> str:
    text = PAGE.read_text("utf-8")
    return text[text.index("### Examples") : text.index("### Inner loop")]


LINES = [line for block in COMMANDS.finditer(examples()) for line in block["text"].splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for file in FILE.finditer(examples()):
        path = tmp_path / file["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file["text"], "utf-8")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "confsim", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_page_has_an_example_of_each_kind() -> None:
    files = {match["path"] for match in FILE.finditer(examples())}
    assert {"mine/aging.py", "mine/fixed_total.py", "mine/gateway.py", "mine/gpu/b200_sxm.yaml"} <= files
    assert len(LINES) == 5 and all(line.startswith("confsim ") for line in LINES)


@pytest.mark.parametrize("line", LINES)
def test_examples_run_from_a_folder_outside_the_package(line: str, folder: Path) -> None:
    done = run(folder, *shlex.split(line)[1:], "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    name = "stats.json" if " stats " in line else "summary.json"
    content = json.loads((folder / "out" / name).read_text("utf-8"))
    if "aging" in line:
        assert content["policy"] == "aging.Aging (tokens_per_s=500)"
    elif "fixed_total" in line:
        assert content["scheme"] == "fixed_total"
        assert content["provenance"]["config"]["scheme"]["tokens"] == (1024 if "tokens=1024" in line else 2048)
    elif "gateway" in line:
        assert content["requests"] == 2
    else:
        assert (content["gpu"], content["provenance"]["latency"]["source"]) == ("b200_sxm", "peaks")


def test_the_users_files_are_listed_and_searched(folder: Path) -> None:
    assert "fixed_total" in run(folder, "list", "scheme", "--config-dir", "mine").stdout
    small = ["trace.requests=60", "goodput.workers=1", "goodput.tolerance=0.5", "goodput.band=false"]
    words = ["schemes=[fixed_total.FixedTotal]", "per_scheme.fixed_total.FixedTotal.tokens=512"]
    done = run(folder, "goodput", "--config-dir=mine", *words, *small, "goodput.curve=[]", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "out" / "fixed_total.FixedTotal" / "summary.json").read_text("utf-8"))
    assert content["provenance"]["config"]["scheme"]["tokens"] == 512


def test_an_unknown_name_is_one_line_with_close_matches_and_all_choices(folder: Path) -> None:
    for words, says in (
        (["scheme=fixed_totl"], "did you mean fixed_total?"),
        (["policy.order=fcsf"], "use one of deadline, fcfs, srpf (did you mean fcfs?)"),
        (["policy.order=aging.Agin"], "aging has no Agin, use one of Aging (did you mean Aging?)"),
        (["policy.order={name: aging.Aging, weight: 2}"], "it takes tokens_per_s"),
        (["cluster.router=round"], "did you mean round_robin?"),
        (["trace=gateway", "trace.format=gatway.Reader", "trace.path=mine/log.jsonl"], "no module 'gatway'"),
    ):
        done = run(folder, "simulate", "--config-dir", "mine", *words)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and says in done.stderr, done.stderr


def test_entry_points_of_installed_packages_are_names(folder: Path) -> None:
    package = folder / "mine" / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = "[confsim.orders]\naged = aging:Aging\n[confsim.schemes]\nfixed = fixed_total:FixedTotal\n"
    (package / "entry_points.txt").write_text(groups)
    assert "fixed " in run(folder, "list", "scheme", "--config-dir", "mine").stdout
    assert "aged " in run(folder, "list", "order", "--config-dir", "mine").stdout
    words = ["scheme=fixed", "scheme.tokens=256", "policy.order=aged", "trace.requests=60", "hydra.run.dir=out"]
    done = run(folder, "simulate", "--config-dir", "mine", *words)
    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "out" / "summary.json").read_text("utf-8"))
    assert (content["scheme"], content["policy"]) == ("fixed_total", "aged")
