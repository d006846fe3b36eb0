"""What makes two runs the same, and how a sweep is spread out into runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from sweep_harness import CHEAP

from analysis import identity
from analysis.identity import Identifier, relevant
from analysis.sweep.api import render
from analysis.sweep.expand import expand
from confsim.errors import InputError
from confsim.setup.configuration import compose, rewrite


def resolved(*overrides: str, command: str = "simulate") -> dict[str, Any]:
    config = OmegaConf.to_container(compose(overrides, command), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def name(*overrides: str, command: str = "simulate") -> str:
    return Identifier()(command, resolved(*overrides, command=command)).id


def test_identity_ignores_what_no_result_depends_on() -> None:
    same = name(*CHEAP, "rate=2")
    assert name(*CHEAP, "rate=2", "output.dir=elsewhere", "quiet=true", "cache=false", "resume=false") == same
    assert name(*CHEAP, "rate=2", "sweep.workers=7") == same
    assert name(*CHEAP, "rate=2.5") != same
    assert name(*CHEAP, "rate=2", "seed=1") != same
    assert name(*CHEAP, "rate=2", "output.timeline=true") != same  # a file that the other result does not have
    goodput = name(*CHEAP, command="goodput")
    assert goodput != name(*CHEAP)
    assert name(*CHEAP, "goodput.workers=1", command="goodput") == goodput
    assert name(*CHEAP, "goodput.tolerance=0.05", command="goodput") != goodput


def test_identity_follows_the_content_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [0]}
    path.write_text(json.dumps(row) + "\n")
    words = ["trace=mooncake", f"trace.path={path}", "latency=affine"]
    first = name(*words)
    assert name(*words) == first
    path.write_text(json.dumps({**row, "output_length": 4}) + "\n")
    assert name(*words) != first


def test_identity_follows_the_latency_profile(tmp_path: Path) -> None:
    from confsim.latency.config import PACKAGED

    text = (PACKAGED / "h100_sxm" / "qwen3_14b.json").read_text()
    path = tmp_path / "profile.json"
    path.write_text(text)
    words = ["trace=fixed", f"latency.profile={path}"]
    first = Identifier()("simulate", resolved(*words))
    assert first.parts["profile"] is not None
    data = json.loads(text)
    data["overhead"]["iteration_s"] *= 2
    path.write_text(json.dumps(data))
    from confsim.latency import config

    config._load.cache_clear()
    second = Identifier()("simulate", resolved(*words))
    assert second.parts["profile"] != first.parts["profile"]
    assert second.id != first.id


def test_identity_follows_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = name(*CHEAP)
    monkeypatch.setattr(identity, "code_digest", lambda *modules: "other code")
    assert name(*CHEAP) != before


def test_identity_covers_foreign_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "my_latency_module.py"
    module.write_text("from confsim.latency.affine import AffineLatencyConfig\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = resolved(*CHEAP)
    config["latency"]["_target_"] = "my_latency_module.AffineLatencyConfig"
    from confsim.setup.cache import code_digest

    first = Identifier()("simulate", config).id
    module.write_text(module.read_text() + "x = 1\n")
    code_digest.cache_clear()
    assert Identifier()("simulate", config).id != first


def test_relevant_keeps_everything_else() -> None:
    config = resolved(*CHEAP)
    assert set(config) - set(relevant(config)) == {"cache", "quiet", "resume", "sweep"}
    assert relevant(config)["output"] == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("simulate", ["rate=1,2.5", "scheme=conflux,chunked_prefill", "seed=range(1,2)", "slo.rule=deadline,max_gap"]),
        ("simulate", ["trace=fixed", "trace.prompt_tokens=10,20", "trace.window=[0,5],[0,null]", "horizon_s=null,3"]),
        ("simulate", ["+model.name='a b','c,d'", "kv.prefix_cache=true,off"]),
        ("goodput", ["scheme=conflux,chunked_prefill", "scheme.max_batched_tokens=1024,2048", "slo.tbt_s=0.1"]),
    ],
)
def test_expand_is_what_hydra_composes(command: str, words: list[str]) -> None:
    words = [word.lstrip("+") for word in words]
    grid = expand(command, [*rewrite(words, command, True), "hydra.sweep.dir=somewhere"])
    assert grid is not None
    assert grid.folder == Path("somewhere").absolute()
    assert len(grid.runs) == len({point.text for point in grid.runs})
    for point in grid.runs:
        fixed = [word for word in words if "," not in word and "range" not in word]
        own = [f"{key}={render(value)}" for key, value in point.axes.items()]
        whole = compose(rewrite([*fixed, *own], command), command)
        assert point.config == OmegaConf.to_container(whole, resolve=True), point.text
        assert point.mistake is None


def test_expand_keeps_a_mistake_with_its_run() -> None:
    grid = expand("simulate", [*CHEAP, "rate=1,-1,2", "slo.ttft_s=1,soon", "hydra.sweep.dir=x"])
    assert grid is not None
    mistakes = [point.mistake for point in grid.runs]
    assert [mistake is None for mistake in mistakes] == [True, False, False, False, True, False]
    assert "rate=-1" in str(mistakes[2])
    assert "slo.ttft_s=soon" in str(mistakes[1])


def test_expand_refuses_what_hydra_refuses() -> None:
    with pytest.raises(InputError, match=r"scheme=nope: unknown, use one of .*conflux"):
        expand("simulate", ["scheme=conflux,nope", "hydra.sweep.dir=x"])
    with pytest.raises(InputError, match=r"slo.ttft: no such key"):
        expand("simulate", ["slo.ttft=1,2", "hydra.sweep.dir=x"])


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.1, 1e-5, "plain", "two words", "it's", "a,b", "true", [1, "x y"], {"k": [1, None]}, "1"]
)
def test_render_survives_hydras_grammar(value: Any) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from analysis.sweep.expand import plain

    override = OverridesParser.create().parse_override(f"key={render(value)}")
    assert plain(override.value()) == value
