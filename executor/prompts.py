"""What `confsim run` is asked to continue: texts, token ids, and files of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from confsim.errors import InputError
from executor.config import ModelConfig

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
