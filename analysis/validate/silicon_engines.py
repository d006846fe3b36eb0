"""What ran behind the measured rows: each engine's scheduling rules, its load, and a replay of one row.

Everything here is known from outside the measurements, but for `Constants` and the choices named below, which the rows
that choose the constants decide.

- Qwen3-32B rows come from aiconfigurator's own benchmark: genai-perf with `concurrency` requests in flight, ten times
  as many in all, fixed lengths (`src/aiconfigurator/eval/benchmarks/genai_perf_runner.py`); for vLLM it sets
  `max-num-batched-tokens` to concurrency + prompt + 1,500 (`generator/rule_plugin/benchmark/vllm.rule`).
- Llama-3.1-70B rows have the grid of InferenceMAX, whose scripts are public: lengths drawn uniformly from 80% to 100%
  of the nominal ones, ten prompts for each request in flight, `max-num-batched-tokens: 8192`, asynchronous scheduling
  (`benchmarks/70b_fp8_h100_slurm.sh` and `kimbochen/bench_serving`; its default seed 0). The scripts set
  `kv-cache-dtype: fp8`; the launch command in an earlier README does not. On the H100 the rows of TP 4 that choose the
  constants lie closer to KV in bfloat16 (loss 0.37 against 0.91), so that is replayed; the H200, which has no such
  rows, follows its script.
- genai-perf's requests do not reach an engine at once: `Client` sends the first ones 10 ms apart, and a request takes
  4 ms and 2 us a prompt token (exponentially distributed) to be sent, tokenised and queued. These values are from a
  coarse grid, by the loss on the rows of TP 4 of both engines: what matters is that arrivals neither coincide nor miss
  an iteration all together. InferenceMAX's client is replayed without.
- SGLang's batches are whole prompts up to its default `max_prefill_tokens`. With chunks of 8,192 tokens, the default
  where chunking is on, the rows of TP 4 lie further off (loss 0.85 against 0.62).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from analysis.calibrate.command import fit_from
from analysis.validate.silicon_rows import FAMILIES, Family, Measured
from confsim.latency.compiled import CompiledLatency, Dense
from confsim.latency.config import FittedLatency
from confsim.latency.profile import Profile
from confsim.latency.share import SmShares
from confsim.outcome.slo import Slo
from confsim.policies import Policy
from confsim.run.engine import Simulation
from confsim.run.model_backend import ModelBackendConfig
from confsim.schemes.chunked_prefill import ChunkedPrefill
from confsim.setup.configuration import compose
from confsim.specs import ClusterSpec, GpuSpec, KvConfig, ModelSpec
from traces.arrivals import ClosedLoop
from traces.arrivals.base import Arrivals
from traces.load import Load
from traces.synthesis import FixedTrace
from traces.trace import Trace

WAVES = 10  # requests in all for each in flight
UTILISATION = 0.9  # of the GPU's memory, vLLM's default
VLLM_SLACK_TOKENS = 1500
VLLM_FP8_TOKENS = 8192
SGLANG_PREFILL_TOKENS = 16_384  # SGLang's default max_prefill_tokens
LEAST_SHARE = 0.8  # of the nominal length, InferenceMAX
NEVER_S = 1e6  # no engine here plans for a latency

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Constants:
    """What the rows of one TP degree choose for an engine.

    Host seconds that the GPU does not hide, of an iteration and of a running sequence, and a factor on the time that
    prefill adds to an iteration (linear layers beyond a full decode batch, and prefill attention).
    """

    iteration_s: float
    sequence_s: float
    prefill_factor: float


@dataclass(frozen=True)
class Engine:
    """Scheduling rules and load of an engine."""

    scheme: Callable[[Measured], ChunkedPrefill]
    lengths: Callable[[Measured], tuple[Ints, Ints]]
    admission: str
    client: Client | ClosedLoop
    describe: str


@dataclass(frozen=True)
class Client(Arrivals):
    """Closed loops side by side, each sending its next request when its last one has ended.

    Loop k's first request reaches the engine after `k * ramp_s`, a later one `base_s + token_s * prompt tokens` after
    it is sent, in the mean of an exponential distribution.
    """

    concurrency: int = 1
    ramp_s: float = 0.0
    base_s: float = 0.0
    token_s: float = 0.0

    mode = "closed_loop"

    def check(self, rate: float | None) -> None:
        """A closed loop takes no rate; nobody gives one here."""

    def apply(self, trace: Trace, rate: float | None, seed: int) -> Load:
        """The load: `think_s` is each request's way to the engine."""
        rows = np.arange(len(trace))
        mean_s = self.base_s + self.token_s * trace.table["prompt_tokens"].to_numpy()
        think_s = np.random.default_rng([seed, 0x51]).standard_exponential(len(trace)) * mean_s
        first = rows < self.concurrency
        think_s[first] = 0.0
        parents = np.where(first, -1, rows - self.concurrency)
        start_s = np.where(first, rows * self.ramp_s, 0.0)
        return Load(trace, start_s, self.mode, None, think_s=think_s, parent_row=parents)


