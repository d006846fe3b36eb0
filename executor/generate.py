"""`confsim run`: generate tokens end to end on real ranks, planned by the simulator's schemes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from confsim.errors import InputError
from confsim.latency.affine import AffineLatencyConfig
from confsim.outcome.result import write_json
from confsim.outcome.slo import Slo
from confsim.policies import Policy
from confsim.run.engine import Simulation
from confsim.specs import ClusterSpec, GpuSpec
from executor.backend import LiveBackend
from executor.config import ExecutorConfig, ModelConfig, Sampling
from executor.errors import RankError
from executor.prompts import Prompt, load_tokenizer, read_prompts
from executor.runtime import ExecutedIteration, Runtime
from traces.arrivals.recorded import Recorded
from traces.files import write_whole
from traces.load import Load
from traces.trace import SCHEMA, Trace

NO_LIMIT = Slo(ttft_s=1e9, tbt_s=1e9)  # iterations are bounded by their tokens, not by a predicted time
HOST = GpuSpec("executor", 1 << 40, 1e12, 1e12, 1e12, 1)  # memory is given in tokens: nothing is derived from this


@dataclass(frozen=True)
class Generation:
    """What prompts led to, by their position, and what the iterations measured.

    `refused` says why a prompt was not served (empty: it was); `logits` are there where the runtime keeps them.
    """

    tokens: list[list[int]]
    logits: list[list[np.ndarray]]
    refused: list[str]
    preemptions: int
    iterations: list[ExecutedIteration]
    wall_s: float


class PromptBackend(LiveBackend):
    """Ranks that are given prompts, and stay when the run ends; `executed` has every iteration."""

    def __init__(self, runtime: Runtime, sampling: Sampling | None = None) -> None:
        super().__init__(runtime, lambda request, count: self.given[request], sampling)
        self.given: Sequence[np.ndarray] = ()
        self.executed: list[ExecutedIteration] = []

    def create(self, *_: object) -> PromptBackend:
        """The backend of the only loop."""
        return self

    def result(self) -> ExecutedIteration:
        """Wait for the iteration, and keep it."""
        self.executed.append(super().result())
        return self.executed[-1]


def generate(
    runtime: Runtime,
    prompts: Sequence[np.ndarray],
    max_tokens: int | Sequence[int],
    chunk_tokens: int = 512,
    sampling: Sampling | None = None,
    backend: PromptBackend | None = None,
    change: Callable[[Simulation], Simulation] = lambda simulation: simulation,
) -> Generation:
    """Run prompts to their end on a running runtime, which is free for others afterwards.

    They arrive together and get `max_tokens` tokens each; an iteration has about `chunk_tokens` over all groups.
    `change` may replace parts of the simulation that plans it.

    Raises:
        InputError: for token ids that the model does not have.
        RankError: if a rank fails.
    """
    began = time.perf_counter()
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    kept = [index for index, ids in enumerate(prompts) if len(ids)]
    for index in kept:
        runtime.check_ids(prompts[index], f"prompts[{index}] has")
    refused = ["" if len(ids) else "empty_prompt" for ids in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    backend = backend or PromptBackend(runtime, sampling)
    backend.given = [prompts[index] for index in kept]
    preemptions = 0
    if kept:
        load = _load([len(ids) for ids in backend.given], [limits[index] for index in kept])
        rows = change(_simulation(runtime, load.trace, backend, chunk_tokens)).replay(load).requests
        backend.forget()
        preemptions = sum(rows["preemptions"].to_pylist())
        for index, reason in zip(kept, rows["reason"].to_pylist(), strict=True):
            refused[index] = reason or ""
    for done in backend.executed:
        for row, token in done.tokens.items():
            tokens[kept[row]].append(token)
        for row, values in done.logits.items():
            logits[kept[row]].append(values)
    return Generation(tokens, logits, refused, preemptions, backend.executed, time.perf_counter() - began)


def _load(prompt_tokens: list[int], output_tokens: list[int]) -> Load:
    """Requests that all arrive at 0."""
    columns: Mapping[str, Any] = {
        "request_id": range(len(prompt_tokens)),
        "arrival_s": np.zeros(len(prompt_tokens)),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    arrays = [pa.array(columns.get(field.name, [None] * len(prompt_tokens)), field.type) for field in SCHEMA]
    trace = Trace(pa.Table.from_arrays(arrays, schema=SCHEMA), 0, {"name": "prompts"})
    return Load(trace, np.zeros(len(trace)), "recorded", None)


def _simulation(runtime: Runtime, trace: Trace, backend: PromptBackend, chunk_tokens: int) -> Simulation:
    """The scheme of the runtime's layout with the ranks as its clock."""
    layout = runtime.layout
    return Simulation(
        trace,
        Recorded(),
        runtime.model.spec(runtime.device.dtype),
        HOST,
        ClusterSpec(layout.ranks, layout.tp),
        layout.rules.planner(-(-chunk_tokens // layout.groups)),
        Policy(),
        runtime.kv,
        NO_LIMIT,
        AffineLatencyConfig(),
        backend,
    )


def summarise(generation: Generation, config: ExecutorConfig, facts: Mapping[str, object]) -> dict[str, Any]:
    """`summary.json` of a run on ranks that say `facts` of themselves."""
    reasons = [reason for reason in generation.refused if reason]
    busy = [report.busy_share for done in generation.iterations for report in done.ranks]
    overlaps = sorted({done.overlap for done in generation.iterations})
    return {
        "kind": "run",
        "layout": asdict(config.layout),
        "device": facts,
        "requests": len(generation.tokens),
        "completed": len(generation.tokens) - len(reasons),
        "rejected": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "iterations": len(generation.iterations),
        "emitted_tokens": sum(map(len, generation.tokens)),
        "overlap": [name for name in overlaps if name != "none"] or ["none"],
        "overlap_valid": all(done.overlap_valid for done in generation.iterations),
        "busy_share": float(np.median(busy)) if busy else None,
    }


def command(cfg: Any) -> int:
    """Generate as `cfg` (conf/run.yaml) says, print the outputs and write them to the run's folder.

    Raises:
        InputError: for a user's mistake, and for ranks that failed (in one line).
    """
    import hydra

    config: ExecutorConfig = hydra.utils.instantiate(cfg.executor, _convert_="all")
    prompts = read_prompts(_plain(cfg.prompts), config.model)
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.seed)
    for key in ("max_tokens", "chunk_tokens"):
        if cfg[key] < 1:
            raise InputError(f"{key}={cfg[key]}: use 1 or more")
    try:
        with Runtime.of(config) as runtime:
            ids = [prompt.ids for prompt in prompts]
            generation = generate(runtime, ids, cfg.max_tokens, cfg.chunk_tokens, sampling)
            facts = runtime.ready[0].facts
    except RankError as error:
        raise InputError(str(error)) from error
    folder = run_folder(cfg)
    summary, rows = summarise(generation, config, facts), _rows(generation, prompts, config.model)
    _write(folder, generation, summary, rows)
    if not cfg.quiet:
        _show(generation, summary, rows, folder)
    if all(generation.refused):
        raise InputError(f"every prompt was rejected ({generation.refused[0]}): see {folder}")
    return 0


def _plain(node: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node


def run_folder(cfg: Any) -> Path:
    """The running job's output folder; `output.dir` itself outside the command line."""
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        return Path(HydraConfig.get().runtime.output_dir)
    return Path(cfg.output.dir)


def _rows(generation: Generation, prompts: Sequence[Prompt], model: ModelConfig) -> list[dict[str, Any]]:
    """Lines of outputs.jsonl; texts are answered with texts."""
    tokenizer = load_tokenizer(model) if any(prompt.text is not None for prompt in prompts) else None
    return [
        {
            "request": request,
            "prompt": prompt.text,
            "prompt_tokens": len(prompt.ids),
            "token_ids": tokens,
            "text": None if tokenizer is None or prompt.text is None else tokenizer.decode(tokens),
            "rejected": reason or None,
        }
        for request, (prompt, tokens, reason) in enumerate(
            zip(prompts, generation.tokens, generation.refused, strict=True)
        )
    ]


def _write(folder: Path, generation: Generation, summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    write_json(folder / "summary.json", summary)
    write_whole(folder / "outputs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    iterations = [
        {
            "duration_s": done.duration_s,
            "wall_s": done.wall_s,
            "ranks": [{"rank": r.rank, "duration_s": r.duration_s, **r.stages} for r in done.ranks],
        }
        for done in generation.iterations
    ]
    timing = {"wall_s": generation.wall_s, "iterations": iterations}
    write_json(folder / "timing.json", timing)


def _show(generation: Generation, summary: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    for row in rows:
        said = row["rejected"] or (repr(row["text"]) if row["text"] is not None else row["token_ids"])
        console.print(Text(f"[{row['request']}] {row['prompt_tokens']} prompt tokens -> {said}"))
    layout = summary["layout"]
    console.print(
        f"{summary['emitted_tokens']} tokens of {summary['completed']} requests in {summary['iterations']} "
        f"iterations, {generation.wall_s:.2f} s; {layout['kind']} layout, {layout['groups']} groups of {layout['tp']}; "
        f"attention paths: {', '.join(summary['overlap'])}",
        highlight=False,
    )
    for reason, count in summary["rejected"].items():
        console.print(Text(f"warning: {count} of {summary['requests']} requests rejected: {reason}", style="yellow"))
    console.print(Text(f"written to {folder}"))
