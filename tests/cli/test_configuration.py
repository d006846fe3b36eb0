"""Composition: the library's way in, the keys of a goodput search, and every documented key."""

from __future__ import annotations

from importlib import resources

import pytest
from omegaconf import OmegaConf

from analysis.search.cases import scheme_cases
from confsim.errors import InputError
from confsim.setup.configuration import compose, groups, options, rewrite


def test_defaults_are_the_main_job():
    cfg = compose(command="goodput")
    assert (cfg.model.name, cfg.gpu.name, cfg.cluster.gpus) == ("qwen3_14b", "h100_sxm", 4)
    assert (cfg.slo.ttft_s, cfg.slo.tbt_s, cfg.slo.attainment) == (2.0, 0.1, 0.95)
    assert list(cfg.schemes) == ["conflux", "chunked_prefill", "muxwise", "loongserve"]
    assert len(scheme_cases(cfg)[1].candidates) == 5, "chunks are tuned"
    assert (cfg.trace.preset, cfg.policy.order) == ("toolagent", "fcfs")


def test_overrides_win():
    cfg = compose(["rate=3", "slo.tbt_s=0.05", "policy=srpf", "scheme=chunked_prefill"])
    assert (cfg.rate, cfg.slo.tbt_s, cfg.policy.order, cfg.scheme.name) == (3, 0.05, "srpf", "chunked_prefill")


@pytest.mark.parametrize("overrides", [["rate=-1"], ["model=nope"], ["nope=1"], ["rate"]])
def test_mistakes_are_input_errors(overrides: list[str]):
    with pytest.raises(InputError):
        compose(overrides)


def test_composition_inside_a_running_hydra_leaves_it_alone():
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("conf", version_base="1.3"):
        assert compose(["rate=5"]).rate == 5
        assert hydra_compose("simulate", ["rate=6"]).rate == 6


@pytest.mark.parametrize(
    ("given", "sweep", "expected"),
    [
        ("scheme=conflux", False, "schemes=[conflux]"),
        ("scheme=a,b", False, "schemes=[a,b]"),
        ("scheme=a,b", True, "schemes=[a],[b]"),
        ("schemes=a,b", False, "schemes=[a,b]"),
        ("schemes=[a,b]", False, "schemes=[a,b]"),
        ("scheme.overlap=false", False, "++per_scheme.all.overlap=false"),
        ("+scheme.overlap=1,2", True, "++per_scheme.all.overlap=1,2"),
        ("per_scheme.conflux.overlap=false", False, "++per_scheme.conflux.overlap=false"),
        ("slo.ttft_s=1", False, "slo.ttft_s=1"),
    ],
)
def test_goodput_overrides_that_mean_several_schemes(given: str, sweep: bool, expected: str):
    assert rewrite([given], "goodput", sweep) == [expected]
    assert rewrite([given], "simulate", sweep) == [given]


def test_scheme_keys_reach_the_schemes_that_have_them():
    cfg = compose(
        ["scheme.max_batched_tokens=1024", "scheme.chunk_tokens=512", "per_scheme.conflux.overlap=false"], "goodput"
    )
    conflux, chunked, *_ = scheme_cases(cfg)
    assert conflux.configs[0]["scheme"]["max_batched_tokens"] == 1024
    assert chunked.configs[0]["scheme"]["max_batched_tokens"] == 1024
    assert chunked.configs[0]["scheme"]["chunk_tokens"] == 512
    assert "chunk_tokens" not in conflux.configs[0]["scheme"]
    assert conflux.configs[0]["scheme"]["overlap"] is False
    assert conflux.configs[0]["horizon_s"] is None
    assert not {"schemes", "per_scheme", "goodput"} & set(conflux.configs[0])


def test_horizon_is_ignored_by_a_search():
    (case,) = scheme_cases(compose(["schemes=[conflux]", "horizon_s=5"], "goodput"))
    assert case.configs[0]["horizon_s"] is None


def test_tuned_parameters_become_candidates():
    cfg = compose(["schemes=[chunked_prefill]", "scheme.chunk_tokens=tuned", "slo.margin=tuned"], "goodput")
    (case,) = scheme_cases(cfg)
    values = {candidate["scheme.chunk_tokens"] for candidate in case.candidates}
    assert len(values) > 3 and all(isinstance(value, int) for value in values)
    assert {candidate["slo.margin"] for candidate in case.candidates} == {0.0, 0.05, 0.1, 0.2}
    assert len(case.candidates) == 4 * len(values) == len(case.configs)
    first = case.configs[0]
    assert first["scheme"]["chunk_tokens"] == case.candidates[0]["scheme.chunk_tokens"]
    assert first["slo"]["margin"] == case.candidates[0]["slo.margin"]


def test_auto_is_not_searched():
    (case,) = scheme_cases(compose(["schemes=[chunked_prefill]", "scheme.chunk_tokens=auto"], "goodput"))
    assert case.candidates == ({},)
    assert case.configs[0]["scheme"]["chunk_tokens"] == "auto"


@pytest.mark.parametrize("group", groups())
def test_every_choice_composes_or_needs_only_a_value_from_the_user(group: str):
    names = OmegaConf.to_container(compose())
    if group not in names:
        pytest.skip("not a group of simulations")
    for name in options(group):
        assert group in compose([f"{group}={name}"])


def test_every_key_is_documented_where_it_is_defined():
    """Each key has a comment on its line or on the line above (keys of plain data excepted: models and GPUs)."""
    for name in ("base", "simulate", "goodput", "stats", "fetch", "report", "list"):
        _check_documented(resources.files("conf").joinpath(f"{name}.yaml").read_text(), name)


def _check_documented(text: str, name: str) -> None:
    section = ""
    for line in text.splitlines():
        if not line.startswith((" ", "#")) and line:
            section = line.split(":")[0]
        key, colon, value = line.partition(":")
        if section in ("defaults", "hydra") or not colon or line.lstrip().startswith("#") or not value.strip():
            continue
        assert "#" in value, f"{name}.yaml: {key.strip()} has no comment"


def test_a_search_needs_an_slo():
    with pytest.raises(InputError, match="slo=none: a goodput is the rate at which an SLO is kept"):
        scheme_cases(compose(["slo=none"], "goodput"))
