"""`confsim profile`: measure what the latency model needs of the executor's hardware."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confsim.specs import GpuSpec
from executor.config import ExecutorConfig
from executor.profile.measure import Measurer
from executor.profile.plan import Grid, Plan, make_plan
from executor.profile.store import Store
from executor.runtime import Runtime

LEAST_ROUNDS = 3  # measured whatever the budget says

Say = Callable[[str], None]
OpenRanks = Callable[[ExecutorConfig], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Profiled:
    """What a profile took."""

    folder: Path
    cells: int
    rounds: int
    measured: int  # rounds of this call
    wall_s: float


def command(cfg: Any) -> int:
    """Measure as `conf/profile.yaml` says; the exit code.

    Raises:
        InputError: for a user's mistake.
        RankError: if a rank fails.
    """
    from hydra.utils import instantiate

    executor, gpu = instantiate(cfg.executor, _convert_="all"), instantiate(cfg.gpu)
    grid = instantiate(cfg.grid)
    root = None if cfg.output is None else Path(cfg.output)
    done = profile(executor, gpu, grid, root, (lambda line: None) if cfg.quiet else _say)
    if not cfg.quiet:
        print(
            f"{done.folder.parent}: {done.cells} cells x {done.rounds} rounds "
            f"({done.measured} new, {done.wall_s:.0f} s)\n"
            f"next: confsim fit source=executor profile={done.folder.parent}"
        )
    return 0


def profile(
    executor: ExecutorConfig,
    gpu: GpuSpec,
    grid: Grid,
    root: Path | None = None,
    say: Say = lambda line: None,
    ranks: OpenRanks | None = None,
) -> Profiled:
    """Measure the executor's layout into a folder of `root`, continuing what is there already.

    `ranks` opens something with a runtime's interface in place of real ranks.

    Raises:
        InputError: if the folder holds something else, or the grid does not fit.
    """
    began = time.perf_counter()
    grid = grid.filled(executor)
    plan = make_plan(grid, executor.layout, executor.device.one_kernel)
    executor = replace(executor, kv=replace(executor.kv, capacity_tokens=plan.capacity_tokens))
    store = Store(Path(), executor, gpu, grid)
    layout = executor.layout
    root = root or Path("profiles") / f"executor-{store.identity}"
    store.folder = root / f"{layout.kind}-{layout.groups}x{layout.tp}"
    done = store.open()
    wanted = [number for number in range(grid.rounds) if number not in done]
    if not wanted:
        return Profiled(store.folder, plan.cells, len(done), 0, 0.0)
    with (ranks or Runtime.of)(executor) as running:
        store.describe([dict(ready.facts) for ready in getattr(running, "ready", ())])
        measured = _rounds(running, plan, grid, store, wanted, len(done), say)
    return Profiled(store.folder, plan.cells, len(done) + measured, measured, time.perf_counter() - began)


def _rounds(ranks: Runtime, plan: Plan, grid: Grid, store: Store, wanted: list[int], done: int, say: Say) -> int:
    """Measure rounds until all are there or the budget is used up; returns how many."""
    assert grid.budget_s is not None
    began = time.perf_counter()
    say(f"{plan.cells} cells on {ranks.layout.ranks} ranks; preparing decodes of {len(plan.levels)} contexts")
    measurer = Measurer(ranks, plan, grid)
    measurer.set_up()
    started, spent = time.perf_counter(), 0.0
    for count, number in enumerate(wanted):
        elapsed = time.perf_counter() - began
        if count + done >= LEAST_ROUNDS and elapsed + spent > grid.budget_s:
            say(f"grid.budget_s={grid.budget_s:g} is used up after {count + done} rounds")
            return count
        store.add(number, measurer.round(number))
        spent = (time.perf_counter() - started) / (count + 1)
        left = min((len(wanted) - count - 1) * spent, max(0.0, grid.budget_s - (time.perf_counter() - began)))
        say(f"round {count + done + 1} of {grid.rounds}: {spent:.1f} s each, about {left:.0f} s left")
    return len(wanted)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
