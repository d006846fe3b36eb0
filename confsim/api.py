"""The library: compose a configuration, load its trace, build a simulation, run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confsim.errors import InputError
from confsim.outcome.result import Result
from confsim.run.engine import Simulation, Window
from confsim.setup.cache import cached_trace
from confsim.setup.configuration import compose as compose
from confsim.setup.configuration import explain
from confsim.setup.registry import ROUTERS
from confsim.setup.values import checked
from traces.progress import console_progress
from traces.trace import Trace

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Result", "Simulation", "build", "compose", "load_trace", "simulate"]

GROUPS = ("arrivals", "model", "gpu", "cluster", "scheme", "policy", "kv", "slo", "latency", "backend")


def _instantiate(cfg: DictConfig, group: str) -> Any:
    from hydra.errors import InstantiationException
    from hydra.utils import get_object, instantiate
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(cfg[group], resolve=True)
    try:
        values |= checked(get_object(values["_target_"]), group, values)
        return instantiate(OmegaConf.create(values), _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, (InputError, TypeError, ValueError)):
            raise InputError(explain(error.__cause__) if isinstance(error.__cause__, InputError)
                             else f"{group}: {error.__cause__}") from error  # fmt: skip
        raise


def load_trace(cfg: DictConfig) -> Trace:
    """The trace of a configuration; block ids only where a prefix cache or router reads them.

    With `cache` it is parsed once on this disk.

    Raises:
        InputError: for a file that cannot be read as its format.
    """
    from omegaconf import OmegaConf

    source = _instantiate(cfg, "trace")
    wants_blocks = cfg.kv.prefix_cache not in (False, "off") or _reads_prefixes(cfg.cluster.router)

    def load() -> Trace:
        trace: Trace = source.load(seed=cfg.seed, block_ids=wants_blocks, progress=console_progress())
        return trace

    if not cfg.get("cache", True):
        return load()
    config: Any = OmegaConf.to_container(cfg.trace, resolve=True)
    return cached_trace(config, cfg.seed, wants_blocks, load)


def _reads_prefixes(router: str) -> bool:
    return bool(getattr(ROUTERS.get(router), "reads_prefixes", False))


def build(cfg: DictConfig, trace: Trace | None = None) -> Simulation:
    """A simulation of a configuration, of `trace` where that is given.

    Raises:
        InputError: for values that contradict each other or cannot be.
    """
    from omegaconf import OmegaConf

    parts = {group: _instantiate(cfg, group) for group in GROUPS}
    parts["arrivals"].check(cfg.rate)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    return Simulation(
        trace=load_trace(cfg) if trace is None else trace,
        **parts,
        rate=cfg.rate,
        seed=cfg.seed,
        horizon_s=cfg.horizon_s,
        window=Window(cfg.get("warmup_s", 0.0), cfg.get("cooldown_s", 0.0)),
        config=config,
    )


def simulate(cfg: DictConfig, trace: Trace | None = None) -> Result:
    """One replay.

    Raises:
        InputError: for values that contradict each other or cannot be.
    """
    return build(cfg, trace).run()
