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
from executor.generate import Generation, generate, run_folder
from executor.runtime import Runtime

# Largest difference of a logit; logits of the small models here are of order 1.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.02}
LENGTHS = (37, 1, 16, 50, 3)
OUTPUTS = 6
KV = KvConfig(capacity_tokens=1024)
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


# Small models of both families, the second with fewer KV heads than ranks.
LLAMA = ModelConfig(
    family="llama",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    rope=Rope(5e5, 8.0, 1.0, 4.0, 32),
    initializer_range=0.06,
)
QWEN3 = replace(LLAMA, family="qwen3", num_key_value_heads=2, rope=Rope(1e6), tie_word_embeddings=True)


@dataclass(frozen=True)
class CheckedCase:
    """A model on a layout, prompts cut into chunks of `chunk_tokens`."""

    model: str
    layout: str
    ranks: int
    launcher: str
    chunk_tokens: int
    max_abs_error: float | None
    tokens_equal: bool
    passed: bool
    error: str = ""


def run_checks(config: ExecutorConfig, layouts: tuple[Layout, ...] = LAYOUTS) -> list[CheckedCase]:
    """All cases; one that fails does not stop the others."""
    cases = []
    for model in (LLAMA, QWEN3):
        check = LayoutCheck(model.family, replace(model, seed=config.model.seed))
        for layout in layouts:
            cases += check.cases(layout, _device(config.device, layout))
    return cases


def run_joined_check(config: ExecutorConfig) -> list[CheckedCase]:
    """The one case that ranks started by torchrun or Slurm can run: the layout and model they were started for."""
    return LayoutCheck("executor.model", config.model).cases(config.layout, config.device)


class LayoutCheck:
    """Compares layouts that run one model with one CPU rank in float32."""

    def __init__(self, name: str, model: ModelConfig) -> None:
        self.name = name
        self.model = model
        rng = np.random.default_rng(1)
        self._prompts = [rng.integers(0, model.vocab_size, length) for length in LENGTHS]
        with Runtime(model, Layout("tp"), Device(launcher="threads"), KV, keep_logits=True) as runtime:
            self._expected = generate(runtime, self._prompts, OUTPUTS, 4096)

    def cases(self, layout: Layout, device: Device) -> list[CheckedCase]:
        """Prompts whole and cut; a layout whose ranks fail is one failed case."""
        shown, cases = f"{layout.kind} {layout.groups}x{layout.tp}", []
        try:
            with Runtime(self.model, layout, device, KV, keep_logits=True) as runtime:
                for chunk in CHUNKS:
                    worst, equal = self._compare(generate(runtime, self._prompts, OUTPUTS, chunk))
                    passed = worst <= TOLERANCE[device.dtype] and (equal or device.dtype != "float32")
                    cases.append(
                        CheckedCase(self.name, shown, layout.ranks, device.launcher, chunk, worst, equal, passed)
                    )
        except RankError as error:
            cases.append(
                CheckedCase(self.name, shown, layout.ranks, device.launcher, 0, None, False, False, str(error))
            )
        return cases

    def _compare(self, found: Generation) -> tuple[float, bool]:
        """The largest error of a logit as long as the tokens before it agree, and whether all tokens do."""
        worst = 0.0
        for request, rows in enumerate(self._expected.logits):
            for step, row in enumerate(rows):
                if found.tokens[request][:step] != self._expected.tokens[request][:step]:
                    break
                worst = max(worst, float(np.abs(found.logits[request][step] - row).max()))
        return worst, found.tokens == self._expected.tokens


def summarise(cases: list[CheckedCase], config: ExecutorConfig) -> dict[str, Any]:
    """`summary.json`: counts, the largest error, the device, and every case."""
    errors = [case.max_abs_error for case in cases if case.max_abs_error is not None]
    return {
        "kind": "check",
        "cases": len(cases),
        "passed": sum(case.passed for case in cases),
        "failed": sum(not case.passed for case in cases),
        "max_abs_error": max(errors) if errors else None,
        "tolerance": TOLERANCE[config.device.dtype],
        "device": device_name(config.device),
        "dtype": config.device.dtype,
        "results": [asdict(case) for case in cases],
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

    from executor.joined import world_of

    config: ExecutorConfig = hydra.utils.instantiate(cfg.executor, _convert_="all")
    cases = run_joined_check(config) if world_of(os.environ) else run_checks(config)
    summary = summarise(cases, config)
    folder = run_folder(cfg)
    write_json(folder / "summary.json", summary)
    if not cfg.quiet:
        _show(cases, summary, folder)
    return 1 if summary["failed"] else 0


def _device(device: Device, layout: Layout) -> Device:
    """Ranks as processes, but as threads where several of them would have to share one GPU."""
    if device.kind == "cuda":
        import torch

        if layout.ranks > torch.cuda.device_count():
            return replace(device, launcher="threads")
    return device


def _show(cases: list[CheckedCase], summary: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table("model", "layout", "ranks", "as", "chunk", "max error", "tokens", "")
    for case in cases:
        error = case.error or f"{case.max_abs_error:.2e}"
        equal = "equal" if case.tokens_equal else "differ"
        verdict = "pass" if case.passed else "FAIL"
        launcher = "processes" if case.launcher == "auto" else case.launcher
        table.add_row(
            *(case.model, case.layout, str(case.ranks), launcher, str(case.chunk_tokens), error, equal, verdict)
        )
    console.print(table)
    console.print(
        f"{summary['passed']} of {summary['cases']} cases passed on {summary['device']}, {summary['dtype']}; "
        f"written to {folder}",
        highlight=False,
    )
