"""Measuring what the latency model needs, on the ranks that will serve."""
