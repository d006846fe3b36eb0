"""Controlled experiments: a constant number of prompts outstanding beside a decode load that stays the same."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import simpy

from confsim.api import build
from confsim.errors import InputError
from confsim.outcome.result import write_json, write_table
from confsim.outcome.slo import TOLERANCE
from confsim.run.drivers import Target
from confsim.run.engine import Run, Simulation
from confsim.run.record import Track, iterations_table
from confsim.run.request import Request, RequestState
from confsim.setup.provenance import provenance

if TYPE_CHECKING:
    from omegaconf import DictConfig

STARVED_S = 60.0  # simulated seconds a prefill after which it is given up
PARTS = ("linear", "prefill_attention", "decode_attention", "communication", "head", "overhead")


@dataclass(frozen=True)
class Scenario:
    """The decode load, by GPU (one number stands for every GPU), and how many prompts are outstanding at a time.

    A decode emits `decode_tokens` tokens and is replaced at once, where it ran or where the scheme places it. Its
    context, averaged over its life, is `decode_context` tokens; the decodes of a GPU are at evenly spaced points of
    their lives. The next prompt is sent when one of the `concurrency` outstanding ones has ended.
    """

    decodes_per_gpu: int | Sequence[int] = 24
    decode_context: int = 8192
    decode_tokens: int = 256
    concurrency: int = 8

    def __post_init__(self) -> None:
        for key in ("decode_context", "decode_tokens"):
            if not _whole(getattr(self, key), 1):
                raise InputError(f"{key}={getattr(self, key)}: use a whole number of tokens, 1 or more")
        if not _whole(self.concurrency, 1):
            raise InputError(f"concurrency={self.concurrency}: use a whole number of prompts, 1 or more")
        counts = self._counts()
        if not counts or not all(_whole(count, 0) for count in counts):
            raise InputError(f"decodes_per_gpu={self.decodes_per_gpu}: use a whole number, or a list of one a GPU")
        if self.first_stored < 1:
            raise InputError(
                f"decode_context={self.decode_context}: too short for decodes of decode_tokens={self.decode_tokens}, "
                "whose contexts average to it"
            )

    def _counts(self) -> list[Any]:
        given: Any = self.decodes_per_gpu
        return list(given) if isinstance(given, (list, tuple)) else [given]

    @property
    def first_stored(self) -> int:
        """Tokens of KV with which a decode begins; its i-th token reads `first_stored + i`."""
        return self.decode_context - (self.decode_tokens + 1) // 2

    def by_gpu(self, gpus: int) -> tuple[int, ...]:
        """Decodes of each GPU.

        Raises:
            InputError: for a list of another length.
        """
        counts = self._counts()
        if not isinstance(self.decodes_per_gpu, int) and len(counts) != gpus:
            raise InputError(f"decodes_per_gpu={counts}: give one number, or {gpus} (cluster.gpus)")
        return tuple(counts) if len(counts) == gpus else tuple(counts) * gpus


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class ScenarioResult:
    """`summary` is strict JSON data; `iterations` those that began before the last prefill ended."""

    summary: dict[str, Any]
    iterations: pa.Table

    def write(self, folder: Path) -> None:
        """Write summary.json and iterations.parquet."""
        folder.mkdir(parents=True, exist_ok=True)
        write_table(folder / "iterations.parquet", self.iterations)
        write_json(folder / "summary.json", self.summary)


def run(cfg: DictConfig) -> ScenarioResult:
    """The scenario of a configuration of `confsim scenario`.

    Raises:
        InputError: for values that contradict each other or cannot be.
    """
    for key in ("prefills", "prefill_tokens"):
        if not _whole(cfg[key], 1):
            raise InputError(f"{key}={cfg[key]}: use a whole number, 1 or more")
    if cfg.rate is not None or cfg.horizon_s is not None:
        raise InputError("rate and horizon_s mean nothing in a scenario: the next prefill comes when one has ended")
    if not str(cfg.trace.get("_target_")).endswith("FixedTrace") or cfg.arrivals.get("concurrency") != cfg.concurrency:
        raise InputError(
            "trace and arrivals of a scenario are fixed: set prefill_tokens, prefills and concurrency instead"
        )
    counts = cfg.decodes_per_gpu
    decodes = list(counts) if isinstance(counts, Sequence) and not isinstance(counts, str) else counts
    return run_scenario(build(cfg), Scenario(decodes, cfg.decode_context, cfg.decode_tokens, cfg.concurrency))


def run_scenario(simulation: Simulation, scenario: Scenario) -> ScenarioResult:
    """Run the prefills of the simulation's trace, `concurrency` at a time, beside the scenario's decodes.

    Raises:
        InputError: if the scheme cannot hold the decodes or a prefill.
    """
    run = ScenarioRun(simulation, scenario)
    try:
        run.execute()
        return run.outcome()
    finally:
        run.close()


class SteadyDecodes:
    """Keeps `concurrency` prefills outstanding, beside decodes whose ids lie behind theirs."""

    def __init__(self, scenario: Scenario, decodes: Sequence[int], prefills: int, scheme: str) -> None:
        self.scenario = scenario
        self.decodes = decodes  # of each GPU
        self.prefills = prefills
        self.scheme = scheme
        self.starts_s: list[float] = []  # of the prefills, when they are submitted
        self.ends_s: dict[int, float] = {}  # by prefill, in the order in which they ended
        self._gpu = [gpu for gpu, count in enumerate(decodes) for _ in range(count)]  # of every running decode
        self._slot: dict[int, int] = {}  # request -> its place among them
        self.streams: list[list[Request]] = [[] for _ in self._gpu]

    @property
    def over(self) -> bool:
        """The last prefill has ended."""
        return len(self.ends_s) == self.prefills

    @property
    def last_end_s(self) -> float:
        """When the last prefill ended."""
        return max(self.ends_s.values())

    def start(self, run: Target) -> None:
        """Fill every place with a decode, and send the first prefills."""
        run.ledger.on_end.append(lambda request, time_s: self._ended(run, request, time_s))
        slot = 0
        for count in self.decodes:
            for index in range(count):
                self._add_decode(run, slot, index * self.scenario.decode_tokens // count)
                slot += 1
        for _ in range(self.scenario.concurrency):
            self._next_prefill(run)
        run.env.process(self._guard(run))

    def _guard(self, run: Target) -> Generator[simpy.Event, Any, None]:
        yield run.env.timeout(STARVED_S * self.prefills)
        if not self.over:
            done = len(self.ends_s)
            raise InputError(
                f"{self.scheme}: {done} prefills ended in {run.env.now:g} s, the decodes starve the others"
            )

    def _next_prefill(self, run: Target) -> None:
        if len(self.starts_s) == self.prefills:
            return
        self.starts_s.append(run.env.now)
        run.inject(len(self.starts_s) - 1, run.env.now)

    def _ended(self, run: Target, request: Request, time_s: float) -> None:
        if request.state is RequestState.REJECTED:
            raise InputError(f"prefill_tokens={request.prompt_tokens}: rejected, {request.reason}")
        slot = self._slot.get(request.id)
        if slot is None:
            self.ends_s[request.id] = time_s
            self._next_prefill(run)
        elif not self.over:
            self._add_decode(run, slot, 0)

    def _add_decode(self, run: Target, slot: int, emitted: int) -> None:
        """A decode that has emitted some of its tokens already."""
        context = self.scenario.first_stored + emitted
        request = Request(len(run.output_tokens), run.env.now, context)
        request.emitted = 1  # with its prompt, somewhere else
        request.first_token_s = run.env.now
        run.output_tokens.append(1 + self.scenario.decode_tokens - emitted)
        self._slot[request.id] = slot
        self.streams[slot].append(request)
        run.ledger.inject(request)
        gpu = self._gpu[slot]
        if not run.instances[0].preload(request, gpu):
            raise InputError(
                f"decodes_per_gpu={list(self.decodes)}: {self.scheme} has no KV for so many decodes of "
                f"decode_context={self.scenario.decode_context} with GPU {gpu}; kv.capacity_tokens sets more"
            )


class ScenarioRun:
    """A replay of a scenario, and what is measured in it."""

    def __init__(self, simulation: Simulation, scenario: Scenario) -> None:
        cluster = simulation.cluster
        if cluster.instances != 1:
            raise InputError(f"cluster.instances={cluster.instances}: a scenario has one instance")
        if not len(simulation.trace):
            raise InputError("prefills=0: a scenario measures at least one")
        self.simulation = simulation
        self.scenario = scenario
        load = simulation.arrivals.apply(simulation.trace, None, simulation.seed)
        self.driver = SteadyDecodes(scenario, scenario.by_gpu(cluster.gpus), len(load), simulation.scheme.name)
        self.replay = Run(simulation, load, driver=self.driver)
        self.ledger = self.replay.ledger

    def execute(self, check: bool = False) -> None:
        """Run to the end; `check` audits after every event."""
        self.replay.execute(None, check)

    def close(self) -> None:
        """Let go of what the result does not need."""
        self.replay.close()

    def outcome(self) -> ScenarioResult:
        """Everything that began before the last prefill ended."""
        end_s = self.driver.last_end_s
        tracks = [(track, _before(track, end_s)) for track in self.ledger.tracks]
        iterations = iterations_table(self.ledger.tracks)
        iterations = iterations.filter(pc.less(iterations["start_s"], end_s))
        summary = {**self._description(), **self._measures(iterations), **_tokens(tracks)}
        summary["warnings"] = self._warnings(summary)
        summary["provenance"] = self._provenance()
        return ScenarioResult(summary, iterations)

    def _description(self) -> dict[str, Any]:
        simulation = self.simulation
        decodes, prefills = self.driver.decodes, self.driver.prefills
        prompt = int(simulation.trace.table["prompt_tokens"][0].as_py())
        report = simulation.scheme.kv_report(self.replay.setup)
        return {
            "kind": "scenario",
            "label": f"{prefills} prefills of {prompt} beside {sum(decodes)} decodes of {self.scenario.decode_context}",
            "scheme": simulation.scheme.name,
            "policy": simulation.policy.label,
            "model": simulation.model.name,
            "gpu": simulation.gpu.name,
            "cluster": asdict(simulation.cluster),
            "decodes_per_gpu": list(decodes),
            "decode_context": self.scenario.decode_context,
            "decode_tokens": self.scenario.decode_tokens,
            "prefill_tokens": prompt,
            "prefills": prefills,
            "concurrency": self.scenario.concurrency,
            "tbt_s": simulation.slo.tbt_s,
            "kv": {"groups": report.groups, "capacity_tokens": report.capacity_tokens},
        }

    def _measures(self, iterations: pa.Table) -> dict[str, Any]:
        def mean(*columns: str) -> float:
            return float(sum(np.mean(iterations[column].to_numpy()) for column in columns))

        starts_s, ends_s = self.driver.starts_s, self.driver.ends_s
        gap_s = self.max_gap_s()
        breakdown = {part: mean(f"{part}_s") for part in PARTS}
        iteration_s = mean("end_s") - mean("start_s")
        return {
            "prefill_s": [ends_s[index] - start_s for index, start_s in enumerate(starts_s)],
            "prefills_per_s": len(ends_s) / (self.driver.last_end_s - starts_s[0]),
            "iterations": len(iterations),
            "max_gap_s": gap_s,
            "tbt_met": gap_s is None or gap_s <= self.simulation.slo.tbt_s * TOLERANCE,
            "breakdown_s": breakdown,
            "attention_stage_s": iteration_s - breakdown["linear"] - breakdown["head"] - breakdown["overhead"],
            "linear_stage_s": breakdown["linear"],
            "iteration_s": iteration_s,
            "preemptions": self.ledger.preemptions,
        }

    def max_gap_s(self) -> float | None:
        """Largest gap between tokens that began before the last prefill ended; None without decodes.

        A decode takes its place's stream on: its first gap starts where the last one of its predecessor ended.
        """
        largest = None
        for stream in self.driver.streams:
            times = np.concatenate([[0.0], *map(self.ledger.token_times, stream)])
            gaps = np.diff(times)[times[:-1] < self.driver.last_end_s]
            largest = max(float(gaps.max(initial=0.0)), largest or 0.0)
        return largest

    def _warnings(self, summary: dict[str, Any]) -> list[str]:
        found = list(self.simulation.scheme.kv_report(self.replay.setup).capacity.warnings)
        if summary["preemptions"]:
            found.append(f"{summary['preemptions']} preemptions: the decode load was not constant")
        outside = sum(model.extrapolations for model in self.replay.setup.compiled.values())
        if outside:
            found.append(f"{outside} latency queries lay outside the measured range")
        return found

    def _provenance(self) -> dict[str, Any]:
        simulation = self.simulation
        described = simulation.latency.describe(simulation.model, simulation.gpu)
        return {
            **provenance(simulation.config, simulation.seed),
            "profile_hash": described["profile_hash"],
            "latency": dict(described),
        }


def _before(track: Track, end_s: float) -> pa.Table:
    table = track.table()
    return table.filter(pc.less(table["start_s"], end_s))


def _tokens(tracks: Sequence[tuple[Track, pa.Table]]) -> dict[str, list[Any]]:
    """Mean tokens of every group an iteration of its loop; groups by loop, named where there are several loops."""
    names: list[str] = []
    means: list[npt.NDArray[np.float64]] = []
    for track, table in tracks:
        if not len(table):
            continue
        prefill, decode = (np.array(table[f"{phase}_per_group"].to_pylist()) for phase in ("prefill", "decode"))
        loop = f"{track.name} " if len(tracks) > 1 else ""
        for group in range(prefill.shape[1]):
            names.append(f"{loop}group {group}")
            means.append(np.array([prefill[:, group].mean(), decode[:, group].mean()]))
    columns = np.array(means).reshape(-1, 2)
    return {
        "groups": names,
        "tokens_per_group": columns.sum(axis=1).tolist(),
        "prefill_tokens_per_group": columns[:, 0].tolist(),
        "decode_tokens_per_group": columns[:, 1].tolist(),
    }
