"""The CUDA modules without a GPU: fake tensors, stand-ins for the driver and for streams, flash-attn's signatures."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from executor_harness import THREADS, prompts, tiny
from fake_cuda import fake_cuda
from flash_stub import FLASH2, FLASH3
from torch.nn.attention.varlen import varlen_attn

from confsim.errors import InputError
from confsim.specs import KvConfig
from executor.clock import StageClock
from executor.collectives import Groups
from executor.config import Device, Layout, Sampling
from executor.cuda import green_context
from executor.cuda.graphs import GraphedLinear, counted
from executor.cuda.streams import EventClock, StreamApi, StreamFork, make_clock_and_fork, partition_fork
from executor.exchange import Exchange, shard_order
from executor.fork import Fork, ThreadFork
from executor.kernels import choose, page_tokens
from executor.kernels.base import DecodeBatch, PrefillBatch
from executor.kernels.flash2 import Flash2Kernels
from executor.kernels.flash3 import Flash3Kernels
from executor.kernels.sdpa import SdpaKernels
from executor.kernels.varlen import VarlenKernels
from executor.kv import PagePool, UnitPool
from executor.layouts.base import Parts
from executor.layouts.xp import XpRunner
from executor.ledger import Ledger
from executor.message import Chunk, Iteration, NewRequest
from executor.model import EagerLinear, Transformer
from executor.place import Place
from executor.runtime import Runtime
from executor.sampling import sample
from executor.upload import upload
from executor.weights import load_weights
from executor.work import DecodeRows, Work

ROOT = Path(__file__).resolve().parents[2]
CUDA = Device("cuda", "bfloat16")


def varlen(*args: object, **kwargs: object) -> torch.Tensor:
    """`varlen_attn` of the installed PyTorch, which checks its arguments; its kernel is stood in for on CPU."""
    from flash_stub import _attend
    from torch.nn.attention import varlen as module

    captured: dict[str, object] = {}

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window, gqa, used, table, splits):  # type: ignore[no-untyped-def]
        assert (gqa, scale, splits) == (True, None, None)
        assert causal == (max_q > 1)  # any window keeps the grouped heads of single queries from being packed
        assert window == ([-1, 0] if causal else [-1, -1])
        assert k.shape[1] % 256 == 0
        captured["out"] = _attend(q, (k, v), table, cu_q, used)
        return captured["out"], None, None

    original = torch.ops.torch_attn._varlen_attn
    if args[0].device.type != "cpu":  # type: ignore[attr-defined]
        return module.varlen_attn(*args, **kwargs)  # type: ignore[arg-type,return-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.torch_attn, "_varlen_attn", kernel)
        out = module.varlen_attn(*args, **kwargs)  # type: ignore[arg-type]
    assert torch.ops.torch_attn._varlen_attn is original
    return out  # type: ignore[return-value]


def install(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    """Have these attention packages installed and no others."""
    for name in ("flash_attn", "flash_attn_interface", "torch.nn.attention.varlen"):
        monkeypatch.setitem(sys.modules, name, modules.get(name))


KERNELS = {
    "flash2": Flash2Kernels(FLASH2, "2.8.3"),
    "flash3": Flash3Kernels(FLASH3, "3.0.0", total_sms=132),
    "varlen": VarlenKernels(varlen, {}),
}


def of_2_11(
    query: object,
    key: object,
    value: object,
    cu_seq_q: object,
    cu_seq_k: object,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> object:
    """`varlen_attn` before it knew pages: it would refuse the arguments, whatever the version says."""
    raise AssertionError("was called")


def test_the_signature_of_varlen_attn_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a version: a function without pages is passed over, or named where it was asked for."""
    name = "torch.nn.attention.varlen"
    install(monkeypatch, **{name: SimpleNamespace(varlen_attn=of_2_11)})
    assert choose(CUDA).name == "sdpa"
    with pytest.raises(InputError, match="varlen_attn takes block_table"):
        choose(Device("cuda", "bfloat16", attention="varlen"))
    install(monkeypatch, **{name: SimpleNamespace(varlen_attn=with_pages)})
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    chosen = choose(Device("cuda", "bfloat16", attention="varlen", num_splits=4))
    assert isinstance(chosen, VarlenKernels)
    assert chosen.splits == {}  # it has none to tell


