"""`python -m analysis.calibrate.packaged`: refit every profile that the package ships."""

from __future__ import annotations

from analysis.calibrate.command import fit_from
from confsim.latency.config import packaged_path
from confsim.specs import GpuSpec, ModelSpec

PROFILES = {
    "h100_sxm": ("llama3_1_8b", "qwen3_14b", "qwen3_32b", "qwen3_32b_fp8", "llama3_1_70b", "llama3_1_70b_fp8"),
    "h200_sxm": ("llama3_1_8b", "qwen3_14b", "qwen3_32b", "qwen3_32b_fp8", "llama3_1_70b", "llama3_1_70b_fp8"),
    "a100_sxm": ("llama3_1_8b", "qwen3_14b", "qwen3_32b"),
}


def specs(model: str, gpu: str) -> tuple[ModelSpec, GpuSpec]:
    """Model and GPU by their names in `conf`."""
    from hydra.utils import instantiate

    from confsim.setup.configuration import compose

    cfg = compose([f"model={model}", f"gpu={gpu}"], command="fit")
    return instantiate(cfg.model), instantiate(cfg.gpu)


def main() -> None:
    """Fit and write them all."""
    for gpu_name, models in PROFILES.items():
        for model_name in models:
            model, gpu = specs(model_name, gpu_name)
            path = packaged_path(model, gpu)
            fit_from("aiconfigurator", model, gpu).save(path)
            print(path)


if __name__ == "__main__":
    main()
