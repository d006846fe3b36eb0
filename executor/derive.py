"""What the simulator is told of an executor, so that both serve the same model on the same ranks; without torch."""

from __future__ import annotations

from confsim.errors import InputError
from confsim.specs import ClusterSpec, ModelSpec
from executor.config import ExecutorConfig


def model_of(
    executor: ExecutorConfig | None, name: str = "executor", max_context_tokens: int | None = None
) -> ModelSpec:
    """`model=executor`: the executor's model; `max_context_tokens` None keeps the executor's limit.

    Raises:
        InputError: where no executor is configured.
    """
    if executor is None:
        raise InputError("model=executor is the model of an executor: add executor=cpu_tiny, or choose another model")
    spec = executor.model.spec(executor.device.dtype, name)
    if max_context_tokens is None:
        return spec
    return ModelSpec(**{**vars(spec), "max_context_tokens": max_context_tokens})


def cluster_of(
    executor: ExecutorConfig | None,
    gpus: int | None = None,
    tp: int | None = None,
    instances: int = 1,
    router: str = "round_robin",
) -> ClusterSpec:
    """`cluster=executor`: one instance on the ranks of the executor's layout, unless degrees are given.

    Raises:
        InputError: where no executor is configured.
    """
    if executor is None:
        raise InputError("cluster=executor is an executor's ranks: add executor=cpu_tiny, or choose another cluster")
    layout = executor.layout
    return ClusterSpec(
        layout.ranks if gpus is None else gpus,
        # A tp or mux layout is one group over all ranks; schemes that make it take the cluster's GPUs together.
        layout.tp if tp is None else tp,
        instances,
        router,
    )
