"""Advice on a trace: prompts, the GPUs that long ones need, the decodes' slack, and goodput by scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from analysis.search.compare import Listener, compare
from analysis.search.premise import Lengths, decode_slack, decodes_running, gpus_needed, one_group
from confsim import api
from confsim.errors import InputError
from confsim.outcome.result import write_json
from confsim.setup.configuration import compose

SEARCHED = ("schemes", "per_scheme", "goodput", "quiet")  # keys of a goodput search besides those of a simulation
OWN = ("requests", "orders", "best_options")


def advise(cfg: DictConfig, folder: Path, listener: Listener | None = None) -> dict[str, Any]:
    """The content of `advise.json`, which is written to `folder`; the searches are in folders inside it.

    Raises:
        InputError: for a user's mistake.
    """
    cfg = _limited(cfg)
    trace = api.load_trace(cfg)
    lengths = Lengths.of(trace)
    schemes, label = _goodput(cfg, folder, listener)
    ranked = sorted(schemes, key=lambda name: -schemes[name]["goodput"])
    best = ranked[0]
    load = _load(cfg, lengths, schemes[best])
    slack = None
    if load["decodes_per_gpu"]:
        group = load["decodes_per_gpu"] * int(cfg.cluster.tp)
        slack = decode_slack(one_group(_simulation(cfg)), group, lengths.decode_context, float(cfg.slo.tbt_s)).to_json()
    p95 = lengths.prompt[95]
    decodes = round(load["decodes_per_gpu"])
    result = {
        "kind": "advise",
        "label": label,
        "requests": len(trace),
        "prompt_tokens": {f"p{share}": tokens for share, tokens in lengths.prompt.items()},
        "mean_prompt_tokens": lengths.mean_prompt,
        "mean_output_tokens": lengths.mean_output,
        "ttft_limit_p95_s": max(float(cfg.slo.ttft_s), float(cfg.slo.ttft_per_token_s) * p95),
        "tbt_s": float(cfg.slo.tbt_s),
        "gpus_for_p95": gpus_needed(cfg, p95),
        "gpus_for_p95_beside_decodes": gpus_needed(cfg, p95, decodes, lengths.decode_context),
        "load": load,
        "decode_slack": slack,
        "schemes": {name: _row(schemes[name]) for name in ranked},
        "best": best if schemes[best]["goodput"] else None,
        "margin": _margin(schemes, ranked),
        "tolerance": float(cfg.goodput.tolerance),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "advise.json", result)
    return result


def _limited(cfg: DictConfig) -> DictConfig:
    """The configuration with `requests` as the trace's limit where that has none."""
    own: DictConfig = cfg.copy()
    OmegaConf.set_struct(own, False)
    if own.requests is not None and (not isinstance(own.requests, int) or own.requests < 1):
        raise InputError(f"requests={own.requests}: use 1 or more, or null for all")
    if own.trace.get("limit") is None:
        own.trace.limit = own.requests
    return own


def _simulation(cfg: DictConfig) -> DictConfig:
    """The part of a configuration that a simulation has."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in (*SEARCHED, *OWN)])


def _goodput(cfg: DictConfig, folder: Path, listener: Listener | None) -> tuple[dict[str, Any], str]:
    """The searches' results by scheme, one comparison for each queue order."""
    by_order: dict[str | None, list[str]] = {}
    for name in cfg.schemes:
        orders = cfg.orders or {}
        by_order.setdefault(orders.get(name, orders.get("all")), []).append(str(name))
    found: dict[str, Any] = {}
    label = ""
    for order, names in by_order.items():
        result = compare(_search(cfg, order, names), folder / (order or "policy"), listener)
        label = str(result["label"])
        for name, scheme in result["schemes"].items():
            found[name] = {**scheme, "order": result["policy"], "options": _options(cfg, name)}
    return found, label


def _options(cfg: DictConfig, name: str) -> dict[str, Any]:
    """What a scheme runs with besides its defaults; searched values are among the chosen ones."""
    merged = OmegaConf.to_container(
        OmegaConf.merge((cfg.best_options or {}).get(name) or {}, cfg.per_scheme.get(name, {}))
    )
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items() if value not in ("auto", "tuned")}


def _search(cfg: DictConfig, order: str | None, names: list[str]) -> DictConfig:
    search = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in OWN])
    OmegaConf.set_struct(search, False)
    if order is not None:
        search.policy = compose([f"policy={order}"]).policy
    search.schemes = names
    options = {name: cfg.best_options[name] for name in names if name in (cfg.best_options or {})}
    wishes = {name: cfg.per_scheme[name] for name in cfg.per_scheme if name in (*names, "all")}
    unknown = [name for name in cfg.per_scheme if name not in (*cfg.schemes, "all")]
    if unknown:
        raise InputError(f"per_scheme.{unknown[0]}: schemes={list(cfg.schemes)} has no {unknown[0]}")
    search.per_scheme = OmegaConf.merge(options, wishes)
    return search


def _load(cfg: DictConfig, lengths: Lengths, best: dict[str, Any]) -> dict[str, Any]:
    """The decodes that run at the best goodput, spread over all GPUs."""
    tpot = (best["tpot_s"] or {}).get("mean")
    running = decodes_running(best["goodput"], lengths.mean_output, tpot)
    return {
        "rate": best["goodput"],
        "decodes": running,
        "decodes_per_gpu": running / int(cfg.cluster.gpus),
        "decode_context": lengths.decode_context,
    }


def _row(scheme: dict[str, Any]) -> dict[str, Any]:
    keys = ("goodput", "goodput_per_gpu", "order", "options", "chosen", "structural", "warnings")
    return {**{key: scheme[key] for key in keys}, "zero_load": scheme["zero_load"]["attainment"]}


def _margin(schemes: dict[str, Any], ranked: list[str]) -> float | None:
    """How far the best goodput is above the second, as a share; None where there is no second."""
    if len(ranked) < 2 or not schemes[ranked[1]]["goodput"]:
        return None
    return float(schemes[ranked[0]]["goodput"] / schemes[ranked[1]]["goodput"] - 1)
