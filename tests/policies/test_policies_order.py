"""Queue orders, and that no policy ever sees an output length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulator_harness import ORDERS, SCHEMES, Case, Planned, RecordingBackendConfig, latency

from confsim.outcome.slo import Slo
from confsim.policies import Policy
from confsim.policies.base import Order
from confsim.policies.order.deadline import Order as Deadline
from confsim.policies.order.fcfs import Order as Fcfs
from confsim.policies.order.srpf import Order as Srpf
from confsim.run.request import Request, RequestState


def drain(order: Order, predict: Callable[[Request], float] = lambda request: 0.0, now_s: float = 0.0) -> list[int]:
    """Ids in the order in which they leave."""
    out = []
    while (request := order.pop(now_s, predict)) is not None:
        out.append(request.id)
    assert len(order) == 0
    return out


def first_chunks(plans: list[Planned]) -> list[int]:
    """Requests by their first chunk."""
    seen: list[int] = []
    for plan in plans:
        seen += [chunk.request for chunk in plan.chunks if chunk.request not in seen]
    return seen


def test_fcfs_ties_by_trace_order() -> None:
    order = Fcfs()
    for request in (Request(2, 0.5, 1), Request(1, 0.5, 9), Request(3, 0.1, 5), Request(0, 0.7, 1)):
        order.push(request)
    assert drain(order) == [3, 1, 2, 0]


def test_srpf_by_what_remains() -> None:
    order = Srpf()
    started = Request(0, 0.0, 100)
    started.move_to(RequestState.PREFILL)
    started.prefilled = 95
    for request in (Request(1, 0.0, 6), Request(2, 0.0, 4), Request(3, 0.0, 4), started):
        order.push(request)
    assert drain(order) == [2, 3, 0, 1]


def test_only_started_ones_when_nothing_new_may_start() -> None:
    for name in ORDERS:
        order = Policy(name).new_order()
        started = Request(1, 0.2, 50, 1.0)
        started.move_to(RequestState.PREFILL)
        order.push(Request(0, 0.0, 10, 1.0))
        order.push(started)
        taken = order.pop(0.0, lambda request: 0.0, new=False)
        assert taken is started
        assert order.pop(0.0, lambda request: 0.0, new=False) is None
        assert len(order) == 1


def test_deadline_feasible_first_then_shortest() -> None:
    order = Deadline()
    needs = {0: 0.5, 1: 2.0, 2: 3.0, 3: 0.5}
    order.push(Request(0, 0.0, 50, 2.0))  # due at 2
    order.push(Request(1, 0.0, 900, 1.0))  # due at 1, needs 2: late
    order.push(Request(2, 0.0, 700, 1.5))  # due at 1.5, needs 3: late, and shorter
    order.push(Request(3, 0.0, 60, 1.0))  # due at 1
    assert drain(order, lambda request: needs[request.id]) == [3, 0, 2, 1]


def test_deadline_late_is_for_good() -> None:
    """Found infeasible when it was reached, a request stays behind feasible ones when it could make it after all."""
    order = Deadline()
    order.push(Request(0, 0.0, 900, 1.0))
    order.push(Request(1, 0.0, 100, 5.0))
    first = order.pop(0.0, lambda request: 2.0 if request.id == 0 else 0.1)
    assert first is not None and first.id == 1
    order.push(first)
    assert drain(order, lambda request: 0.0) == [1, 0]


def test_deadline_is_judged_only_when_reached() -> None:
    """A request behind the head is not judged yet."""
    order = Deadline()
    order.push(Request(0, 0.0, 10, 1.0))
    order.push(Request(1, 0.0, 10, 2.0))
    asked = []
    first = order.pop(0.0, lambda request: asked.append(request.id) or 0.0)  # type: ignore[func-returns-value]
    assert first is not None and first.id == 0 and asked == [0]


def test_deadline_meets_its_limit_exactly() -> None:
    """A deadline met to the last digit is met."""
    order = Deadline()
    order.push(Request(0, 0.0, 900, 1.0))
    order.push(Request(1, 0.0, 100, 5.0))
    assert drain(order, lambda request: 1.0) == [0, 1]


@pytest.mark.parametrize("name", ORDERS)
def test_preempted_come_first(name: str) -> None:
    order = Policy(name).new_order()
    back = Request(5, 9.0, 5000, 1.0)
    back.preemptions = 1
    order.push(Request(0, 0.0, 10, 1.0))
    order.push(back)
    assert drain(order)[0] == 5


def test_preempted_and_late_comes_first_too() -> None:
    """It returns ahead of the queue, whichever part of the queue it is in."""
    order = Deadline()
    late = Request(0, 0.0, 900, 1.0)
    order.push(late)
    taken = order.pop(0.0, lambda request: 2.0)
    assert taken is late
    late.preemptions = 1
    order.push(Request(1, 0.0, 10, 3.0))
    order.push(late)
    assert drain(order, lambda request: 0.1) == [0, 1]


def test_deadline_uses_the_budget_of_the_iteration() -> None:
    """Two prompts of 500 tokens, 512 an iteration: each alone needs one, so both can meet a deadline of 4.

    The third has a later deadline and less to prefill; if the second were priced by what the first one leaves of the
    iteration (12 tokens), it would fall behind the third for good.
    """
    law = latency(linear_base_s=0.010, linear_token_s=1e-6)
    rows = [(0.0, 500, 1), (0.001, 500, 1), (0.002, 480, 1), (0.003, 470, 1)]
    plans = RecordingBackendConfig()
    case = Case(rows, "chunked_prefill", "deadline", latency=law, slo=Slo(0.1, 0.1), chunk_tokens=512)
    case.run(backend=plans)
    assert first_chunks(plans.plans) == [0, 1, 2, 3]


def test_deadline_in_the_engine() -> None:
    """A prompt that cannot make it alone waits behind one that can; when both cannot, the shorter goes first."""
    law = latency(linear_base_s=0.010, linear_token_s=1e-5)  # 4000 tokens within 50 ms
    rows = [(0.0, 4000, 1), (0.001, 60_000, 1), (0.002, 30_000, 1), (0.003, 200, 1)]
    plans = RecordingBackendConfig()
    Case(rows, "chunked_prefill", "deadline", latency=law, slo=Slo(0.3, 0.05), gpus=1).run(backend=plans)
    assert first_chunks(plans.plans) == [0, 3, 2, 1]
    assert plans.plans[0].chunks[0].tokens == 4000


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("order", ORDERS)
def test_policies_never_see_output_lengths(scheme: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the queue gets are plain requests, and a request does not know its output length."""
    assert not any("output" in name for name in dir(Request))
    assert not hasattr(Request(0, 0.0, 1), "output_tokens")
    pushed: list[Request] = []
    make = Policy.new_order

    def spying(self: Policy) -> Order:
        inner = make(self)
        push = inner.push

        def record(request: Request) -> None:
            pushed.append(request)
            push(request)

        inner.push = record  # type: ignore[method-assign]
        return inner

    monkeypatch.setattr(Policy, "new_order", spying)
    Case([(0.0, 300, 7), (0.0, 40, 3)], scheme, order, latency=latency(linear_base_s=0.01)).run()
    assert {request.id for request in pushed} == {0, 1}
    for request in pushed:
        assert type(request) is Request
        assert not hasattr(request, "__dict__")
        assert not any(value in (7, 3) for value in (request.target_tokens, request.prefilled, request.ttft_limit_s))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plans_do_not_depend_on_output_lengths_to_come(scheme: str) -> None:
    """Until the first of them ends, two runs that differ in output lengths plan alike."""
    plans = []
    for outputs in ((30, 40, 50), (90, 20, 70)):
        rows = [(0.01 * i, 100 + 50 * i, output) for i, output in enumerate(outputs)]
        recorder = RecordingBackendConfig()
        Case(rows, scheme, latency=latency(linear_base_s=0.01, linear_token_s=1e-4)).run(backend=recorder)
        plans.append(recorder.plans[:20])
    assert plans[0] == plans[1]
