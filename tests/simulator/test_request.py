"""The states of a request."""

from __future__ import annotations

import pytest

from confsim.run.request import NEXT_STATES, Request, RequestState


def test_a_request_takes_no_other_way_than_the_table_has() -> None:
    request = Request(7, 0.0, 10)
    with pytest.raises(RuntimeError, match="request 7 cannot go from queued to completed"):
        request.move_to(RequestState.COMPLETED)
    for state in (RequestState.PREFILL, RequestState.TRANSFER, RequestState.LANDED, RequestState.DECODE):
        request.move_to(state)
    request.requeue()
    assert (request.state, request.preemptions) == (RequestState.QUEUED, 1)
    request.move_to(RequestState.REJECTED)
    with pytest.raises(RuntimeError):
        request.requeue()


def test_every_state_is_reached_and_every_request_can_end() -> None:
    reached = {RequestState.QUEUED}.union(*NEXT_STATES.values())
    assert reached == set(RequestState) == set(NEXT_STATES)
    assert [state for state in RequestState if not NEXT_STATES[state]] == [
        RequestState.COMPLETED, RequestState.REJECTED,
    ]  # fmt: skip
