"""Rotary position embedding with Llama 3 scaling."""

from __future__ import annotations

import math

import torch

from executor.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angles a token, `[head_dim / 2]` float32; long wavelengths are slowed by `factor` (Llama 3.1's rule)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.factor is None:
        return inverse
    length = rope.original_max_position
    wavelength = 2 * math.pi / inverse
    smooth = (length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > length / rope.low_freq_factor, inverse / rope.factor, blended)
    return torch.where(wavelength < length / rope.high_freq_factor, inverse, scaled)


def angles(positions: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[tokens, 1, head_dim / 2]` of `positions [tokens]`."""
    turns = positions.to(torch.float32)[:, None, None] * inverse
    return turns.cos().to(dtype), turns.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [tokens, heads, head_dim]` turned; halves are paired as in Hugging Face models."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out