def with_pages(*args: object, enable_gqa: bool, seqused_k: object, block_table: object) -> object:
    """A `varlen_attn` that takes pages, but no number of splits."""
    raise AssertionError("was called")


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_agree_with_sdpa(name: str) -> None:
    """Every argument means what flash-attn documents: lengths, offsets, pages, alignment of the causal mask."""
    torch.manual_seed(0)
    page, kernels = 256, KERNELS[name]
    keys, values = torch.randn(9, page, 2, 16), torch.randn(9, page, 2, 16)
    table = torch.tensor([[3, 1], [5, 0], [7, 8]], dtype=torch.int32)
    chunks = PrefillBatch((4, 300, 1), (259, 300, 40), table)
    q = torch.randn(305, 6, 16)
    torch.testing.assert_close(
        kernels.prefill(q, keys, values, chunks), SdpaKernels().prefill(q, keys, values, chunks), atol=1e-5, rtol=1e-5
    )
    decodes = DecodeBatch(np.array([500, 1, 37]), table, page)
    q = torch.randn(3, 6, 16)
    torch.testing.assert_close(
        kernels.decode(q, keys, values, decodes), SdpaKernels().decode(q, keys, values, decodes), atol=1e-5, rtol=1e-5
    )


def test_decode_buckets_bound_the_padding() -> None:
    lengths = np.array([1000, 3, 5, 900, 2, 16])
    batch = DecodeBatch(lengths, torch.zeros(6, 63, dtype=torch.int32), 16)
    assert sorted(len(bucket.block_table) for bucket in batch.buckets) == [1, 1, 1, 1, 2]
    even = DecodeBatch(np.array([100, 90, 110]), torch.zeros(3, 7, dtype=torch.int32), 16)
    assert [bucket.members for bucket in even.buckets] == [None]


