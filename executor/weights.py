"""Weights of one rank: from safetensors, or drawn from a seed so that every layout holds the same model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from confsim.errors import InputError
from executor.config import ModelConfig
from executor.place import Place
from executor.sampling import mix

Reader = Callable[[str, tuple[int, ...]], torch.Tensor]
DRAWN_AT_ONCE = 1 << 24  # values: their 64-bit numbers take a few times 128 MiB


@dataclass(frozen=True)
class LayerWeights:
    """One layer's share of a TP rank; matrices are `[out, in]`. `qkv` stacks the rank's query, key and value heads."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """A rank's share of the model: layers split over TP, embedding whole, head split by vocabulary (padded)."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(model: ModelConfig, place: Place, dtype: torch.dtype, device: torch.device) -> Weights:
    """The weights of `place`, on `device`.

    Raises:
        InputError: if files or tensors are missing or have other shapes than the configuration says.
    """
    read = _safetensors_reader(model.weights) if model.weights else _random_reader(model, dtype, device)

    def get(name: str, *shape: int) -> torch.Tensor:
        return read(name, shape).to(dtype)

    embedding = get("model.embed_tokens.weight", model.vocab_size, model.hidden_size)
    whole_head = embedding if model.tie_word_embeddings else get("lm_head.weight", model.vocab_size, model.hidden_size)
    layers = tuple(_layer(model, place, index, get, device) for index in range(model.num_hidden_layers))
    norm = get("model.norm.weight", model.hidden_size).to(device)
    return Weights(embedding.to(device), layers, norm, _head_part(whole_head, place).to(device))


def head_rows(vocab_size: int, tp: int) -> int:
    """Rows of the LM head on each of `tp` ranks; the last rank's are padded with zeros."""
    return -(-vocab_size // tp)


def _layer(
    model: ModelConfig, place: Place, index: int, get: Callable[..., torch.Tensor], device: torch.device
) -> LayerWeights:
    prefix = f"model.layers.{index}."
    dim, hidden = model.head_dim, model.hidden_size
    q = get(prefix + "self_attn.q_proj.weight", model.num_attention_heads * dim, hidden)
    k = get(prefix + "self_attn.k_proj.weight", model.num_key_value_heads * dim, hidden)
    v = get(prefix + "self_attn.v_proj.weight", model.num_key_value_heads * dim, hidden)
    o = get(prefix + "self_attn.o_proj.weight", hidden, model.num_attention_heads * dim)
    gate = get(prefix + "mlp.gate_proj.weight", model.intermediate_size, hidden)
    up = get(prefix + "mlp.up_proj.weight", model.intermediate_size, hidden)
    down = get(prefix + "mlp.down_proj.weight", hidden, model.intermediate_size)
    heads = slice(place.position * place.local.q_heads * dim, (place.position + 1) * place.local.q_heads * dim)
    kv = slice(place.first_kv_head * dim, (place.first_kv_head + place.local.kv_heads) * dim)
    width = model.intermediate_size // place.layout.tp
    part = slice(place.position * width, (place.position + 1) * width)
    has_norms = model.family == "qwen3"
    return LayerWeights(
        input_norm=get(prefix + "input_layernorm.weight", hidden).to(device),
        qkv=torch.cat((q[heads], k[kv], v[kv])).to(device),
        q_norm=get(prefix + "self_attn.q_norm.weight", dim).to(device) if has_norms else None,
        k_norm=get(prefix + "self_attn.k_norm.weight", dim).to(device) if has_norms else None,
        output=o[:, heads].contiguous().to(device),
        post_norm=get(prefix + "post_attention_layernorm.weight", hidden).to(device),
        gate_up=torch.cat((gate[part], up[part])).to(device),
        down=down[:, part].contiguous().to(device),
    )


def _head_part(head: torch.Tensor, place: Place) -> torch.Tensor:
    if place.layout.tp == 1:
        return head
    rows = head_rows(len(head), place.layout.tp)
    part = head[place.position * rows : (place.position + 1) * rows]
    padding = rows - len(part)
    return torch.cat((part, part.new_zeros(padding, part.shape[1]))) if padding else part.contiguous()


def _random_reader(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Reader:
    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        # One stream per tensor: the same values whatever a rank reads, and in whatever order.
        seed = hashlib.blake2b(f"{model.seed} {name}".encode(), digest_size=8).digest()
        return _draw(shape, int.from_bytes(seed, "little", signed=True), model.initializer_range, dtype, device)

    return read


def _draw(shape: tuple[int, ...], seed: int, std: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values of a nearly normal distribution, drawn where they are kept: the same ones on every device.

    Each is a sum of four 16-bit numbers, which float32 holds exactly, times a factor.
    """
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1)
    factor = std / math.sqrt((2**32 - 1) / 3)
    for start in range(0, flat.numel(), DRAWN_AT_ONCE):
        stop = min(start + DRAWN_AT_ONCE, flat.numel())
        bits = mix(torch.arange(start, stop, device=device) ^ seed)
        total = (bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) + ((bits >> 32) & 0xFFFF) + ((bits >> 48) & 0xFFFF)
        flat[start:stop] = (total - 2 * 0xFFFF).to(torch.float32) * factor
    return out


def _safetensors_reader(folder: str) -> Reader:
    from safetensors import safe_open

    files = _weight_files(Path(folder))

    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in files:
            raise InputError(f"{folder}: tensor {name} is missing")
        with safe_open(files[name], framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{files[name]}: tensor {name} is {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor

    return read


def _weight_files(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise InputError(f"{folder}: holds neither model.safetensors nor model.safetensors.index.json")
    with safe_open(single, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), single)