def _fixed_lengths(row: Measured) -> tuple[Ints, Ints]:
    count = WAVES * row.concurrency
    return np.full(count, row.prompt_tokens), np.full(count, row.output_tokens)


def _drawn_lengths(row: Measured) -> tuple[Ints, Ints]:
    """As bench_serving draws them: numpy's legacy generator seeded with 0, prompts before outputs."""
    count = WAVES * row.concurrency
    draw = np.random.RandomState(0)
    prompts, outputs = (
        draw.randint(int(nominal * LEAST_SHARE), nominal + 1, count)
        for nominal in (row.prompt_tokens, row.output_tokens)
    )
    return prompts.astype(np.int64), outputs.astype(np.int64)


def _scheme(row: Measured, tokens: int, prefill_first: bool = False) -> ChunkedPrefill:
    """Up to `tokens` an iteration; every prompt may be in progress, as in engines that bound tokens alone."""
    return ChunkedPrefill(
        chunk_tokens=tokens,
        max_batched_tokens=tokens,
        max_partial_prefills=row.concurrency,
        async_schedule=False,  # `Constants` are what is exposed, whether or not the engine schedules ahead
        prefill_first=prefill_first,
    )


def _vllm(row: Measured) -> ChunkedPrefill:
    return _scheme(row, row.concurrency + row.prompt_tokens + VLLM_SLACK_TOKENS)


def _vllm_fp8(row: Measured) -> ChunkedPrefill:
    return _scheme(row, VLLM_FP8_TOKENS)


