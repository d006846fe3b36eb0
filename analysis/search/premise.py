"""When sequence-parallel prefill beside decodes pays: prompts that one GPU cannot serve in time, decodes with slack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from confsim import api
from confsim.errors import InputError
from confsim.latency.base import LatencyModel
from confsim.outcome.slo import TOLERANCE
from confsim.run.scenario import run as run_scenario
from traces.trace import Trace

PERCENTILES = (50, 90, 95, 99)
GROUPS = (1, 2, 4, 8)  # numbers of groups that are tried
TAKEN = ("model", "gpu", "kv", "slo", "latency", "backend")  # groups of a configuration that a scenario takes over


@dataclass(frozen=True)
class Lengths:
    """Lengths of a trace: prompt percentiles by number, means of prompts and outputs, the longest context."""

    prompt: dict[int, int]
    mean_prompt: float
    mean_output: float

    @classmethod
    def of(cls, trace: Trace) -> Lengths:
        """Those of a trace; a percentile is the smallest length at or below which so many lie."""
        prompt, output = (trace.table[key].to_numpy() for key in ("prompt_tokens", "output_tokens"))
        at = np.percentile(prompt, PERCENTILES, method="inverted_cdf")
        return cls(dict(zip(PERCENTILES, map(int, at), strict=True)), float(prompt.mean()), float(output.mean()))

    @property
    def decode_context(self) -> int:
        """Mean context of a running decode, had all requests the mean lengths."""
        return max(1, round(self.mean_prompt + self.mean_output / 2))


def gpus_needed(cfg: DictConfig, prompt_tokens: int, decodes_per_gpu: int = 0, context: int = 8192) -> int | None:
    """Fewest GPUs on which Conflux prefills a prompt within its TTFT, beside so many decodes a GPU; None: not on any.

    Tried are 1, 2, 4 and 8 groups of `cluster.tp` GPUs of the configuration.
    """
    limit_s = max(float(cfg.slo.ttft_s), float(cfg.slo.ttft_per_token_s) * prompt_tokens)
    for groups in GROUPS:
        gpus = groups * int(cfg.cluster.tp)
        try:
            seconds = prefill_s(cfg, gpus, prompt_tokens, decodes_per_gpu, context)
        except InputError:  # heads that do not split so far, no KV for it
            continue
        if seconds <= limit_s * TOLERANCE:
            return gpus
    return None


def prefill_s(cfg: DictConfig, gpus: int, prompt_tokens: int, decodes_per_gpu: int, context: int) -> float:
    """Seconds of one prefill of Conflux.

    Raises:
        InputError: if it cannot run.
    """
    keys = {"decodes_per_gpu": decodes_per_gpu, "decode_context": context, "decode_tokens": 1}
    keys |= {"prefill_tokens": prompt_tokens, "prefills": 1, "cluster.gpus": gpus, "cluster.tp": cfg.cluster.tp}
    scenario = api.compose(["scheme=conflux", *(f"{key}={value}" for key, value in keys.items())], "scenario")
    OmegaConf.set_struct(scenario, False)
    for group in TAKEN:
        scenario[group] = cfg[group]
    seconds: float = run_scenario(scenario).summary["prefill_s"][0]
    return seconds


@dataclass(frozen=True)
class Slack:
    """What decodes leave of the TBT on one group: a share, and the prefill tokens (of a first chunk) that fit in it."""

    decodes: float  # on the group
    iteration_s: float
    share: float
    prefill_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return vars(self).copy()


def decode_slack(latency: LatencyModel, decodes: float, context: int, tbt_s: float, cap: int = 8192) -> Slack:
    """The slack of one group (a `latency` of its own) that decodes so many requests of a context."""
    count = max(1, round(decodes))
    attention_s = latency.decode_attention_s(count, count * context)

    def seconds(tokens: int) -> float:
        prefill = latency.prefill_attention_s(tokens, 0) if tokens else 0.0
        return latency.linear_s(count + tokens) + attention_s + prefill + latency.head_s(count)

    alone_s = seconds(0)
    low, high = 0, cap + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= tbt_s * TOLERANCE else (low, middle)
    return Slack(decodes, alone_s, 1 - alone_s / tbt_s, low)


def one_group(cfg: DictConfig) -> LatencyModel:
    """The latency model of one group of a configuration."""
    simulation = api.build(cfg, _nothing())
    model: LatencyModel = simulation.latency.compile(simulation.model, simulation.gpu, simulation.cluster.tp, 1)
    return model


def _nothing() -> Trace:
    from traces.trace import SCHEMA

    return Trace(SCHEMA.empty_table())


def decodes_running(rate: float, mean_output: float, tpot_s: float | None) -> float:
    """Decodes that run at once, by Little's law: tokens after the first, `tpot_s` each."""
    return rate * max(0.0, mean_output - 1) * (tpot_s or 0.0)
