"""Where a request decodes: least context, then packing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_harness import Case, column, latency

from confsim.policies.base import GroupLoad
from confsim.policies.placement.least_context import Placement as LeastContext
from confsim.policies.placement.packing import Placement as Packing

LAW = latency(linear_base_s=0.01, linear_token_s=1e-5)

loads = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 100)).map(lambda pair: (pair[0], pair[1])), min_size=1, max_size=6
).map(lambda pairs: [GroupLoad(i, context, used, 100 - used, 100) for i, (context, used) in enumerate(pairs)])


@settings(max_examples=300, derandomize=True, deadline=None)
@given(loads, st.integers(1, 60), st.sampled_from([0.0, 0.3, 0.8]))
def test_rules(groups: list[GroupLoad], need: int, threshold: float) -> None:
    fitting = [g for g in groups if g.used_units + need <= 100]
    least = LeastContext(threshold).choose(groups, need)
    packed = Packing(threshold).choose(groups, need)
    if not fitting:
        assert least == packed == -1
        return
    assert groups[least] in fitting
    assert groups[least].context_tokens == min(g.context_tokens for g in fitting)
    if all(g.used_units > threshold * 100 for g in groups):
        assert groups[packed].used_units == max(g.used_units for g in fitting)
    else:
        assert packed == least


def test_one_after_another() -> None:
    """Each joins the group with the smallest context, the first of those alike."""
    rows = [(0.05 * i, prompt, 100) for i, prompt in enumerate((100, 20, 50, 10, 5))]
    result = Case(rows, latency=LAW).run()
    assert column(result, "group") == [0, 1, 2, 3, 3]


def test_prompts_that_end_together_are_spread() -> None:
    """A group's context is also that of requests which are on their way to it."""
    result = Case([(0.0, 100, 50)] * 8, latency=LAW).run()
    assert column(result, "group") == [0, 1, 2, 3, 0, 1, 2, 3]
    assert result.iterations["decode_per_group"][1].as_py() == [2, 2, 2, 2]


def test_requests_in_transfer_count() -> None:
    """While a transfer takes 1 s, the next prompt goes elsewhere."""
    law = latency(linear_base_s=0.01, linear_token_s=1e-5, transfer_base_s=1.0)
    result = Case([(0.0, 100, 50), (0.1, 100, 50)], latency=law).run()
    assert column(result, "group") == [0, 1]


def test_packs_past_the_threshold() -> None:
    """Past the threshold in every group, the fullest that still fits takes it."""
    rows = [(0.0, 60, 400), (0.1, 40, 400), (0.2, 16, 100)]
    common = {"latency": LAW, "gpus": 2, "block_tokens": 1, "capacity_tokens": 2000, "kv_heads": 2}
    plain = Case(rows, placement_threshold=0.8, **common).run()  # type: ignore[arg-type]
    packed = Case(rows, placement_threshold=0.0, **common).run()  # type: ignore[arg-type]
    assert column(plain, "group")[:3] == [0, 1, 1]
    assert column(packed, "group")[:3] == [0, 0, 0], "shards of a prompt are in use on every group"


def test_packing_needs_every_group_past_the_threshold() -> None:
    groups = [GroupLoad(0, 90, 90, 10, 100), GroupLoad(1, 20, 80, 20, 100), GroupLoad(2, 30, 85, 15, 100)]
    assert Packing(0.8).choose(groups, 5) == 1, "a group at the threshold has not passed it"
    groups[1] = GroupLoad(1, 20, 81, 19, 100)
    assert Packing(0.8).choose(groups, 5) == 0
    assert Packing(0.8).choose(groups, 12) == 2
    assert Packing(0.8).choose(groups, 16) == 1
    assert Packing(0.8).choose(groups, 20) == -1
