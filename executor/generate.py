"""`confsim run`: generate tokens end to end on real ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from confsim.errors import InputError
from confsim.outcome.result import write_json
from executor.config import ExecutorConfig, ModelConfig, Sampling
from executor.errors import RankError
from executor.runtime import ExecutedIteration, Runtime
from executor.schedule import Schedule
from traces.files import write_whole

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


class ByteTokenizer:
    """For models without a tokenizer: ids are the bytes of UTF-8; ids above 255 decode to nothing."""

    def __init__(self, model: ModelConfig) -> None:
        if model.vocab_size < 256:
            raise InputError(
                f"prompts: a model with {model.vocab_size} tokens and no tokenizer takes token ids, not text "
                "(prompts=[[1,2,3]])"
            )

    def encode(self, text: str) -> list[int]:
        """Bytes."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are one; what is not UTF-8 is replaced."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer in the folder of the model's weights, else bytes.

    Raises:
        InputError: if there is one but transformers is not installed.
    """
    folder = Path(model.weights) if model.weights else None
    if folder is None or not any((folder / name).exists() for name in TOKENIZER_FILES):
        return ByteTokenizer(model)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(f"{folder} has a tokenizer that needs transformers: pip install transformers") from error
    return cast(Tokenizer, AutoTokenizer.from_pretrained(folder))


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text that they came from if there was one."""

    ids: np.ndarray
    text: str | None


