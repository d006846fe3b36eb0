"""Linear segments as CUDA graphs, one a layer and bucket of padded token counts; attention stays outside.

Padding rows are computed and thrown away; KV is appended outside the graphs from the real rows alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.model import EagerLinear, Transformer

Segment = Callable[[], None]
Capture = Callable[[Segment], Segment]  # what a function launches, as something that launches it again


@dataclass(frozen=True)
class Buffers:
    """Static memory of the largest bucket; smaller ones use its first rows."""

    ids: torch.Tensor
    positions: torch.Tensor
    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    qkv: torch.Tensor
    attention: torch.Tensor
    hidden: torch.Tensor

    def rows(self, count: int) -> Buffers:
        """The first rows."""
        return Buffers(*(getattr(self, name)[:count] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Bucket:
    """Graphs of one padded token count: `steps[0]` begins, `steps[i]` finishes layer i - 1, the last one ends."""

    buffers: Buffers
    steps: tuple[Segment, ...]


class GraphedLinear:
    """Segments replayed from graphs; batches larger than every bucket run eagerly."""

    def __init__(self, model: Transformer, sizes: tuple[int, ...], capture: Capture, device: torch.device) -> None:
        self.model = model
        self.sizes = sizes
        whole = _allocate(model, sizes[-1], device)
        # The largest first: later captures fit into the pool that it has made.
        made = {size: _capture_bucket(model, whole.rows(size), capture) for size in reversed(sizes)}
        self.buckets = [made[size] for size in sizes]
        self._eager = EagerLinear(model)
        self._bucket: Bucket | None = None
        self._count = 0

    def begin(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed and project: QKV of layer 0."""
        self._count = len(ids)
        index = bisect_left(self.sizes, self._count)
        self._bucket = self.buckets[index] if index < len(self.sizes) else None
        if self._bucket is None:
            return self._eager.begin(ids, positions)
        buffers = self._bucket.buffers
        buffers.ids[: self._count].copy_(ids)
        buffers.positions[: self._count].copy_(positions)
        self._bucket.steps[0]()
        return buffers.qkv[: self._count]

    def advance(self, layer: int, attention: torch.Tensor) -> torch.Tensor:
        """Finish `layer`; QKV of the next."""
        if self._bucket is None:
            return self._eager.advance(layer, attention)
        self._bucket.buffers.attention[: self._count].copy_(attention)
        self._bucket.steps[layer + 1]()
        return self._bucket.buffers.qkv[: self._count]

    def finish(self, attention: torch.Tensor) -> torch.Tensor:
        """Finish the last layer; normalised hidden states."""
        if self._bucket is None:
            return self._eager.finish(attention)
        self._bucket.buffers.attention[: self._count].copy_(attention)
        self._bucket.steps[-1]()
        return self._bucket.buffers.hidden[: self._count]


class CudaCapture:
    """Captures on one stream of the primary context, all graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, segment: Segment) -> Segment:
        """Warm up (libraries allocate on their first call), then capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            segment()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            segment()
        return graph.replay


def counted(capture: Capture, counts: Counter[str]) -> Capture:
    """A capture whose replays count the bytes of the collectives inside, as running the segment does."""

    def capture_counted(segment: Segment) -> Segment:
        moved: Counter[str] = Counter()

        def once() -> None:
            before = Counter(counts)
            segment()
            moved.clear()
            moved.update(counts - before)

        replay = capture(once)

        def replay_counted() -> None:
            counts.update(moved)
            replay()

        return replay_counted

    return capture_counted


def graphed_linear(
    model: Transformer, sizes: tuple[int, ...], device: torch.device, counts: Counter[str]
) -> GraphedLinear:
    """Graphs of a model on a GPU; with TP a collective call, since the sums inside are captured too."""
    with torch.inference_mode():
        return GraphedLinear(model, sizes, counted(CudaCapture(device), counts), device)


def _allocate(model: Transformer, rows: int, device: torch.device) -> Buffers:
    config, local = model.config, model.place.local
    half, dtype = config.head_dim // 2, model.dtype

    def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(rows, *shape, dtype=kind, device=device)

    return Buffers(
        ids=zeros(kind=torch.int64),
        positions=zeros(kind=torch.int64),
        x=zeros(config.hidden_size),
        cos=zeros(1, half),
        sin=zeros(1, half),
        qkv=zeros(local.q_heads + 2 * local.kv_heads, config.head_dim),
        attention=zeros(local.q_heads * config.head_dim),
        hidden=zeros(config.hidden_size),
    )


def _capture_bucket(model: Transformer, buffers: Buffers, capture: Capture) -> Bucket:
    layers = len(model.weights.layers)

    def begin() -> None:
        x, cos, sin = model.embed(buffers.ids, buffers.positions)
        buffers.x.copy_(x)
        buffers.cos.copy_(cos)
        buffers.sin.copy_(sin)
        buffers.qkv.copy_(model.project(0, buffers.x, buffers.cos, buffers.sin))

    def advance(layer: int) -> Segment:
        def step() -> None:
            buffers.x.copy_(model.feed(layer, buffers.x, buffers.attention))
            buffers.qkv.copy_(model.project(layer + 1, buffers.x, buffers.cos, buffers.sin))

        return step

    def finish() -> None:
        buffers.hidden.copy_(model.close(model.feed(layers - 1, buffers.x, buffers.attention)))

    segments = [begin, *(advance(layer) for layer in range(layers - 1)), finish]
    return Bucket(buffers, tuple(capture(segment) for segment in segments))
