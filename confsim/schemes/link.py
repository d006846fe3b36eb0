"""Moving KV between two groups of GPUs, by the latency model's own transfer."""

from __future__ import annotations

from dataclasses import dataclass

from confsim.errors import InputError
from confsim.latency.base import LatencyModel
from confsim.schemes.base import Setup


@dataclass(frozen=True)
class KvLink:
    """Sends between two groups of `tp` GPUs each, every GPU to its peer.

    The latency model knows the transfer that ends a prefill over two groups: each GPU lacks `missing` of the `local` KV
    heads that its TP rank keeps and receives those. Whole KV is `local / missing` times as much, so
    whole(n) = kv_transfer_s(n * local / missing). Where nothing would be missing (one KV head a GPU), bytes over the
    GPU's NVLink bandwidth.
    """

    latency: LatencyModel
    ratio: float  # tokens of kv_transfer_s that a token of whole KV is worth; 0: use `second_a_token`
    second_a_token: float
    token_bytes: float  # KV of a token over all layers on one GPU

    @classmethod
    def between(cls, setup: Setup, tp: int) -> KvLink:
        """The link between groups of `tp` GPUs (of different sizes: the smaller)."""
        model = setup.model
        local, shared = model.split_heads(tp, 2)
        missing = local.kv_heads - shared.kv_heads
        token_bytes = float(model.kv_bytes_per_token(tp))
        return cls(
            setup.latency_of(tp, 2),
            local.kv_heads / missing if missing else 0.0,
            token_bytes / setup.gpu.nvlink_bandwidth,
            token_bytes,
        )

    def seconds(self, tokens: float) -> float:
        """Sending the KV of `tokens`, all layers."""
        if tokens <= 0:
            return 0.0
        if not self.ratio:
            return tokens * self.second_a_token
        return self.latency.kv_transfer_s(max(1, round(tokens * self.ratio)))

    def bytes_s(self, size: float) -> float:
        """Sending `size` bytes a GPU over all layers, at the rate of KV."""
        return self.seconds(size / self.token_bytes)


def require_model_backend(setup: Setup, scheme: str) -> None:
    """Refuse a backend that times one loop over all GPUs, as real ranks do: these schemes have several.

    Raises:
        InputError: naming the scheme.
    """
    if not setup.backend.many_loops:
        raise InputError(f"scheme={scheme} runs several loops at once and can only be simulated: use backend=model")
