"""Overrides of cheap runs, and of runs that misbehave on demand."""

CHEAP = ["trace=fixed", "trace.requests=8", "trace.output_tokens=4", "latency=affine"]
TROUBLE = [
    *CHEAP,
    "trace._target_=sweep_targets.Trouble",
    "++trace.mode=ok",
    "++trace.seconds=0",
    "++trace.marker=''",
    "++trace.number=0",
    "cache=false",
]
