"""`confsim check`: does this hardware compute what one CPU rank computes?"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from confsim.outcome.result import write_json
from confsim.specs import KvConfig
from executor.config import Device, ExecutorConfig, Layout, ModelConfig, Rope
from executor.errors import RankError
from executor.runtime import Runtime
from executor.schedule import Schedule

# Largest difference of a logit; logits of the small models here are of order 1.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.02}
LENGTHS = (37, 1, 16, 50, 3)
OUTPUTS = 6
CHUNKS = (512, 7)  # whole prompts, and cuts at awkward places
LAYOUTS = (
    Layout("xp", 1, 1),
    Layout("xp", 2, 1),
    Layout("xp", 4, 1),
    Layout("xp", 2, 2),
    Layout("sp", 2, 1),
    Layout("tp", 1, 2),
    Layout("mux", 1, 2),
)


@dataclass(frozen=True)
class Outcome:
    """One case: a model on a layout, prompts cut into chunks of `chunk_tokens`."""

    model: str
    layout: str
    ranks: int
    launcher: str
    chunk_tokens: int
    max_abs_error: float | None
    tokens_equal: bool
    passed: bool
    error: str = ""


@dataclass(frozen=True)
class Expected:
    """Tokens and logits by request, from one CPU rank in float32."""

    tokens: dict[int, list[int]]
    logits: dict[int, list[np.ndarray]]


def check_models(config: ExecutorConfig) -> dict[str, ModelConfig]:
    """Small models of both families, the second with fewer KV heads than ranks."""
    llama = ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        rope=Rope(5e5, 8.0, 1.0, 4.0, 32),
        seed=config.model.seed,
        initializer_range=0.06,
    )
    qwen3 = replace(llama, family="qwen3", num_key_value_heads=2, rope=Rope(1e6), tie_word_embeddings=True)
    return {"llama": llama, "qwen3": qwen3}


def run_checks(config: ExecutorConfig, layouts: tuple[Layout, ...] = LAYOUTS) -> list[Outcome]:
    """All cases; one that fails does not stop the others."""
    outcomes = []
    for name, model in check_models(config).items():
        requests = _requests(model)
        expected = _expected(model, requests)
        for layout in layouts:
            outcomes += _check_layout(name, model, layout, _device(config.device, layout), requests, expected)
    return outcomes


def run_joined_check(config: ExecutorConfig) -> list[Outcome]:
    """The one case that ranks started by torchrun or Slurm can run: the layout and model they were started for."""
    requests = _requests(config.model)
    expected = _expected(config.model, requests)
    return _check_layout("executor.model", config.model, config.layout, config.device, requests, expected)


def summarise(outcomes: list[Outcome], config: ExecutorConfig) -> dict[str, Any]:
    """`summary.json`: counts, the largest error, the device, and every case."""
    errors = [outcome.max_abs_error for outcome in outcomes if outcome.max_abs_error is not None]
    return {
        "kind": "check",
        "cases": len(outcomes),
        "passed": sum(outcome.passed for outcome in outcomes),
        "failed": sum(not outcome.passed for outcome in outcomes),
        "max_abs_error": max(errors) if errors else None,
        "tolerance": TOLERANCE[config.device.dtype],
        "device": device_name(config.device),
        "dtype": config.device.dtype,
        "results": [asdict(outcome) for outcome in outcomes],
    }


def device_name(device: Device) -> str:
    """The hardware that ran."""
    import platform

    import torch

    if device.kind == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu ({platform.processor() or platform.machine()}, {os.cpu_count()} cores)"


def command(cfg: Any) -> int:
    """Run the suite as `cfg` (conf/check.yaml) says; 1 if a case failed.

    Raises:
        InputError: for a user's mistake.
    """
    import hydra

    from executor.generate import run_folder
    from executor.joined import world_of

    config: ExecutorConfig = hydra.utils.instantiate(cfg.executor, _convert_="all")
    outcomes = run_joined_check(config) if world_of(os.environ) else run_checks(config)
    summary = summarise(outcomes, config)
    folder = run_folder(cfg)
    write_json(folder / "summary.json", summary)
    if not cfg.quiet:
        _show(outcomes, summary, folder)
    return 1 if summary["failed"] else 0


def _device(device: Device, layout: Layout) -> Device:
    """Ranks as processes, but as threads where several of them would have to share one GPU."""
    if device.kind == "cuda":
        import torch

        if layout.ranks > torch.cuda.device_count():
            return replace(device, launcher="threads")
    return device


def _requests(model: ModelConfig) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(1)
    return {index: rng.integers(0, model.vocab_size, length) for index, length in enumerate(LENGTHS)}


def _expected(model: ModelConfig, requests: dict[int, np.ndarray]) -> Expected:
    with Runtime(model, Layout("tp"), Device(launcher="threads"), _kv(), keep_logits=True) as runtime:
        return _generate(runtime, requests, 4096)


def _kv() -> KvConfig:
    return KvConfig(capacity_tokens=1024)


def _check_layout(
    name: str, model: ModelConfig, layout: Layout, device: Device, requests: dict[int, np.ndarray], expected: Expected
) -> list[Outcome]:
    outcomes = []
    shown = f"{layout.kind} {layout.groups}x{layout.tp}"
    try:
        with Runtime(model, layout, device, _kv(), keep_logits=True) as runtime:
            for chunk in CHUNKS:
                found = _generate(runtime, requests, chunk)
                for request in requests:
                    runtime.forget(request)
                outcomes.append(_compare(name, shown, layout, device, chunk, found, expected))
    except RankError as error:
        outcomes.append(Outcome(name, shown, layout.ranks, device.launcher, 0, None, False, False, str(error)))
    return outcomes


def _generate(runtime: Runtime, requests: dict[int, np.ndarray], chunk_tokens: int) -> Expected:
    schedule = Schedule(runtime.layout, runtime.model, runtime.kv, chunk_tokens)
    for request, tokens in requests.items():
        runtime.add(request, tokens)
        schedule.add(request, len(tokens), OUTPUTS)
    found = Expected({}, {})
    while not schedule.done:
        done = runtime.run(schedule.plan())
        schedule.finish()
        for request, token in done.tokens.items():
            found.tokens.setdefault(request, []).append(token)
            found.logits.setdefault(request, []).append(done.logits[request])
    runtime.run(schedule.plan())  # releases the last requests
    return found


def _compare(
    name: str, shown: str, layout: Layout, device: Device, chunk: int, found: Expected, expected: Expected
) -> Outcome:
    """Logits are compared as long as the tokens before them agree; in float32 all tokens must."""
    worst = 0.0
    for request, rows in expected.logits.items():
        for step, row in enumerate(rows):
            if found.tokens[request][:step] != expected.tokens[request][:step]:
                break
            worst = max(worst, float(np.abs(found.logits[request][step] - row).max()))
    equal = found.tokens == expected.tokens
    passed = worst <= TOLERANCE[device.dtype] and (equal or device.dtype != "float32")
    return Outcome(name, shown, layout.ranks, device.launcher, chunk, worst, equal, passed)


def _show(outcomes: list[Outcome], summary: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table("model", "layout", "ranks", "as", "chunk", "max error", "tokens", "")
    for outcome in outcomes:
        error = outcome.error or f"{outcome.max_abs_error:.2e}"
        equal = "equal" if outcome.tokens_equal else "differ"
        verdict = "pass" if outcome.passed else "FAIL"
        launcher = "processes" if outcome.launcher == "auto" else outcome.launcher
        table.add_row(
            outcome.model,
            outcome.layout,
            str(outcome.ranks),
            launcher,
            str(outcome.chunk_tokens),
            error,
            equal,
            verdict,
        )
    console.print(table)
    console.print(
        f"{summary['passed']} of {summary['cases']} cases passed on {summary['device']}, {summary['dtype']}; "
        f"written to {folder}",
        highlight=False,
    )