@pytest.mark.parametrize("name", ["flash2", "flash3", "varlen", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_forward_on_a_fake_gpu(name: str, family: str) -> None:
    """A mixed iteration from plan to tokens: tensors stay on the GPU, in bfloat16, and nothing waits for it."""
    model = tiny(family)
    blocking: list[str] = []
    with fake_cuda(blocking) as device:
        place = Place.of(0, Layout("xp"), model)
        groups = Groups()
        weights = load_weights(model, place, torch.bfloat16, device)
        transformer = Transformer(model, place, weights, None)
        pool = UnitPool(PagePool(64, 256, 16), (3, 4, 16), torch.bfloat16, device)
        ledger = Ledger(place, groups, pool, True)
        kernels = SdpaKernels() if name == "sdpa" else KERNELS[name]
        linear = EagerLinear(transformer)
        parts = Parts(place, groups, pool, kernels, StageClock(), Fork(), Exchange(place, groups), linear, linear, 3)
        runner = XpRunner(parts)
        drawn = Sampling(0.8, top_k=5, top_p=0.9)
        new = (NewRequest(0, np.arange(20), drawn), NewRequest(1, np.arange(30), Sampling()))
        blocking.clear()
        first = Iteration(0, (Chunk(0, 0, (20,), True, 0),), ((),), (), new)
        work = ledger.prepare(first)
        hidden = runner.forward(work)
        assert (hidden.shape, hidden.device, hidden.dtype) == ((1, 64), device, torch.bfloat16)
        ledger.settle(first, work, torch.zeros(1, dtype=torch.int64, device=device))
        mixed = Iteration(1, (Chunk(1, 0, (7,), False, -1),), ((0,),), (), ())
        work = ledger.prepare(mixed)
        logits = transformer.logits(runner.forward(work))
        assert (logits.shape, logits.device) == ((1, 131), device)
        assert work.decode is not None
        assert (work.prefill_rows, len(work.decode.ids)) == (7, 1)
        tokens = sample(logits, [drawn], work.sampled, upload([31], device, torch.int64))
        ledger.settle(mixed, work, tokens)
        assert blocking == []
        torch.tensor([1, 2], device=device), torch.zeros(3).to(device), logits[[0]], tokens.cpu()
        assert blocking == ["tensor", "to", "__getitem__", "cpu"]  # what waits is noticed; values cannot be read at all


def test_exchange_of_replicated_heads_waits_for_nothing() -> None:
    """Heads that several groups compute are picked by an index that is on the GPU already, in every layer."""
    blocking: list[str] = []
    with fake_cuda(blocking) as device:
        place = Place.of(0, Layout("xp", 4, 1), tiny("llama", 8, 2))
        exchange = Exchange(place, Groups())
        qkv = torch.empty(3, 8 + 2 * 2, 16, device=device)
        blocking.clear()
        shards = shard_order([(2, 1, 3, 0), (1, 2, 0, 3)], device)
        for _ in range(2):
            spread = exchange.to_heads(qkv, shards)
            assert (spread.shape, spread.device) == ((12, 2 + 2, 16), device)
            assert exchange.to_rows(spread[:, :2], shards).shape == (3, 8 * 16)
    assert blocking == []


@pytest.mark.parametrize(("page", "good"), [(16, False), (128, False), (256, True), (512, True), (None, True)])
def test_flash_attn_2_page_sizes(monkeypatch: pytest.MonkeyPatch, page: int | None, good: bool) -> None:
    """E9: checked against the installed version when the runtime is configured."""
    install(monkeypatch, flash_attn=FLASH2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = Device("cuda", "bfloat16", attention="flash", page_tokens=page)
    if good:
        Runtime(tiny(), Layout("xp", 2, 1), device)
        assert page_tokens(device, 16) == (page or 256)
    else:
        with pytest.raises(InputError, match=r"flash-attn 2 2\.8\.3 takes multiples of 256"):
            Runtime(tiny(), Layout("xp", 2, 1), device)


def test_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose(CUDA).name == "sdpa"
    install(monkeypatch, **{"torch.nn.attention.varlen": SimpleNamespace(varlen_attn=varlen_attn)})
    assert choose(CUDA).name == "torch varlen"
    install(monkeypatch, flash_attn=FLASH2)
    assert choose(CUDA).name == "flash-attn 2"
    install(monkeypatch, flash_attn=FLASH2, flash_attn_interface=FLASH3)
    chosen = choose(Device("cuda", "bfloat16", overlap="partition", decode_sms=32))
    assert isinstance(chosen, Flash3Kernels)
    assert chosen.total_sms == 132
    assert choose(Device("cuda", "float32")).name == "sdpa"
    with pytest.raises(InputError, match="not float32"):
        choose(Device("cuda", "float32", attention="flash"))
    install(monkeypatch)
    with pytest.raises(InputError, match=r"needs flash-attn 2\.5"):
        choose(Device("cuda", "bfloat16", attention="flash"))
    install(monkeypatch, flash_attn=SimpleNamespace(__version__="2.3.0"))
    with pytest.raises(InputError, match="no paged KV"):
        choose(CUDA)


def test_no_gpu_is_said_before_ranks_start() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match="no CUDA device here"):
        Runtime(tiny(), Layout("xp"), CUDA)


def test_empty_chunks_never_reach_a_kernel() -> None:
    """E10: zero-length sequences are dropped with the plan; an iteration with nothing left is still one."""
    from confsim.run.plan import DecodeBatch as Decodes
    from confsim.run.plan import IterationPlan, PrefillChunk
    from confsim.run.request import Request

    with Runtime(tiny(), Layout("xp", 2, 1), THREADS, KvConfig(capacity_tokens=256)) as runtime:
        batches = (Decodes(0), Decodes(1))
        runtime.add(0, prompts([9])[0])
        runtime.add(1, prompts([4])[0])
        empty = PrefillChunk(Request(0, 0.0, 9), 0, (0, 0))
        last = PrefillChunk(Request(1, 0.0, 4), 0, (0, 4), True, -1)
        assert runtime.run(IterationPlan((empty,), batches)).tokens == {}
        assert set(runtime.run(IterationPlan((empty, last), batches)).tokens) == {1}


class Stream:
    """A CUDA stream in miniature: work is queued, and runs when somebody synchronises, other streams first."""

    def __init__(self, api: FakeStreams, delayed: bool = False) -> None:
        self.api = api
        self.delayed = delayed
        self.queue: list[object] = []

    def wait_event(self, event: Event) -> None:
        self.queue.append(("wait", event))


class Event:
    """Done once its place in its stream's queue is reached."""

    def __init__(self) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        self.done = False
        stream.queue.append(("record", self))


class FakeStreams:
    """Streams whose interleaving is the worst that the events allow: the delayed one runs only when it must."""

    def __init__(self) -> None:
        self.caller, self.prefill, self.decode = Stream(self), Stream(self, True), Stream(self)
        self.current = self.caller

    @contextmanager
    def use(self, stream: Stream):  # type: ignore[no-untyped-def]
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, work) -> None:  # type: ignore[no-untyped-def]
        self.current.queue.append(("run", work))

    def finish(self) -> None:
        order = [self.caller, self.decode, self.prefill]
        while any(stream.queue for stream in order):
            ready = next((stream for stream in order if stream.queue and self._can(stream)), None)
            assert ready is not None, "deadlock"
            kind, item = ready.queue.pop(0)  # type: ignore[misc]
            if kind == "run":
                item()
            elif kind == "record":
                item.done = True

    def _can(self, stream: Stream) -> bool:
        kind, item = stream.queue[0]  # type: ignore[misc]
        return kind != "wait" or item.done


def test_every_hand_over_between_streams_has_an_event() -> None:
    """E8: with the prefill stream delayed as far as events allow, each reader still sees what it must see."""
    streams = FakeStreams()
    api = StreamApi(streams.use, lambda: streams.current, Event)
    fork = StreamFork(streams.prefill, streams.decode, api, "streams", {})
    memory = {"qkv": 0, "prefill": 0, "decode": 0}
    seen = []

    def linear(value: int) -> None:
        streams.launch(lambda: (seen.append((memory["prefill"], memory["decode"])), memory.update(qkv=value)))

    def path(name: str) -> None:
        streams.launch(lambda: memory.update({name: memory["qkv"] * 10}))

    for layer in (1, 2, 3):
        linear(layer)
        fork.run(lambda sms: path("prefill"), lambda sms: path("decode"))
    linear(4)
    streams.finish()
    assert seen == [(0, 0), (10, 10), (20, 20), (30, 30)]


def test_delayed_path_on_threads_changes_nothing() -> None:
    """The same on CPU: the merged batch waits for the slower of the two paths."""
    fork = ThreadFork()
    out = torch.zeros(2)

    def slow(sms: int | None) -> None:
        time.sleep(0.05)
        out[0] = 1

    fork.run(slow, lambda sms: out[1].fill_(2))
    assert out.tolist() == [1, 2]
    with pytest.raises(ValueError, match="decode"):
        fork.run(lambda sms: None, lambda sms: (_ for _ in ()).throw(ValueError("decode")))
    with pytest.raises(ValueError, match="prefill"):
        fork.run(lambda sms: (_ for _ in ()).throw(ValueError("prefill")), slow)
    fork.close()


class TimedEvent:
    """Records a shared clock that the test turns."""

    now_ms = 0.0

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        self.at = TimedEvent.now_ms

    def synchronize(self) -> None:
        time.sleep(0.02)

    def elapsed_time(self, other: TimedEvent) -> float:
        return other.at - self.at


def test_event_clock_accounts_by_stage() -> None:
    clock = EventClock(StreamApi(lambda s: None, lambda: None, TimedEvent))
    clock.start()
    for name, ms in (("linear", 4.0), ("decode_attention", 3.0), ("prefill_attention", 2.0), ("linear", 1.0)):
        with clock.stage(name):
            TimedEvent.now_ms += ms
    TimedEvent.now_ms += 2.0
    spent = clock.stop()
    assert spent.duration_s == pytest.approx(0.012)
    assert spent.launch_s < 0.02  # waiting for the device is no launching
    assert spent.stages["linear"] == pytest.approx(0.005)
    assert spent.busy_share == pytest.approx((5 + 3) / 12)


class Driver:
    """cuda-bindings as far as a split needs it: 132 SMs, granted in multiples of 8."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        self.splits: list[tuple[object, ...]] = []
        self.streams: list[tuple[object, ...]] = []

    def cuDeviceGet(self, index: int) -> tuple[object, ...]:
        return 0, f"device{index}"

    def cuDeviceGetDevResource(self, device: str, kind: str) -> tuple[object, ...]:
        return 0, 132

    def cuDevSmResourceSplitByCount(self, groups: int, resource: int, flags: int, count: int) -> tuple[object, ...]:
        self.splits.append((groups, resource, count))
        granted = -(-count // 8) * 8
        return 0, [granted], groups, resource - granted

    def cuDevResourceGenerateDesc(self, resources: list[int], count: int) -> tuple[object, ...]:
        return 0, resources[0]

    def cuGreenCtxCreate(self, descriptor: int, device: str, flags: int) -> tuple[object, ...]:
        return 0, descriptor

    def cuGreenCtxGetDevResource(self, context: int, kind: str) -> tuple[object, ...]:
        return 0, SimpleNamespace(sm=SimpleNamespace(smCount=context))

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> tuple[object, ...]:
        self.streams.append((context, flags))
        return 0, f"stream of {context}"


def test_one_split_decode_first_and_sizes_read_back() -> None:
    """E7: what was granted counts, not what was asked for."""
    driver = Driver()
    parts = green_context.split_device(driver, 0, 30)
    assert driver.splits == [(1, 132, 30)]
    assert parts == (("stream of 32", 32), ("stream of 100", 100))
    assert [flags for _, flags in driver.streams] == [1, 1]


def test_driver_refusal_names_the_error() -> None:
    driver = Driver()
    driver.cuDeviceGetDevResource = lambda device, kind: (801, None)  # type: ignore[method-assign]
    with pytest.raises(green_context.PartitionError, match="801"):
        green_context.split_device(driver, 0, 32)


def test_overlapping_partitions_are_refused() -> None:
    green_context.check_disjoint({0, 1}, {2, 3})
    with pytest.raises(green_context.PartitionError, match=r"share SMs \[2\]"):
        green_context.check_disjoint({0, 1, 2}, {2, 3})


class GreenStream:
    """A stream on a green context that may refuse events, as a driver may."""

    refuses = False

    def __init__(self, handle: int = 0, device: int = 0) -> None:
        self.seen: list[str] = []

    def wait_event(self, event: object) -> None:
        self.seen.append("waited")


class GreenEvent:
    def record(self, stream: GreenStream) -> None:
        if GreenStream.refuses:
            raise RuntimeError("CUDA error: invalid resource handle\nCompile with TORCH_USE_CUDA_DSA")
        stream.seen.append("recorded")

    def synchronize(self) -> None:
        return None


@pytest.fixture
def green_machine(monkeypatch: pytest.MonkeyPatch) -> list[GreenStream]:
    """A machine that grants a partition of 132 SMs; its streams."""
    made: list[GreenStream] = []

    def stream(handle: int = 0, device: object = None) -> GreenStream:
        made.append(GreenStream())
        return made[-1]

    driver = Driver()
    driver.cuGreenCtxStreamCreate = lambda context, flags, priority: (0, context)  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=driver)))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "ExternalStream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", GreenEvent)
    monkeypatch.setattr(GreenStream, "refuses", False)
    ids = iter(({0, 1}, {2, 3}))
    monkeypatch.setattr(green_context, "collect_sm_ids", lambda stream, sms: next(ids))
    return made


def test_a_partition_is_taken_once_its_streams_have_taken_events(green_machine: list[GreenStream]) -> None:
    found = green_context.partition(0, 32)
    assert (found.decode_sms, found.prefill_sms) == (32, 100)
    for stream in (found.decode_stream, found.prefill_stream):
        assert stream.seen == ["waited", "recorded"]


def test_sms_are_left_alone_only_beside_the_other_path(green_machine: list[GreenStream]) -> None:
    """Each call in a partition knows what was granted; a path alone, or on a plain stream, has the whole GPU."""
    streams = FakeStreams()
    api = StreamApi(streams.use, lambda: streams.current, Event)
    told: list[int | None] = []
    partitioned = partition_fork(replace(green_context.partition(0, 30), decode_stream=streams.decode), api)
    partitioned.prefill_stream = streams.prefill
    partitioned.run(told.append, told.append)
    assert told == [32, 100]  # decode is launched first; 30 were asked for
    told.clear()
    StreamFork(streams.prefill, streams.decode, api, "streams", {}).run(told.append, told.append)
    alone = Work(None, cast(DecodeRows, object()), (), torch.zeros(0), None)
    alone.run_paths(partitioned, told.append, told.append)
    assert told == [None, None, None]


def test_flash_attn_3_is_told_per_call_what_to_leave_alone() -> None:
    margins: list[int] = []

    def record(q: torch.Tensor, *args: object, sm_margin: int, **kwargs: object) -> torch.Tensor:
        margins.append(sm_margin)
        return q

    kernels = Flash3Kernels(SimpleNamespace(flash_attn_with_kvcache=record), "3.0.0", total_sms=132)
    pages, table = torch.zeros(1, 16, 1, 8), torch.zeros(1, 1, dtype=torch.int32)
    for sms in (None, 32):
        kernels.decode(torch.zeros(1, 2, 8), pages, pages, DecodeBatch(np.array([3]), table, 16), sms)
        kernels.prefill(torch.zeros(3, 2, 8), pages, pages, PrefillBatch((3,), (3,), table), sms)
    assert margins == [0, 0, 100, 100]


@pytest.mark.parametrize("failure", ["events", "toolkit", "driver", "bindings"])
def test_plain_streams_where_there_is_no_partition(
    monkeypatch: pytest.MonkeyPatch, green_machine: list[GreenStream], failure: str
) -> None:
    """Whatever goes wrong while a partition is made, the rank runs on plain streams and says why."""

    def no_toolkit(stream: object, sms: int) -> set[int]:
        raise OSError("libnvrtc.so: cannot open shared object file")

    def no_driver() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    if failure == "events":
        monkeypatch.setattr(GreenStream, "refuses", True)
    elif failure == "toolkit":
        monkeypatch.setattr(green_context, "collect_sm_ids", no_toolkit)
    elif failure == "driver":
        monkeypatch.setattr(torch.cuda, "init", no_driver)
    else:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    _, fork = make_clock_and_fork(replace(CUDA, overlap="partition", decode_sms=32), torch.device("cuda", 0))
    said = {
        "events": "RuntimeError: CUDA error: invalid resource handle",
        "toolkit": "OSError: libnvrtc.so: cannot open shared object file",
        "driver": "AssertionError: Torch not compiled with CUDA enabled",
        "bindings": "cuda-bindings is not installed",
    }
    assert (fork.name, fork.facts) == ("streams", {"no_partition": said[failure]})


@pytest.mark.parametrize(
    ("asked", "capability", "granted"), [(30, (9, 0), 32), (32, (9, 0), 32), (1, (9, 0), 8), (5, (8, 0), 6)]
)
def test_sm_counts_are_rounded_as_the_driver_does(asked: int, capability: tuple[int, int], granted: int) -> None:
    assert green_context.round_sms(asked, 132, capability) == granted


def test_a_partition_leaves_something_for_prefill() -> None:
    with pytest.raises(green_context.PartitionError, match="leave none"):
        green_context.round_sms(130, 132, (9, 0))


def test_thread_ranks_are_built_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA captures one graph at a time in a process: no rank is built beside another, or while one runs."""
    from executor import rank

    original, inside, seen = rank.load_weights, [], []

    def load(*args: object) -> object:
        inside.append(1)
        seen.append(len(inside))
        time.sleep(0.05)
        loaded = original(*args)
        inside.pop()
        return loaded

    monkeypatch.setattr(rank, "load_weights", load)
    with Runtime(tiny(), Layout("xp", 2, 2), THREADS, KvConfig(capacity_tokens=64)):
        assert seen == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("device", "layout", "reason"),
    [
        (CUDA, Layout("xp", 2, 2), ""),
        (replace(CUDA, launcher="threads"), Layout("xp", 4, 1), ""),
        (replace(CUDA, launcher="threads"), Layout("xp", 2, 2), "wait on the host"),
        (replace(CUDA, graphs=False), Layout("xp", 2, 1), "not asked for"),
        (THREADS, Layout("xp", 2, 1), "on CPU"),
    ],
)
def test_where_there_are_no_graphs_it_is_said(device: Device, layout: Layout, reason: str) -> None:
    """Threads that sum over a TP group synchronise inside a segment, which a capture does not allow."""
    from executor.rank import no_graphs

    found = no_graphs(device, layout)
    assert reason in found
    assert bool(found) == bool(reason)