@dataclass
class Output:
    """What a prompt led to; `reason` says why it was refused."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Generation:
    """Outputs in the order of the prompts, and what the iterations measured."""

    outputs: list[Output]
    iterations: list[ExecutedIteration]
    wall_s: float
    facts: dict[str, object]


def read_prompts(given: Any, model: ModelConfig) -> list[Prompt]:
    """Prompts from a text, a list of texts or of id lists, a .txt file (one a line), or a .jsonl file.

    A line of a .jsonl file holds `prompt` (text) or `token_ids`.

    Raises:
        InputError: for anything else, naming the line.
    """
    items = [given] if isinstance(given, str) else list(given or [])
    if isinstance(given, str) and Path(given).suffix in (".txt", ".jsonl"):
        items = _read_file(Path(given))
    if not items:
        raise InputError("prompts is empty: give texts, lists of token ids, or a .txt or .jsonl file")
    is_text = any(isinstance(item, str) for item in items)
    tokenizer = load_tokenizer(model) if is_text else None
    return [_prompt(item, tokenizer, index) for index, item in enumerate(items)]


def _prompt(item: Any, tokenizer: Tokenizer | None, index: int) -> Prompt:
    if isinstance(item, str) and tokenizer is not None:
        return Prompt(np.asarray(tokenizer.encode(item), dtype=np.int64), item)
    try:
        return Prompt(np.asarray([int(i) for i in item], dtype=np.int64), None)
    except (TypeError, ValueError) as error:
        raise InputError(f"prompts[{index}]={item!r}: expected a text or a list of token ids") from error


def _read_file(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"prompts={path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"prompts={path}: not UTF-8 text; is this a binary file?") from error
    if path.suffix == ".txt":
        return [line for line in lines if line.strip()]
    return [_json_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _json_line(path: Path, number: int, line: str) -> Any:
    try:
        row = json.loads(line)
        return row["token_ids"] if "token_ids" in row else row["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}:{number}: expected an object with prompt or token_ids") from error


def generate(
    runtime: Runtime, prompts: list[Prompt], max_tokens: int, chunk_tokens: int, sampling: Sampling
) -> Generation:
    """Run all prompts to their end on a running runtime."""
    begin = time.perf_counter()
    schedule = Schedule(runtime.layout, runtime.model, runtime.kv, chunk_tokens)
    outputs = [Output(prompt) for prompt in prompts]
    for request, output in enumerate(outputs):
        if not len(output.prompt.ids):
            output.reason = "empty_prompt"
            continue
        output.reason = schedule.add(request, len(output.prompt.ids), max_tokens)
        if not output.reason:
            runtime.add(request, output.prompt.ids, sampling)
    iterations = []
    while not schedule.done:
        done = runtime.run(schedule.plan())
        schedule.finish()
        iterations.append(done)
        for request, token in done.tokens.items():
            outputs[request].tokens.append(token)
    facts = runtime.ready[0].facts if runtime.ready else {}
    return Generation(outputs, iterations, time.perf_counter() - begin, facts)


def summarise(generation: Generation, config: ExecutorConfig) -> dict[str, Any]:
    """`summary.json` of a run."""
    done = [output for output in generation.outputs if not output.reason]
    reasons = [output.reason for output in generation.outputs if output.reason]
    busy = [report.busy_share for done in generation.iterations for report in done.ranks]
    overlaps = sorted({done.overlap for done in generation.iterations})
    return {
        "kind": "run",
        "layout": {"kind": config.layout.kind, "groups": config.layout.groups, "tp": config.layout.tp},
        "device": generation.facts,
        "requests": len(generation.outputs),
        "completed": len(done),
        "rejected": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "iterations": len(generation.iterations),
        "emitted_tokens": sum(len(output.tokens) for output in done),
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
            generation = generate(runtime, prompts, cfg.max_tokens, cfg.chunk_tokens, sampling)
    except RankError as error:
        raise InputError(str(error)) from error
    folder = run_folder(cfg)
    _write(folder, generation, config)
    if not cfg.quiet:
        _show(generation, config, folder)
    if generation.outputs and all(output.reason for output in generation.outputs):
        raise InputError(f"every prompt was rejected ({generation.outputs[0].reason}): see {folder}")
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


def _write(folder: Path, generation: Generation, config: ExecutorConfig) -> None:
    write_json(folder / "summary.json", summarise(generation, config))
    tokenizer = _tokenizer_of(generation, config)
    rows = [json.dumps(_row(request, output, tokenizer)) for request, output in enumerate(generation.outputs)]
    write_whole(folder / "outputs.jsonl", "".join(f"{row}\n" for row in rows))
    timing = {
        "wall_s": generation.wall_s,
        "iterations": [
            {
                "duration_s": done.duration_s,
                "wall_s": done.wall_s,
                "ranks": [{"rank": r.rank, "duration_s": r.duration_s, **r.stages} for r in done.ranks],
            }
            for done in generation.iterations
        ],
    }
    write_json(folder / "timing.json", timing)


def _tokenizer_of(generation: Generation, config: ExecutorConfig) -> Tokenizer | None:
    has_text = any(output.prompt.text is not None for output in generation.outputs)
    return load_tokenizer(config.model) if has_text else None


def _row(request: int, output: Output, tokenizer: Tokenizer | None) -> dict[str, Any]:
    is_text = output.prompt.text is not None and tokenizer is not None
    return {
        "request": request,
        "prompt": output.prompt.text,
        "prompt_tokens": len(output.prompt.ids),
        "token_ids": output.tokens,
        "text": tokenizer.decode(output.tokens) if is_text and tokenizer is not None else None,
        "rejected": output.reason or None,
    }


def _show(generation: Generation, config: ExecutorConfig, folder: Path) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    tokenizer = _tokenizer_of(generation, config)
    for request, output in enumerate(generation.outputs):
        row = _row(request, output, tokenizer)
        said = row["rejected"] or (repr(row["text"]) if row["text"] is not None else row["token_ids"])
        console.print(Text(f"[{request}] {len(output.prompt.ids)} prompt tokens -> {said}"))
    summary = summarise(generation, config)
    layout = config.layout
    console.print(
        f"{summary['emitted_tokens']} tokens of {summary['completed']} requests in {len(generation.iterations)} "
        f"iterations, {generation.wall_s:.2f} s; {layout.kind} layout, {layout.groups} groups of {layout.tp}; "
        f"attention paths: {', '.join(summary['overlap'])}",
        highlight=False,
    )
    for reason, count in summary["rejected"].items():
        console.print(Text(f"warning: {count} of {summary['requests']} requests rejected: {reason}", style="yellow"))
    console.print(Text(f"written to {folder}"))