def _sglang(row: Measured) -> ChunkedPrefill:
    """Whole prompts while the next one is shorter than what is left of the batch."""
    prompts = max(1, (SGLANG_PREFILL_TOKENS - 1) // row.prompt_tokens)
    return _scheme(row, prompts * row.prompt_tokens, prefill_first=True)


GENAI_PERF = Client(ramp_s=0.010, base_s=0.004, token_s=2e-6)
ENGINES = {
    "vllm 0.12.0": Engine(
        _vllm,
        _fixed_lengths,
        "step",
        GENAI_PERF,
        "decodes first, prompts in chunks up to concurrency + prompt + 1,500 tokens an iteration; KV as needed, "
        "preempted requests are recomputed; 10 requests of one size for each in flight, the first ones "
        "10 ms apart, later ones 4 ms and 2 us a prompt token on their way",
    ),
    "sglang 0.5.1": Engine(
        _sglang,
        _fixed_lengths,
        "prompt",
        GENAI_PERF,
        "prompts first (decodes pause), whole ones up to 16,383 tokens a batch; KV of the whole prompt to start; "
        "10 requests of one size for each in flight, the first ones "
        "10 ms apart, later ones 4 ms and 2 us a prompt token on their way",
    ),
    "vllm fp8": Engine(
        _vllm_fp8,
        _drawn_lengths,
        "step",
        ClosedLoop(),
        "decodes first, prompts in chunks up to 8,192 tokens an iteration; KV as needed (bfloat16 on the H100, fp8 on "
        "the H200), preempted requests are recomputed; 10 requests for each in flight, lengths uniform from 80% to "
        "100% of the nominal ones",
    ),
}


@dataclass(frozen=True)
class Kernels:
    """A profile and what has been compiled of it, by TP degree."""

    profile: Profile
    profile_hash: str
    tables: dict[int, CompiledLatency] = field(default_factory=dict, compare=False)

    def table(self, model: ModelSpec, gpu: GpuSpec, tp: int) -> CompiledLatency:
        """The tables of a TP degree.

        Raises:
            InputError: where the profile does not cover it.
        """
        if tp not in self.tables:
            self.tables[tp] = self.profile.compile(
                model, gpu, tp, 1, prefill_slowdown=1.0, decode_slowdown=1.0, split_kv=True
            )
        return self.tables[tp]


@dataclass(frozen=True)
class Calibrated:
    """A latency source with an engine's constants, for decode batches of up to `decodes` sequences."""

    kernels: Kernels
    constants: Constants
    decodes: int
    noise: float = 0.0
    frontend_s: float = 0.0
    shares: SmShares = field(default_factory=SmShares)

    def describe(self, model: ModelSpec, gpu: GpuSpec) -> dict[str, Any]:
        """The profile's hash and the constants."""
        return {"profile_hash": self.kernels.profile_hash, "constants": asdict(self.constants)}

    def compile(self, model: ModelSpec, gpu: GpuSpec, tp: int, sp: int) -> CompiledLatency:
        """The profile's tables with the constants put in.

        Raises:
            InputError: where the profile does not cover the layout.
        """
        table, constants = self.kernels.table(model, gpu, tp), self.constants
        factor = constants.prefill_factor
        return replace(
            table,
            linear=_stretched(table.linear, min(self.decodes, table.linear.last), factor),
            prefill_own=_stretched(table.prefill_own, 0, factor),
            prefill_cached=_stretched(table.prefill_cached, 0, factor),
            prefill_square=table.prefill_square * factor,
            iteration_overhead_s=constants.iteration_s,
            sequence_overhead_s=constants.sequence_s,
        )


def _stretched(table: Dense, work: int, factor: float) -> Dense:
    """A table in which what lies above `work` costs `factor` times as much more."""
    values = np.asarray(table.values)
    base = values[work]
    above = base + factor * (values[work:] - base) if work else factor * values
    return Dense([*table.values[:work], *above.tolist()], table.slope * factor)


@dataclass(frozen=True)
class Predicted:
    """A replay of a row: means over its requests in seconds, and how often requests were preempted."""

    ttft_s: float
    tpot_s: float
    preemptions: int


class Bench:
    """Replays rows of one family; latency tables are compiled once.

    The kernels are the packaged profile's; where KV has another dtype than the packaged model's they are fitted anew to
    the tables that the sample comes with.
    """

    def __init__(self, family: Family) -> None:
        from hydra.utils import instantiate

        cfg = compose([f"model={family.model}", f"gpu={family.gpu}"])
        self.family = family
        self.model: ModelSpec = instantiate(cfg.model)
        self.gpu: GpuSpec = instantiate(cfg.gpu)
        if family.kv_cache_dtype is None:
            profile = FittedLatency().load(self.model, self.gpu)
        else:
            self.model = replace(self.model, kv_cache_dtype=family.kv_cache_dtype)
            profile = fit_from("aiconfigurator", self.model, self.gpu)
        self.kernels = Kernels(profile, profile.profile_hash)

    def replay(self, row: Measured, constants: Constants) -> Predicted:
        """One row under the engine's rules."""
        simulation = self.simulation(row, constants)
        load = simulation.arrivals.apply(simulation.trace, None, simulation.seed)
        result = simulation.replay(load)
        ttft_s, tpot_s = (np.nanmean(result.requests[name].to_numpy()) for name in ("ttft_s", "tpot_s"))
        sending_s = 0.0 if load.think_s is None else float(np.mean(load.think_s))
        return Predicted(
            float(ttft_s) + sending_s, float(tpot_s), int(np.sum(result.requests["preemptions"].to_numpy()))
        )

    def simulation(self, row: Measured, constants: Constants) -> Simulation:
        """The simulation that replays a row."""
        engine = ENGINES[self.family.engine]
        return Simulation(
            trace=_trace(*engine.lengths(row)),
            arrivals=replace(engine.client, concurrency=row.concurrency),
            model=self.model,
            gpu=self.gpu,
            cluster=ClusterSpec(row.tp, row.tp),
            scheme=engine.scheme(row),
            policy=Policy(),
            kv=KvConfig(utilisation=UTILISATION, admission=engine.admission),
            slo=Slo(NEVER_S, NEVER_S),
            latency=Calibrated(self.kernels, constants, row.concurrency),
            backend=ModelBackendConfig(),
        )


def _trace(prompts: Ints, outputs: Ints) -> Trace:
    trace = FixedTrace(requests=len(prompts), interval_s=0.0).load(block_ids=False)
    table = trace.table
    for name, values in (("prompt_tokens", prompts), ("output_tokens", outputs)):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))
    return replace(trace, table=table)


@lru_cache(maxsize=len(FAMILIES))
def bench(name: str) -> Bench:
    """The bench of a family, kept for the life of a process."""
    return Bench(next(family for family in FAMILIES if family.name == name))


def predict(name: str, row: Measured, constants: Constants) -> Predicted:
    """Replay a row of the family of that name; for worker processes."""
    return bench(name).replay(row, constants)
