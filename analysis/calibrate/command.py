"""`confsim fit`: fit a latency profile from a source of measurements and write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.calibrate.measurements import Measurements
from analysis.calibrate.sources.base import MeasurementSource
from confsim.errors import InputError
from confsim.latency.profile import Profile
from confsim.setup.registry import REGISTRIES
from confsim.specs import GpuSpec, ModelSpec

SOURCES = REGISTRIES["source"]


def fit_from(source: str, model: ModelSpec, gpu: GpuSpec) -> Profile:
    """A profile of the model on the GPU.

    Raises:
        InputError: for a source that does not exist or lacks the model or the GPU, or where scipy is missing.
    """
    return fit_source(SOURCES.make(source), model, gpu)


def fit_source(source: MeasurementSource, model: ModelSpec, gpu: GpuSpec) -> Profile:
    """A profile of the model on the GPU.

    Raises:
        InputError: where the source does not cover it, or scipy is missing.
    """
    data = source.load(model, gpu)
    return source.finish(_fit(data, model, gpu), data, model, gpu)


def _fit(data: Measurements, model: ModelSpec, gpu: GpuSpec) -> Profile:
    try:
        from analysis.calibrate.fit import fit
    except ImportError as error:
        raise InputError(f"fitting needs {error.name}: pip install 'confsim[calibrate]'") from None
    return fit(data, model, gpu)


def table(profile: Profile) -> list[str]:
    """Error by component, one line each: held out, then how far replicates are apart."""
    lines = [f"{'component':<20}{'held out: mean':>16}{'median':>9}{'P95':>9}{'rows':>8}{'replicates':>13}"]
    for name, kinds in profile.errors.items():
        held = kinds["held_out"]
        apart = kinds.get("replicates", {}).get("mean_pct")
        cells = "".join(
            f"{_percent(held[key]):>{width}}" for key, width in (("mean_pct", 16), ("median_pct", 9), ("p95_pct", 9))
        )
        lines.append(f"{name:<20}{cells}{held['rows']:>8}{_percent(apart):>13}")
    return lines


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}%"


def command(cfg: Any) -> int:
    """Fit as `conf/fit.yaml` says, write the profile and say where; the exit code."""
    from hydra.utils import instantiate

    source: MeasurementSource = SOURCES.make(cfg.source, None if cfg.profile is None else Path(cfg.profile))
    model, gpu = source.specs() or (instantiate(cfg.model), instantiate(cfg.gpu))
    profile = fit_source(source, model, gpu)
    path = Path(cfg.output) if cfg.output else Path("profiles") / gpu.name / f"{model.name}.json"
    profile.save(path)
    if not cfg.quiet:
        print("\n".join([f"{model.name} on {gpu.name} from {cfg.source}", *table(profile)]))
        print(f"{path}  (use it with latency.profile={path})")
    return 0
