"""The compiled modules: the same results as their sources, and never another build than that of the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulator_harness import Case, latency

from confsim.errors import InputError
from confsim.kv.pools import InPlaceKv
from confsim.outcome.slo import Slo
from confsim.policies.dispatch.waterfill import Dispatch as Waterfill
from confsim.schemes.base import Instance, KvReport, Setup, group_kv
from confsim.schemes.cobatch import CoBatchInstance
from confsim.schemes.cost import CoBatchCost, in_turn
from confsim.schemes.fill import Limits
from confsim.setup import compiling, native

REPLAY = """
import sys
from pathlib import Path
from confsim import api
from confsim.setup import native
assert native.active() == (sys.argv[1] == "1")
for scheme in ("conflux", "chunked_prefill", "muxwise", "disaggregated", "loongserve", "uniform_sp", "data_parallel"):
    for policy in ("fcfs", "srpf", "deadline_waterfill"):
        words = [f"scheme={scheme}", f"policy={policy}", "trace=toolagent", "trace.requests=120", "rate=6",
                 "cluster.instances=2", "latency.noise=0.02", "kv.capacity_tokens=150000", "kv.prefix_cache=true"]
        if scheme == "disaggregated":
            words[-1:] = ["kv.prefix_cache=false"]
        if scheme == "data_parallel":
            words += ["scheme.tp=2"]
        api.simulate(api.compose(words)).write(Path(sys.argv[2]) / f"{scheme}-{policy}")
"""


def _replay(folder: Path, compiled: str) -> dict[str, bytes]:
    subprocess.run(
        [sys.executable, "-c", REPLAY, compiled, str(folder)],
        check=True,
        env=os.environ | {"CONFSIM_NATIVE": compiled},
    )
    found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}
    return {name: content for name, content in found.items() if not name.endswith("timing.json")}


@pytest.mark.skipif(not native.build_folder().is_dir(), reason="nothing is compiled: confsim compile")
def test_compiled_and_interpreted_runs_leave_the_same_bytes(tmp_path: Path) -> None:
    compiled, interpreted = _replay(tmp_path / "1", "1"), _replay(tmp_path / "0", "0")
    assert len(compiled) == 3 * 3 * 7
    assert compiled == interpreted


class MyDispatch(Waterfill):
    def capacity(self, level: int) -> int:
        return super().capacity(level) // 2


class MyKv(InPlaceKv):
    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        return "never" if prompt_tokens > 3000 else super().refusal(prompt_tokens, output_tokens)


class MyCost(CoBatchCost):
    def host_s(self, decodes: int, chunks: int) -> float:
        return 2 * super().host_s(decodes, chunks)


class MyInstance(CoBatchInstance):
    def counters(self) -> dict[str, float]:
        return {**super().counters(), "mine": 1.0}


@dataclass(frozen=True)
class Mine:
    """A scheme of parts that extend those that may be compiled, as a user's file would."""

    name: str = "mine"

    def build(self, setup: Setup) -> Instance:
        cost = MyCost(setup.latency_of(setup.cluster.gpus, 1), in_turn, async_schedule=False)
        limits = Limits(setup.slo.target_s, None, 8192, 4)
        kv = MyKv(100_000, setup.kv)
        placement = setup.policy.new_placement("least_context")
        return MyInstance(setup, self.name, cost, kv, limits, MyDispatch, placement)

    def kv_report(self, setup: Setup) -> KvReport:
        return group_kv(setup, setup.cluster.gpus, 1, 8192)


def test_what_may_be_compiled_may_be_extended() -> None:
    law = latency(linear_base_s=0.01, linear_token_s=1e-5, iteration_overhead_s=0.001)
    rows = [(0.0, 3001, 2), (0.0, 2000, 2)]
    simulation = replace(
        Case(rows, "chunked_prefill", latency=law, gpus=1, slo=Slo(1.0, 1.0)).simulation(), scheme=Mine()
    )
    result = simulation.run()
    assert result.requests["status"].to_pylist() == ["rejected", "completed"]
    assert result.summary["mine"] == 1
    assert result.requests["e2e_s"].to_pylist()[1] == pytest.approx(0.01 + 0.02 + 0.002 + 0.01 + 1e-5 + 0.002)


def test_a_build_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "BUILDS", tmp_path)
    monkeypatch.setattr(native, "PACKAGE", tmp_path / "confsim")
    monkeypatch.setattr(native, "MODULES", ("loop", "schemes.cost"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("CONFSIM_NATIVE", "1")
    (tmp_path / "confsim" / "schemes").mkdir(parents=True)
    for name in ("loop.py", "schemes/cost.py"):
        (tmp_path / "confsim" / name).write_text("x = 1\n")
    folder = native.build_folder()
    (folder / "confsim").mkdir(parents=True)
    (folder / "confsim" / f"loop{native.EXTENSION_SUFFIXES[0]}").touch()
    (tmp_path / "confsim" / "schemes" / "cost.py").write_text("x = 2\n")
    assert native.build_folder() != folder
    assert not native.activate()
    (tmp_path / "confsim" / "schemes" / "cost.py").write_text("x = 1\n")
    assert native.activate()
    found = sys.meta_path[0].find_spec("confsim.loop", None)
    assert found is not None and found.origin == str(folder / "confsim" / f"loop{native.EXTENSION_SUFFIXES[0]}")
    assert sys.meta_path[0].find_spec("confsim.schemes.cost", None) is None
    monkeypatch.setenv("CONFSIM_NATIVE", "0")
    assert not native.activate()


def test_what_cannot_be_compiled_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = tmp_path / "builds"
    monkeypatch.setattr(native, "BUILDS", builds)
    failed: Any = SimpleNamespace(returncode=1, stdout="copying\n", stderr="running\nerror: command 'cc' failed\n")
    monkeypatch.setattr(compiling.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(InputError, match=r"^the C compiler or mypyc failed, nothing was compiled: error: command 'cc'"):
        compiling.build()
    assert list(builds.iterdir()) == []
    monkeypatch.setitem(sys.modules, "mypyc", None)
    with pytest.raises(InputError, match=r"mypyc is not installed: pip install 'confsim\[compile\]'"):
        compiling.build()
    builds.rmdir()
    builds.write_text("a file")
    monkeypatch.undo()
    monkeypatch.setattr(native, "BUILDS", builds)
    with pytest.raises(InputError, match=r"builds: cannot be written"):
        compiling.build()