def test_graphs_pad_and_fall_back() -> None:
    """Segments replayed on padded static buffers give the rows that running them gives; larger batches run eagerly."""
    model = tiny("qwen3")
    place = Place.of(0, Layout("tp"), model)
    cpu = torch.device("cpu")
    transformer = Transformer(model, place, load_weights(model, place, torch.float32, cpu), None)
    captured = []

    def capture(segment):  # type: ignore[no-untyped-def]
        captured.append(segment)
        return segment

    graphed, eager = GraphedLinear(transformer, (4, 16), capture, cpu), EagerLinear(transformer)
    assert len(captured) == 2 * (model.num_hidden_layers + 1)
    for rows in (3, 16, 1, 0, 17, 4):
        ids, positions = torch.randint(0, 131, (rows,)), torch.arange(rows) + 5
        attention = torch.randn(3, rows, 8 * 16)
        found = [
            [
                side.begin(ids, positions).clone(),
                *(side.advance(i, attention[i]).clone() for i in range(2)),
                side.finish(attention[2]).clone(),
            ]
            for side in (graphed, eager)
        ]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


def test_replays_count_their_collectives() -> None:
    counts: Counter[str] = Counter()

    def segment() -> None:
        counts["all_reduce"] += 64

    def capture(run):  # type: ignore[no-untyped-def]
        run()  # warms up
        run()  # is captured
        return lambda: None

    replay = counted(capture, counts)(segment)
    counts.clear()
    replay()
    replay()
    assert counts == {"all_reduce": 128}


