"""What a goodput search runs: for each scheme its configuration, and the values that are searched for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from confsim.errors import InputError
from confsim.setup.configuration import compose, did_you_mean, is_choice, options, unknown_choice

TUNED = "tuned"
AUTO = "auto"  # the same for a key that the scheme can tune; chunk_tokens=auto is a rule of the scheme's own
MARGINS = (0.0, 0.05, 0.1, 0.2)  # candidates of slo.margin=tuned
OWN_KEYS = ("schemes", "per_scheme", "best_options", "goodput", "quiet")  # of the search, not of a simulation


@dataclass(frozen=True)
class SchemeCase:
    """A scheme by name; `configs[i]` is its resolved configuration with `candidates[i]` (key to value) applied."""

    name: str
    configs: tuple[dict[str, Any], ...]
    candidates: tuple[dict[str, Any], ...]

    @property
    def gpus(self) -> int:
        """GPUs that the scheme runs on."""
        cluster = self.configs[0]["cluster"]
        return int(cluster["gpus"]) * int(cluster.get("instances", 1))


def scheme_cases(cfg: DictConfig) -> list[SchemeCase]:
    """The cases of `cfg.schemes`, in order.

    Raises:
        InputError: for a scheme or key that does not exist, or a load that has no rate to search.
    """
    _check_load(cfg)
    names = _scheme_names(cfg)
    wishes = OmegaConf.to_container(cfg.per_scheme, resolve=True)
    assert isinstance(wishes, dict)
    shared = _leaves(wishes.get("all") or {})
    for name in map(str, wishes):
        if name != "all" and not any(scheme == name or scheme.startswith(f"{name}.") for scheme in names):
            raise InputError(f"per_scheme.{name}: schemes={names} has no {name}{did_you_mean(name, names)}")
    bases = {name: _with_scheme(cfg, name) for name in names}
    _check_shared(shared, bases)
    best = OmegaConf.to_container(OmegaConf.create(cfg.get("best_options") or {}), resolve=True)
    assert isinstance(best, dict)
    return [
        _case(name, bases[name], {**_leaves(best.get(name) or {}), **shared}, _leaves(_wishes_for(name, wishes)))
        for name in names
    ]


def _wishes_for(name: str, wishes: dict[Any, Any]) -> dict[Any, Any]:
    """Keys of `per_scheme` for one scheme, whose name may be a dotted path."""
    for part in name.split("."):
        wishes = wishes.get(part) or {}
    return wishes


def check_slo(cfg: DictConfig) -> None:
    """A search needs an SLO.

    Raises:
        InputError: for `slo=none`.
    """
    if "ttft_s" not in cfg.slo:
        raise InputError("slo=none: a goodput is the rate at which an SLO is kept; set one, or use confsim simulate")


def _check_load(cfg: DictConfig) -> None:
    check_slo(cfg)
    if cfg.rate is not None:
        raise InputError(f"rate={cfg.rate}: goodput searches the rate; drop it, or use confsim simulate")
    if "closed_loop" in str(cfg.arrivals.get("_target_", "")).lower() or cfg.arrivals.get("concurrency") is not None:
        raise InputError("arrivals=closed_loop has no rate to search: use recorded, spread, poisson or gamma")


def _scheme_names(cfg: DictConfig) -> list[str]:
    given = OmegaConf.to_container(cfg.schemes) if OmegaConf.is_list(cfg.schemes) else [cfg.schemes]
    assert isinstance(given, list)
    names = [str(name) for name in given]
    if not names:
        raise InputError(f"schemes=[]: name at least one of {', '.join(options('scheme'))}")
    for name in names:
        if not is_choice("scheme", name):
            raise InputError(unknown_choice("scheme", name).replace(f"scheme={name}", f"schemes=[{name}]", 1))
    if len(set(names)) != len(names):
        raise InputError(f"schemes={names}: each scheme once")
    return names


def _with_scheme(cfg: DictConfig, name: str) -> DictConfig:
    """The configuration of one simulation with this scheme's defaults: no horizon, no rate, no keys of the search."""
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in OWN_KEYS])
    OmegaConf.set_struct(own, False)
    own.scheme = compose([f"scheme={name}"]).scheme
    own.horizon_s = None
    return own


def _leaves(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found |= _leaves(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return found


_MISSING = object()


def _has(scheme: DictConfig, key: str) -> bool:
    return key != "_target_" and OmegaConf.select(scheme, key, default=_MISSING) is not _MISSING


def _keys(bases: dict[str, DictConfig]) -> list[str]:
    return sorted({str(key) for base in bases.values() for key in base.scheme if key != "_target_"})


def _check_shared(shared: dict[str, Any], bases: dict[str, DictConfig]) -> None:
    for key in shared:
        if not any(_has(base.scheme, key) for base in bases.values()):
            known = _keys(bases)
            hint = did_you_mean(key, known)
            raise InputError(f"scheme.{key}: none of {', '.join(bases)} has it; they have {', '.join(known)}{hint}")


def _case(name: str, base: DictConfig, shared: dict[str, Any], own: dict[str, Any]) -> SchemeCase:
    for key, value in {**shared, **own}.items():
        if _has(base.scheme, key):
            OmegaConf.update(base.scheme, key, value)
        elif key in own:
            known = _keys({name: base})
            raise InputError(
                f"per_scheme.{name}.{key}: no such key; {name} has {', '.join(known)}{did_you_mean(key, known)}"
            )
    candidates = _candidates(name, base)
    return SchemeCase(name, tuple(_resolved(base, values) for values in candidates), tuple(candidates))


def _candidates(name: str, base: DictConfig) -> list[dict[str, Any]]:
    """Every combination of the values that are searched; [{}] where nothing is."""
    axes: dict[str, Sequence[Any]] = {}
    options = {key: str(value) for key, value in _leaves(OmegaConf.to_container(base.scheme)).items()}  # type: ignore[arg-type]
    tunable = _tunable(base) if {TUNED, AUTO} & {*options.values()} else {}
    for key, value in options.items():
        if key in tunable and value in (TUNED, AUTO):
            axes[f"scheme.{key}"] = tunable[key]
        elif value == TUNED:
            raise InputError(f"scheme.{key}=tuned: {name} can tune {', '.join(tunable) or 'nothing'}")
    if base.slo.get("margin") == TUNED:
        axes["slo.margin"] = MARGINS
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _tunable(base: DictConfig) -> dict[str, list[Any]]:
    """What the scheme declares for this cluster: keys of its configuration, each with the values worth trying."""
    from hydra.utils import instantiate

    declare = getattr(instantiate(base.scheme, _convert_="all"), "tunable", None)
    return dict(declare(instantiate(base.cluster, _convert_="all"))) if declare else {}


def _resolved(base: DictConfig, values: dict[str, Any]) -> dict[str, Any]:
    config = base.copy()
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}
