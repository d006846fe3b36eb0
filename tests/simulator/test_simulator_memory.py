"""What runs leave in memory."""

from __future__ import annotations

import gc

import pytest
from simulator_harness import SCHEMES, Case

from confsim.outcome.slo import Slo


@pytest.mark.parametrize("scheme", SCHEMES)
def test_probes_do_not_pile_up(scheme: str) -> None:
    """What an interrupted run leaves behind is collected like anything else, without being asked."""
    simulation = Case([(0.001 * i, 900, 20) for i in range(300)], scheme, slo=Slo(0.05, 0.05)).simulation()
    gc.collect()
    gc.disable()
    before = len(gc.get_objects())
    assert simulation.run(probe=True).verdict.decided_early  # type: ignore[union-attr]
    left = len(gc.get_objects()) - before
    gc.enable()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(60):
        simulation.run(probe=True)
    assert len(gc.get_objects()) - before < 30 * max(left, 100)
