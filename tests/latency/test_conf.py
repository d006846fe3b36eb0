"""Every model, GPU and latency choice of `conf` instantiates and is what its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra.utils import instantiate

from confsim.errors import InputError
from confsim.latency.affine import AffineLatencyConfig
from confsim.latency.config import FittedLatency
from confsim.setup.configuration import compose, options
from confsim.specs import GpuSpec, ModelSpec


@pytest.mark.parametrize("name", [name for name in options("model") if name not in ("hf", "executor")])
def test_models(name: str) -> None:
    model = instantiate(compose([f"model={name}"], command="fit").model)
    assert isinstance(model, ModelSpec) and model.name == name
    billions = {"llama3_1_8b": 8.03, "qwen3_14b": 14.77, "qwen3_32b": 32.76, "llama3_1_70b": 70.55}
    for key, value in billions.items():
        if name.startswith(key):
            count = model.num_hidden_layers * model.layer_parameters + 2 * model.vocab_size * model.hidden_size
            assert count / 1e9 == pytest.approx(value, rel=0.002)
    assert (model.gemm_itemsize, model.kv_itemsize) == ((1, 1) if name.endswith("_fp8") else (2, 2))


@pytest.mark.parametrize("name", [name for name in options("gpu") if name != "cpu"])
def test_gpus(name: str) -> None:
    gpu = instantiate(compose([f"gpu={name}"], command="fit").gpu)
    assert isinstance(gpu, GpuSpec) and gpu.name == name
    assert gpu.flops > 1e14 and gpu.memory_bandwidth > 1e12 and gpu.memory_bytes > 80e9


def test_latency_choices() -> None:
    assert instantiate(compose([]).latency) == FittedLatency()
    assert instantiate(compose(["latency=affine"]).latency) == AffineLatencyConfig()
    changed = instantiate(compose(["latency.decode_sm_share=0.25", "latency.prefill_slowdown=1.4"]).latency)
    assert (changed.decode_sm_share, changed.prefill_slowdown) == (0.25, 1.4)


def test_a_users_own_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    path.write_text(json.dumps(dict(zip(keys, (4096, 32, 32, 14336, 32000), strict=True))))
    model = instantiate(compose(["model=hf", f"model.hf_config={path}"]).model)
    assert (model.name, model.head_dim, model.num_key_value_heads) == ("mine", 128, 32)
    with pytest.raises(InputError, match=r"h100_sxm/qwen3_14b.*confsim fit"):
        FittedLatency().load(model, instantiate(compose([]).gpu))
