"""The `latency` config group: a fitted profile with what kernels cannot tell stated beside it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from confsim.latency.compiled import CompiledLatency
from confsim.latency.mixed import chosen_grid, describe_grid
from confsim.latency.profile import PACKAGED, Profile
from confsim.latency.share import BANDWIDTH_SHARE, TMA_SHARE, SmShares
from confsim.specs import GpuSpec, ModelSpec


@dataclass(frozen=True)
class FittedLatency:
    """`latency=profile`: the fitted profile of the model on the GPU, from the package or from a file.

    While both attention paths run, decode holds the smallest share of the SMs on which it reaches 90% of its bandwidth
    (g_d = 1 / 0.9) and prefill attention computes on the rest (g_p = 1 / (1 - share)), unless the slowdowns are given
    here or were measured into the profile; those given here win. That share is `decode_sm_share` for `tma` kernels;
    for others, and where `shares` measured it, it follows from `shares`. `split_kv`: attention behind a prefix as
    kernels run it that split a tile's keys over SMs. `mixed_attention`: what a scheme pays whose engine computes both
    phases in one call, by the profile's own grid (`auto`, the sum where it has none), `separate`, or a grid by name.
    `frontend_s` passes between a request's arrival and the scheme.

    Raises:
        InputError: for a share that is not above 0 and below 0.9, a slowdown below 1, or negative overheads or noise.
    """

    profile: str = "auto"
    decode_sm_share: float = TMA_SHARE
    prefill_slowdown: float | None = None
    decode_slowdown: float | None = None
    iteration_overhead_s: float | None = None
    sequence_overhead_s: float | None = None
    frontend_s: float = 0.0
    split_kv: bool = True
    mixed_attention: str = "auto"
    noise: float = 0.0
    shares: SmShares = field(default_factory=SmShares)

    def __post_init__(self) -> None:
        if not 0.0 < self.decode_sm_share < BANDWIDTH_SHARE:
            raise InputError(
                f"latency.decode_sm_share={self.decode_sm_share}: give a share of SMs above 0 and below 0.9, "
                "at which bandwidth would only be proportional to the SMs"
            )
        if self.shares.tma_share is None:
            object.__setattr__(self, "shares", replace(self.shares, tma_share=self.decode_sm_share))
        for key, least in (
            ("prefill_slowdown", 1.0),
            ("decode_slowdown", 1.0),
            ("iteration_overhead_s", 0.0),
            ("sequence_overhead_s", 0.0),
            ("frontend_s", 0.0),
            ("noise", 0.0),
        ):
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise InputError(f"latency.{key}={value}: give a finite number of at least {least:g}")

    def load(self, model: ModelSpec, gpu: GpuSpec) -> Profile:
        """The profile of this model and GPU.

        Raises:
            InputError: where there is none, naming those that exist and how to fit one.
        """
        path = packaged_path(model, gpu) if self.profile == "auto" else Path(self.profile).expanduser()
        if self.profile == "auto" and not path.is_file():
            raise InputError(
                f"no latency profile for model={model.name} on gpu={gpu.name} (there are: {', '.join(packaged())}): "
                f"make one with `confsim fit gpu={gpu.name} model={model.name}`, or of your own ranks with "
                "`confsim profile` and `confsim fit source=executor`, and set latency.profile to the file"
            )
        return _load(str(path))

    def compile(self, model: ModelSpec, gpu: GpuSpec, tp: int, sp: int) -> CompiledLatency:
        """Tables for `sp` groups of `tp` GPUs.

        Raises:
            InputError: where the profile is missing or does not cover model, GPU or layout.
        """
        profile = self.load(model, gpu)
        compiled = profile.compile(
            model,
            gpu,
            tp,
            sp,
            prefill_slowdown=1.0 / (1.0 - self.shares.decode_share(gpu)),
            decode_slowdown=1.0 / BANDWIDTH_SHARE,
            iteration_overhead_s=self.iteration_overhead_s,
            sequence_overhead_s=self.sequence_overhead_s,
            split_kv=self.split_kv,
        )
        compiled.mixed = chosen_grid(self.mixed_attention, profile.mixed)
        if self.prefill_slowdown is not None:
            compiled.prefill_slowdown = self.prefill_slowdown
        if self.decode_slowdown is not None:
            compiled.decode_slowdown = self.decode_slowdown
        return compiled

    def describe(self, model: ModelSpec, gpu: GpuSpec) -> dict[str, Any]:
        """What a result records: hash, provenance and held-out errors of the profile that is used."""
        profile = self.load(model, gpu)
        return {
            "source": self.profile,
            "profile_hash": profile.profile_hash,
            "provenance": profile.provenance,
            "errors": profile.errors,
            "shares": asdict(self.shares),
            "mixed_attention": describe_grid(chosen_grid(self.mixed_attention, profile.mixed), gpu.name),
        }


def packaged_path(model: ModelSpec, gpu: GpuSpec) -> Path:
    """Where the package keeps the profile of a model on a GPU."""
    return PACKAGED / gpu.name / f"{model.name}.json"


def packaged() -> list[str]:
    """The profiles in the package as `gpu/model`, sorted."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in PACKAGED.glob("*/*.json"))


@lru_cache(maxsize=8)
def _load(path: str) -> Profile:
    return Profile.load(path)
