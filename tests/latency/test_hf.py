"""`model=hf`: a checkpoint's config.json becomes a model, or one line says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from confsim.errors import InputError
from confsim.hf import from_hf_config
from confsim.specs import ModelSpec

QWEN = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def _write(folder: Path, **changes: Any) -> Path:
    data = {key: value for key, value in {**QWEN, **changes}.items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def test_a_checkpoint_folder_gives_the_same_model(model: ModelSpec, tmp_path: Path) -> None:
    folder = _write(tmp_path / "Qwen3-14B")
    assert from_hf_config(str(folder)).name == "qwen3_14b"
    assert from_hf_config(str(folder / "config.json")) == model
    assert from_hf_config(str(folder), name="mine", kv_cache_dtype="fp8").kv_itemsize == 1


def test_what_checkpoints_leave_out_or_nest(tmp_path: Path) -> None:
    llama = from_hf_config(str(_write(tmp_path / "a", model_type="llama", head_dim=None, num_key_value_heads=None)))
    assert (llama.head_dim, llama.num_key_value_heads, llama.qk_norm) == (128, 40, False)
    newer = from_hf_config(str(_write(tmp_path / "b", torch_dtype=None, dtype="float16")))
    assert newer.torch_dtype == "float16"
    nested = tmp_path / "c.json"
    nested.write_text(json.dumps({"model_type": "vlm", "text_config": QWEN}))
    assert from_hf_config(str(nested)).hidden_size == 5120


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": "forty"}, "num_hidden_layers='forty'"),
        ({"num_experts": 128}, "mixture of experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"torch_dtype": "int3"}, "torch_dtype=int3 is unknown"),
        ({"head_dim": None, "num_attention_heads": 48}, "give head_dim"),
    ],
)
def test_models_that_cannot_be_simulated(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        from_hf_config(str(_write(tmp_path / "m", **changes)))
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_not_there_or_not_json(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{\n oops")
    for name, text in (("none.json", "no such file"), ("list.json", "not a JSON object"), ("broken.json", ":2 is not")):
        with pytest.raises(InputError, match=text):
            from_hf_config(str(tmp_path / name))
