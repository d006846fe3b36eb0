"""A user's own dense model from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from confsim.specs import DTYPE_BYTES, ModelSpec

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
# Keys by which configurations of models that are not dense, causal and uniform give themselves away.
UNSUPPORTED = {
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "is_encoder_decoder": "encoder-decoder",
    "mamba_d_state": "state-space layers",
}


def from_hf_config(
    hf_config: str | None = None,
    name: str | None = None,
    gemm_dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    max_context_tokens: int | None = None,
) -> ModelSpec:
    """The model that `config.json` at `hf_config` (the file or its folder) describes, under `name`.

    Keys that newer checkpoints write as `dtype` or nest under `text_config` are understood.

    Raises:
        InputError: where the file is missing, not JSON, lacks a key, or describes a model that is not dense.
    """
    if hf_config is None:
        raise InputError("model.hf_config is not set: model=hf reads a checkpoint, add model.hf_config=PATH")
    path = Path(hf_config).expanduser()
    path = path / "config.json" if path.is_dir() else path
    data = _text_config(_read(path))
    for key, kind in UNSUPPORTED.items():
        if data.get(key):
            raise InputError(f"{path}: {key}={data[key]} means {kind}; only dense decoder-only models are simulated")
    values = {key: _integer(data, key, path) for key in REQUIRED}
    heads = values["num_attention_heads"]
    dtype = str(data.get("torch_dtype") or data.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise InputError(f"{path}: torch_dtype={dtype} is unknown, use one of {', '.join(DTYPE_BYTES)}")
    kv_heads = _integer(data, "num_key_value_heads", path) if "num_key_value_heads" in data else heads
    if data.get("head_dim"):
        head_dim = _integer(data, "head_dim", path)
    elif values["hidden_size"] % heads:
        raise InputError(f"{path}: hidden_size does not divide by num_attention_heads, give head_dim")
    else:
        head_dim = values["hidden_size"] // heads
    return ModelSpec(
        name=name or _name(path, data),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        torch_dtype=dtype,
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        qk_norm=bool(data.get("use_qk_norm")) or str(data.get("model_type", "")).startswith("qwen3"),
        max_context_tokens=max_context_tokens,
        gemm_dtype=gemm_dtype,
        kv_cache_dtype=kv_cache_dtype,
        **values,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"model.hf_config={path}: no such file, give a config.json or its folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"model.hf_config={path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"model.hf_config={path}:{error.lineno} is not JSON: {error.msg}") from None
    if not isinstance(data, dict):
        raise InputError(f"model.hf_config={path} is not a JSON object: give a checkpoint's config.json")
    return data


def _text_config(data: dict[str, Any]) -> Mapping[str, Any]:
    nested = data.get("text_config")
    return {**data, **nested} if isinstance(nested, dict) else data


def _integer(data: Mapping[str, Any], key: str, path: Path) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{path}: {key}={value!r}, a dense model needs a positive whole number there")
    return value


def _name(path: Path, data: Mapping[str, Any]) -> str:
    """The folder's name, or the repository that the configuration was saved from."""
    saved = str(data.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    folder = path.parent.name if path.name == "config.json" else path.stem
    return (saved or folder or "hf").lower().replace("-", "_").replace(".", "_")
