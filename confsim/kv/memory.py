"""How many tokens of KV a group holds, with every term of the sum named."""

from __future__ import annotations

import math
from dataclasses import dataclass

from confsim.errors import InputError
from confsim.parallel import all_reduce_bytes, output_exchange_bytes, qkv_exchange_bytes
from confsim.specs import GpuSpec, ModelSpec

GIB = 1024**3
MIB = 1024**2
# Captured CUDA graphs of decode and of the linear segments; engines report 0.5 to 1.5 GiB for models of this size.
GRAPH_BYTES = 1 * GIB
# Buffers of one NCCL communicator over 2, 4 and 8 GPUs as measured for aiconfigurator (systems/*.yaml, nccl_mem).
COMMUNICATOR_BYTES = {1: 0, 2: 342 * MIB, 4: 392 * MIB, 8: 392 * MIB}
# A given capacity further than this from the derived one is worth a warning.
TOLERANCE = 0.05


@dataclass(frozen=True)
class KvCapacity:
    """KV of one group of `tp` GPUs; bytes are those of one GPU.

    `tokens` counts whole blocks of the decode layout (a GPU keeps its TP share of the KV heads). While a prompt is
    prefilled over `sp` groups each GPU keeps the heads of its 1 / (tp * sp) share: `shard_token_bytes` a token, with
    every KV head on `kv_replicas` GPUs where there are fewer heads than GPUs.
    """

    gpus: int  # GPUs of the group
    tokens: int
    blocks: int
    block_tokens: int
    given: bool  # kv.capacity_tokens was set
    derived_tokens: int
    terms: dict[str, int]  # bytes of a GPU, adding up to `kv`
    token_bytes: int
    shard_token_bytes: int
    kv_replicas: int
    warnings: tuple[str, ...] = ()

    @property
    def shard_fraction(self) -> float:
        """Share of a decode token's bytes that a prompt token costs each GPU while its KV is spread by head."""
        return self.shard_token_bytes / self.token_bytes

    def lines(self) -> list[str]:
        """The sum, one line a term, in GiB."""
        rows = [f"{name:<14} {value / GIB:9.3f} GiB" for name, value in self.terms.items()]
        kind = "given" if self.given else "derived"
        rows.append(f"{'a token':<14} {self.token_bytes / 1024:9.1f} KiB a GPU")
        if self.shard_token_bytes != self.token_bytes:
            rows.append(f"{'a shard token':<14} {self.shard_token_bytes / 1024:9.1f} KiB a GPU")
        if self.kv_replicas > 1:
            rows.append(f"every KV head of a prompt is kept by {self.kv_replicas} GPUs")
        rows.append(
            f"{'capacity':<14} {self.tokens} tokens a group, {self.blocks} blocks of {self.block_tokens} ({kind})"
        )
        return rows


def activation_bytes(model: ModelSpec, tp: int, sp: int, tokens: int, logit_tokens: int) -> int:
    """Peak of a GPU's activations at `tokens` stacked on its group: the largest of FFN, attention stage and LM head.

    Residual stream and normed input stay alive; the FFN adds gate, up and their product, the attention stage QKV, the
    attention output and (over groups) send and receive buffers of both all-to-alls, the head its logits with a float32
    copy for sampling.
    """
    split, _ = model.split_heads(tp, sp)
    b, d = model.itemsize, model.head_dim
    stream = 2 * all_reduce_bytes(tokens, model.hidden_size, b)
    ffn = tokens * 3 * (model.intermediate_size // tp) * b
    attention = tokens * (2 * split.q_heads + 2 * split.kv_heads) * d * b
    if sp > 1:
        heads = (model.num_attention_heads, model.num_key_value_heads)
        attention += 2 * qkv_exchange_bytes(tokens, *heads, d, b, tp, sp)
        attention += output_exchange_bytes(tokens, heads[0], d, b, tp)
    head = logit_tokens * math.ceil(model.vocab_size / tp) * (b + 4)
    return stream + max(ffn, attention, head)


def kv_capacity(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int,
    sp: int = 1,
    *,
    utilisation: float = 0.9,
    max_batched_tokens: int = 8192,
    logit_tokens: int = 1024,
    graph_bytes: int = GRAPH_BYTES,
    extra_bytes: int = 0,
    weight_copies: int = 1,
    block_tokens: int = 16,
    capacity_tokens: int | None = None,
) -> KvCapacity:
    """KV capacity of a group of `tp` GPUs when `sp` such groups share prefills.

    A GPU's KV = utilisation x reported memory - weights - activation peak - graphs - communicators - extra.
    `max_batched_tokens` is the scheme's largest batch on one group, `weight_copies` how often it keeps the weights
    and `extra_bytes` whatever else it needs on each GPU. `capacity_tokens` (`kv.capacity_tokens`, of this group) wins
    over the sum, with a warning where they differ by more than 5%.

    Raises:
        InputError: for heads that do not divide, or where nothing is left for KV and no capacity was given.
    """
    split, shared = model.split_heads(tp, sp)
    activations = activation_bytes(model, tp, sp, max_batched_tokens, logit_tokens)
    terms = {
        "usable": int(utilisation * gpu.memory_bytes),
        "weights": -weight_copies * model.weight_bytes(tp),
        "activations": -activations,
        "graphs": -graph_bytes,
        "communicators": -_communicator_bytes(tp, sp),
        "extra": -extra_bytes,
    }
    terms = {name: value for name, value in terms.items() if value}
    room = sum(terms.values())
    token_bytes = model.kv_bytes_per_token(tp)
    derived = max(room, 0) // (token_bytes * block_tokens) * block_tokens
    if capacity_tokens is None and derived < block_tokens:
        raise InputError(
            f"{model.name} leaves no memory for KV on {gpu.name} with cluster.tp={tp} "
            f"({', '.join(f'{name} {value / GIB:.1f}' for name, value in terms.items())} GiB): "
            "use a larger cluster.tp, a smaller scheme.max_batched_tokens or another gpu"
        )
    tokens = derived if capacity_tokens is None else capacity_tokens
    return KvCapacity(
        gpus=tp,
        tokens=tokens,
        blocks=tokens // block_tokens,
        block_tokens=block_tokens,
        given=capacity_tokens is not None,
        derived_tokens=derived,
        terms={**terms, "kv": room},
        token_bytes=token_bytes,
        shard_token_bytes=model.kv_bytes_per_token(tp * sp),
        kv_replicas=shared.kv_replicas // split.kv_replicas,
        warnings=_warnings(capacity_tokens, derived),
    )


def _communicator_bytes(tp: int, sp: int) -> int:
    """A communicator over the TP group, and one over the groups for exchanges and one for KV transfers."""

    def one(degree: int) -> int:
        return COMMUNICATOR_BYTES.get(degree, max(COMMUNICATOR_BYTES.values()))

    return one(tp) + 2 * one(sp)


def _warnings(given: int | None, derived: int) -> tuple[str, ...]:
    if given is None or abs(given - derived) <= TOLERANCE * max(derived, 1):
        return ()
    return (
        f"kv.capacity_tokens={given} differs by more than 5% from the {derived} tokens a group that "
        "memory, weights and kv.utilisation give; the given value is used",
    )
