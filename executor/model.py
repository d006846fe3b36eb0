"""The linear side of the transformer: everything but attention, on a stack of tokens.

A forward pass is a chain of segments with attention between them: `begin`, then for each layer `advance`, at last
`finish`. Segments are what CUDA graphs capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from executor.config import ModelConfig
from executor.place import Place
from executor.rope import angles, inverse_frequencies, rotate
from executor.weights import LayerWeights, Weights

Reduce = Callable[[torch.Tensor], None]


class Linear(Protocol):
    """Segments of one forward pass at a time; tensors hold one row a token."""

    def begin(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed and project: QKV of layer 0, `[tokens, q + 2 kv heads, d]`."""

    def advance(self, layer: int, attention: torch.Tensor) -> torch.Tensor:
        """Finish `layer` with its attention output `[tokens, q_heads * d]`; QKV of the next layer."""

    def finish(self, attention: torch.Tensor) -> torch.Tensor:
        """Finish the last layer; normalised hidden states `[tokens, hidden]`."""


class Transformer:
    """A rank's layers as functions of explicit state; the residual stream is passed along."""

    def __init__(self, config: ModelConfig, place: Place, weights: Weights, reduce: Reduce | None) -> None:
        self.config = config
        self.place = place
        self.weights = weights
        self.reduce = reduce  # sums over the TP group in place; None alone
        self.inverse = inverse_frequencies(config.rope, config.head_dim).to(weights.norm.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.weights.norm.dtype

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Residual stream `[tokens, hidden]`, and the angles of `positions`."""
        cos, sin = angles(positions, self.inverse, self.dtype)
        return F.embedding(ids, self.weights.embedding), cos, sin

    def project(self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """QKV of a layer with norms and rotation applied, `[tokens, q + 2 kv heads, d]`."""
        weights, local = self.weights.layers[layer], self.place.local
        qkv = F.linear(self._norm(x, weights.input_norm), weights.qkv)
        qkv = qkv.view(len(x), local.q_heads + 2 * local.kv_heads, self.config.head_dim)
        turning = qkv[:, : local.q_heads + local.kv_heads]
        turning.copy_(rotate(self._head_norms(turning, weights), cos, sin))
        return qkv

    def feed(self, layer: int, x: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Output projection and feed-forward network; the new residual stream."""
        weights = self.weights.layers[layer]
        x = x + self._sum(F.linear(attention, weights.output))
        gate, up = F.linear(self._norm(x, weights.post_norm), weights.gate_up).chunk(2, dim=-1)
        return x + self._sum(F.linear(F.silu(gate).mul_(up), weights.down))

    def close(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary, `[tokens, head rows]`."""
        return F.linear(hidden, self.weights.head)

    def _head_norms(self, heads: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        if weights.q_norm is None or weights.k_norm is None:
            return heads
        q_heads = self.place.local.q_heads
        q, k = heads[:, :q_heads], heads[:, q_heads:]
        return torch.cat((self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)), dim=1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.reduce is not None:
            self.reduce(x)
        return x


class EagerLinear:
    """Segments run as they come."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._x = self._cos = self._sin = torch.empty(0)

    def begin(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed and project: QKV of layer 0."""
        self._x, self._cos, self._sin = self.model.embed(ids, positions)
        return self.model.project(0, self._x, self._cos, self._sin)

    def advance(self, layer: int, attention: torch.Tensor) -> torch.Tensor:
        """Finish `layer`; QKV of the next."""
        self._x = self.model.feed(layer, self._x, attention)
        return self.model.project(layer + 1, self._x, self._cos, self._sin)

    def finish(self, attention: torch.Tensor) -> torch.Tensor:
        """Finish the last layer; normalised hidden states."""
        return self.model.close(self.model.feed(len(self.model.weights.layers) - 1, self._x, attention))