def test_import_needs_neither_flash_attn_nor_cuda() -> None:
    """E11: everything imports on a CPU-only machine; `import executor` alone does not even load torch."""
    code = (
        "import sys, executor; assert 'torch' not in sys.modules;"
        "import executor.kernels, executor.cuda.graphs, executor.cuda.streams, executor.gpu_check, executor.check;"
        "assert not any(name.startswith(('flash_attn', 'cuda.')) for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_gpu_script_in_cpu_mode(tmp_path: Path) -> None:
    """It needs torch, numpy, and what a bare GPU machine has; nothing of the command line or of the reports."""
    import json

    from executor.gpu_check import main

    out = tmp_path / "check.json"
    absent = ("rich", "safetensors", "transformers", "platformdirs", "aiconfigurator_core", "hypothesis", "flash_attn")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}));"
        f"from executor.gpu_check import main; sys.exit(main(['--device', 'cpu', '--out', {str(out)!r}]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    found = json.loads(out.read_text())
    assert found["equivalence"]["failed"] == 0
    assert found["left_out"] == []
    assert [row["fork"] for row in found["overlap"]["together"]] == ["turn", "threads"]
    assert [row["overlap"] for row in found["iterations"]["rows"]] == ["none", "none", "turn"]
    assert main(["--device", "cpu", "--out", str(out), "--limit-s", "-1"]) == 0
    assert len(json.loads(out.read_text())["left_out"]) == 4
