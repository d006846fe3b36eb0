"""Heads: which rank computes which, and which units travel when a prompt changes hands."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch
from executor_harness import tiny
from hypothesis import given
from hypothesis import strategies as st

from confsim.errors import InputError
from confsim.parallel import split_heads
from confsim.specs import KvConfig
from executor import weights
from executor.collectives import Groups, Meeting, ThreadGroup, memberships, thread_groups, thread_meetings
from executor.config import Device, Layout, Sampling
from executor.exchange import Exchange, shard_order
from executor.kv import KvExhausted, PagedStore, PagePool, UnitPool, page_pool
from executor.ledger import Ledger
from executor.message import Chunk, Iteration, NewRequest, RankConfig
from executor.place import Place
from executor.rank import Rank


@given(
    kv=st.sampled_from([1, 2, 3, 4, 8]),
    share=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4]),
    sp=st.sampled_from([1, 2, 4, 8]),
)
def test_shares_of_the_exchange(kv: int, share: int, tp: int, sp: int) -> None:
    """Ranks agree with `split_heads`; a query head meets its KV head; a handed-over prompt is complete, once."""
    layout = Layout("xp", sp, tp)
    try:
        model = tiny("llama", kv * share, kv)
        places = [Place.of(rank, layout, model) for rank in range(layout.ranks)]
        split_heads(kv * share, kv, tp * sp)
    except InputError:
        return
    for place in places:
        units = place.local.kv_heads // place.shared.kv_heads
        for group in range(sp):
            rank = place.position * sp + group  # among all tp * sp shares
            queries = range(rank * place.shared.q_heads, (rank + 1) * place.shared.q_heads)
            wanted = {query // share for query in queries}
            assert {place.first_kv_head + slot for slot in place.kv_slots[group]} >= wanted
            assert len(place.kv_slots[group]) == place.shared.kv_heads
            arrived = [place.unit(source) for source in range(sp) if place.sends(source, group)]
            assert sorted([*arrived, place.unit(group)]) == list(range(units))


def test_uneven_shards_are_put_in_order() -> None:
    pieces = [(2, 0, 1), (0, 3, 1), (1, 1, 0)]
    shards = shard_order(pieces, torch.device("cpu"))
    assert shards.rows == (3, 4, 2)
    # Arrival order: group by group, sequence by sequence within.
    arrived = [(s, g, i) for g in range(3) for s in range(3) for i in range(pieces[s][g])]
    assert shards.order is not None
    assert [arrived[i] for i in shards.order.tolist()] == sorted(arrived)
    assert shards.inverse is not None
    assert shards.order[shards.inverse].tolist() == list(range(9))
    assert shard_order([(4, 0)], torch.device("cpu")).order is None


def test_exchange_there_and_back() -> None:
    """E1: uneven and empty shards; every query head returns to its row."""
    from threading import Thread

    layout, model = Layout("xp", 4, 1), tiny("llama", 8, 2)
    meetings = thread_meetings(layout, 10.0)
    shards = shard_order([(3, 0, 2, 0), (1, 0, 0, 4)], torch.device("cpu"))
    inputs = [torch.randn(rows, 8 + 2 * 2, 16) for rows in shards.rows]
    results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def work(rank: int) -> None:
        exchange = Exchange(Place.of(rank, layout, model), thread_groups(layout, rank, meetings))
        spread = exchange.to_heads(inputs[rank], shards)
        results[rank] = spread, exchange.to_rows(spread[:, :2], shards)

    threads = [Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = torch.cat(inputs)[shards.order]
    for rank, (spread, back) in results.items():
        kv = rank // 2  # two ranks share a KV head
        expected = torch.cat((whole[:, 2 * rank : 2 * rank + 2], whole[:, [8 + kv]], whole[:, [10 + kv]]), dim=1)
        torch.testing.assert_close(spread, expected)
        torch.testing.assert_close(back, inputs[rank][:, :8].reshape(len(inputs[rank]), 8 * 16))


def test_communicators_are_made_in_one_order() -> None:
    assert memberships(Layout("xp", 2, 2)) == {
        "exchange": [[0, 2], [1, 3]],
        "transfer": [[0, 2], [1, 3]],
        "tensor": [[0, 1], [2, 3]],
    }
    assert memberships(Layout("mux", 1, 2))["tensor_second"] == [[0, 1]]


def test_a_thread_that_fails_frees_the_others() -> None:
    from executor.errors import PeerLostError

    meeting = Meeting(2, 10.0)
    group = ThreadGroup(meeting, 0)
    meeting.break_up()
    with pytest.raises(PeerLostError):
        group.all_reduce(torch.ones(2))


def test_pages_are_counted_and_come_back() -> None:
    pool = PagePool(10, 16, 16)
    prompts, decodes = PagedStore(pool, 1), PagedStore(pool, 2)
    prompts.reserve(0, 33)
    decodes.reserve(0, 17)
    assert pool.held == 3 + 2 * 2
    decodes.grow((0,), np.array([decodes.rows[0]]), np.array([33]))
    assert pool.held == 3 + 3 * 2
    with pytest.raises(KvExhausted, match="request 1 needs 2 more units, 1 of 10 are free"):
        prompts.reserve(1, 20)
    taken = {*prompts.table[prompts.rows[0]].flatten()[:3], *decodes.table[decodes.rows[0]][:, :3].flatten()}
    assert len(taken) == 9
    prompts.release(0)
    decodes.release(0)
    assert pool.held == 0
    prompts.reserve(2, 160)
    assert pool.held == 10


@pytest.mark.parametrize("ways", [1, 4])
def test_pages_longer_than_blocks_hold_whatever_the_units_admit(ways: int) -> None:
    """Requests of 258 tokens need 17 blocks, or two pages of 256 tokens of which one is nearly empty."""
    admitted = 240
    pool = page_pool(admitted * 17 * ways, 256, 16, page_lists=admitted * ways)
    store = PagedStore(pool, ways)
    for request in range(admitted):
        store.reserve(request, 258)
    assert pool.held == pool.units
    with pytest.raises(KvExhausted, match="KV pool is full"):
        store.reserve(admitted, 1)
    assert page_pool(100, 16, 16, page_lists=512).pages == 100
    crowded = PagedStore(page_pool(1000, 256, 16, page_lists=1), 1)
    with pytest.raises(KvExhausted, match=r"pages of 256 tokens are used up.* raise executor\.device\.max_sequences"):
        for request in range(100):
            crowded.reserve(request, 16)


def test_a_full_pool_stops_every_rank() -> None:
    """No room for a decode copy on group 1: group 0, which has room, says the same before it computes anything."""
    layout, model, cpu = Layout("xp", 2, 1), tiny("llama", 8, 4), torch.device("cpu")
    prompt = np.zeros(40, dtype=np.int32)
    said = []
    for rank in range(2):
        pool = UnitPool(PagePool(20, 16, 16), (3, 2, 16), torch.float32, cpu)
        ledger = Ledger(Place.of(rank, layout, model), Groups(), pool, True)
        for number in range(3):
            shards = (20, 20)
            plan = Iteration(
                number,
                (Chunk(number, 0, shards, True, 1),),
                ((), tuple(range(number))),
                (),
                (NewRequest(number, prompt, Sampling()),),
            )
            try:
                work = ledger.prepare(plan)
            except KvExhausted as error:
                said.append((number, str(error)))
                break
            rows = len(work.finished) + (0 if work.decode is None else len(work.decode.members))
            ledger.settle(plan, work, torch.zeros(rows, dtype=torch.int64))
        assert pool.held == {0: 3, 1: 15}[rank]  # shards of the third prompt; on group 1 also two decode copies
    assert said == [(2, "KV pool is full: request 2 needs 6 more units, 5 of 20 are free")] * 2


def test_stores_grow_with_their_requests() -> None:
    pool = PagePool(200, 16, 16)
    store = PagedStore(pool, 1)
    for request in range(40):
        store.reserve(request, 16)
    store.reserve(0, 16 * 40)
    assert len(set(store.rows.values())) == 40
    assert len(set(store.block_table(np.array([store.rows[0]]), 640)[0])) == 40


def test_random_weights_are_drawn_alike_everywhere() -> None:
    """Nearly normal, the same for every share of a model and in pieces of any size, another stream per tensor."""
    model = tiny("qwen3", 8, 4)
    whole = weights.load_weights(model, Place.of(0, Layout("tp"), model), torch.float32, torch.device("cpu"))
    parts = [
        weights.load_weights(model, Place.of(rank, Layout("tp", 1, 2), model), torch.float32, torch.device("cpu"))
        for rank in range(2)
    ]
    for layer, (left, right) in enumerate(zip(parts[0].layers, parts[1].layers, strict=True)):
        torch.testing.assert_close(torch.cat((left.down, right.down), 1), whole.layers[layer].down, rtol=0, atol=0)
    assert not torch.equal(whole.layers[0].down, whole.layers[1].down)
    drawn = weights._draw((300, 400), 5, 0.5, torch.float32, torch.device("cpu"))
    assert abs(float(drawn.mean())) < 0.01
    assert float(drawn.std()) == pytest.approx(0.5, rel=0.01)
    assert float((drawn.abs() < 0.5).float().mean()) == pytest.approx(0.683, abs=0.03)  # evenly spread values: 0.577
    assert torch.equal(drawn.bfloat16(), weights._draw((300, 400), 5, 0.5, torch.bfloat16, torch.device("cpu")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "DRAWN_AT_ONCE", 777)
        assert torch.equal(drawn, weights._draw((300, 400), 5, 0.5, torch.float32, torch.device("cpu")))


def python_calls(context: int, chunk: int) -> int:
    """Calls of functions in an iteration with one decode of `context` tokens and a chunk behind as many."""
    model = tiny(max_context_tokens=None)
    config = RankConfig(0, model, Layout("xp"), Device(), KvConfig(capacity_tokens=4 * context + 512), "")
    rank = Rank(config, Groups(), torch.device("cpu"))
    new = tuple(NewRequest(i, np.zeros(context + i * 2 * chunk, dtype=np.int32), Sampling()) for i in range(2))
    rank.execute(Iteration(0, (Chunk(0, 0, (context,), True, 0),), ((),), (), new))
    rank.execute(Iteration(1, (Chunk(1, 0, (context,), False, -1),), ((0,),), (), ()))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection may run callbacks of others
    sys.setprofile(count)
    rank.execute(Iteration(2, (Chunk(1, context, (chunk,), False, -1),), ((0,),), (), ()))
    sys.setprofile(None)
    gc.enable()
    return calls


def test_no_python_work_grows_with_context() -> None:
    assert python_calls(2048, 16) == python_calls(64, 16)
