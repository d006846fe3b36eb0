"""Elastic sequence parallelism: cost, dispatch, batching, and the state of instances and batches."""
