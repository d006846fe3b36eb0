"""Tensor-parallel degrees of schemes that divide the cluster's GPUs their own way."""

from __future__ import annotations

from confsim.errors import InputError
from confsim.specs import ClusterSpec


def tp_degree(tp: int | str | None, cluster: ClusterSpec) -> int:
    """GPUs of a group; None is `cluster.tp`.

    Raises:
        InputError: for `auto`, which only a search can replace, or a degree that does not divide the GPUs.
    """
    if tp is None:
        return cluster.tp
    if tp in ("auto", "tuned"):
        raise InputError(f"scheme.tp={tp}: only `confsim goodput` can search it; give a number of GPUs or null")
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise InputError(f"scheme.tp={tp}: use a positive number of GPUs, auto or null")
    if cluster.gpus % tp:
        raise InputError(f"scheme.tp={tp} does not divide the {cluster.gpus} GPUs of the cluster (cluster.gpus)")
    return tp


def tp_candidates(cluster: ClusterSpec) -> list[int | str]:
    """Degrees worth trying: `cluster.tp`, which the model needs, and its doublings up to all GPUs."""
    degrees: list[int | str] = []
    tp = cluster.tp
    while tp <= cluster.gpus:
        if cluster.gpus % tp == 0:
            degrees.append(tp)
        tp *= 2
    return degrees
