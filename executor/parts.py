"""How the time of an executed iteration divides into the latency model's terms."""

from __future__ import annotations

from confsim.run.plan import IterationTiming
from executor.message import Report
from executor.runtime import ExecutedIteration

STAGES = ("linear", "prefill_attention", "decode_attention", "communication", "head", "transfer")


def slowest(executed: ExecutedIteration) -> Report:
    """The rank that the iteration waited for."""
    return max(executed.ranks, key=lambda report: report.duration_s)


def parts_of(executed: ExecutedIteration) -> IterationTiming:
    """An iteration by the slowest rank's own stages, so that they belong together.

    Overhead is what no stage of that rank accounts for (preparing the plan, the interpreter between calls); where the
    attention paths overlapped, stages add up to more than the iteration and only the preparation is counted.
    """
    report = slowest(executed)
    stages = report.stages
    rest = report.duration_s - sum(stages[name] for name in STAGES)
    return IterationTiming(
        duration_s=report.duration_s,
        linear_s=stages["linear"],
        prefill_attention_s=stages["prefill_attention"],
        decode_attention_s=stages["decode_attention"],
        communication_s=stages["communication"],
        head_s=stages["head"],
        overhead_s=max(rest, stages["prepare"], 0.0),
        transfer_s=stages["transfer"],
    )
