"""Drawing tokens: greedy, or seeded so that neither layout nor batch changes a draw."""

from __future__ import annotations

import numpy as np
import torch

from executor.config import Sampling
from executor.upload import upload


def sample(
    logits: torch.Tensor, settings: list[Sampling], requests: list[int], positions: torch.Tensor
) -> torch.Tensor:
    """Tokens `[rows]` int64 for `logits [rows, vocabulary]`; `positions[i]` is where row i's token will stand.

    A draw is the argmax of scaled logits plus Gumbel noise that depends on seed, request, position and token alone.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, setting in enumerate(settings) if setting.temperature > 0]
    if not drawn:
        return tokens
    device = logits.device
    rows = upload(drawn, device)
    picked = [settings[row] for row in drawn]
    heat = upload([setting.temperature for setting in picked], device, torch.float32)[:, None]
    scores = _restrict(logits[rows].float() / heat, picked)
    keys = upload(np.array([[settings[row].seed, requests[row]] for row in drawn], dtype=np.int64), device)
    noise = _gumbel(keys, positions[rows], logits.shape[-1])
    tokens[rows] = (scores + noise).argmax(dim=-1)
    return tokens


def _restrict(scores: torch.Tensor, settings: list[Sampling]) -> torch.Tensor:
    if all(setting.top_k == 0 and setting.top_p == 1.0 for setting in settings):
        return scores
    vocabulary = scores.shape[-1]
    top_k = upload([setting.top_k or vocabulary for setting in settings], scores.device)[:, None]
    top_p = upload([setting.top_p for setting in settings], scores.device, torch.float32)[:, None]
    ordered, order = scores.sort(dim=-1, descending=True)
    mass = ordered.softmax(dim=-1).cumsum(dim=-1)
    before = mass - ordered.softmax(dim=-1)
    rank = torch.arange(vocabulary, device=scores.device)[None]
    keep = (rank < top_k) & (before < top_p)
    keep[:, 0] = True
    return torch.full_like(scores, float("-inf")).scatter(1, order, ordered.where(keep, float("-inf")))


def _gumbel(keys: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    state = mix(keys[:, 0] + 0x1234567)
    state = mix(state ^ keys[:, 1])
    state = mix(state ^ positions.to(torch.int64))
    bits = mix(state[:, None] ^ torch.arange(vocabulary, device=keys.device)[None])
    uniform = ((bits & 0xFFFFFFFF).to(torch.float64) + 0.5) / 2**32
    return -torch.log(-torch.log(uniform)).float()


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64 with wrap-around: the same bits on every device."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
