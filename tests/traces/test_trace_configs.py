"""The configuration files of traces and arrivals."""

from __future__ import annotations

from importlib.resources import files

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from traces.arrivals import ClosedLoop
from traces.errors import InputError
from traces.synthesis import PRESETS

FILES = ("mooncake", "bailian", "azure", "parquet")
MODES = ("recorded", "spread", "poisson", "gamma", "closed_loop")


def config(group: str, name: str, **overrides: object):  # type: ignore[no-untyped-def]
    text = files("conf").joinpath(group, f"{name}.yaml").read_text(encoding="utf-8")
    return instantiate(OmegaConf.merge(OmegaConf.create(text), overrides))


@pytest.mark.parametrize("name", FILES)
def test_X1_a_file_format_without_a_path_says_what_to_add(name: str) -> None:
    with pytest.raises(InputError, match=f"trace.path is not set: trace={name} reads a file, add trace.path=FILE"):
        config("trace", name).load()


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    trace = config("trace", name, requests=200, window=[0, None], sample=0.5).load(1, True)
    assert 0 < len(trace) < 200
    assert trace.provenance["synthetic"]


def test_default_sizes() -> None:
    assert {config("trace", name).requests for name in PRESETS} == {3000}
    assert len(config("trace", "fixed").load()) == 1000


@pytest.mark.parametrize("name", MODES)
def test_modes_run_from_their_files(name: str) -> None:
    trace = config("trace", "toolagent", requests=50).load()
    mode = config("arrivals", name)
    load = mode.apply(trace, None if isinstance(mode, ClosedLoop) else 2.0, 1)
    assert load.mode == name
    assert load.provenance["mode"] == name
    assert len(load) == 50


@pytest.mark.parametrize(("group", "name"), [("trace", n) for n in FILES + PRESETS] + [("arrivals", n) for n in MODES])
def test_every_key_is_documented(group: str, name: str) -> None:
    text = files("conf").joinpath(group, f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    for line in text.splitlines():
        key = line.partition(":")[0]
        if line and not line.startswith(("#", "_target_")) and key not in ("path_or_name", "format", "preset"):
            assert "#" in line, f"{group}/{name}.yaml: {key} has no comment"
