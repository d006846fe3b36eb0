"""Profiles as files: a round trip, and S13: what could put a bad time on the clock is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confsim.errors import InputError
from confsim.latency.config import FittedLatency, packaged
from confsim.latency.profile import PACKAGED, Profile, profile_from_json, profile_to_json
from confsim.specs import GpuSpec, ModelSpec


def test_round_trip_keeps_everything(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "copy.json")
    again = Profile.load(tmp_path / "copy.json")
    assert profile_to_json(again) == profile_to_json(profile)
    assert again.profile_hash == profile.profile_hash
    assert [path.name for path in tmp_path.iterdir()] == ["copy.json"]


def test_packaged_profiles_are_small_readable_and_say_where_they_come_from() -> None:
    names = packaged()
    for gpu in ("h100_sxm", "h200_sxm", "a100_sxm"):
        for model in ("llama3_1_8b", "qwen3_14b", "qwen3_32b"):
            assert f"{gpu}/{model}" in names
    for name in names:
        path = PACKAGED / f"{name}.json"
        assert path.stat().st_size < 200_000, name
        profile = Profile.load(path)
        assert (profile.gpu, profile.name) == tuple(name.split("/"))
        assert profile.provenance["package_version"]
        assert all(isinstance(rows, int | str) for rows in profile.provenance["tables"].values())
        assert any("cached_token" in text for text in profile.provenance["derived"])
        for component in ("gemm", "decode_attention", "prefill_attention", "all_to_all", "all_reduce"):
            assert 0.0 < profile.errors[component]["held_out"]["mean_pct"] < 10.0, (name, component)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, "fast", None, True])
@pytest.mark.parametrize(
    "entry",
    [
        "linear.tp1.qkv.us",
        "head.tp2.gather.us",
        "prefill_attention.degree4.own.us",
        "exchange.tp1sp4.pack.us",
        "transfer.tp1sp4.us",
        "decode_attention.tp1.us.3",
    ],
)
def test_s13_bad_times_are_refused_by_name(profile: Profile, entry: str, bad: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(_changed(profile, entry, lambda times: times.__setitem__(2, bad))))
    name = entry.replace("us.3", "us[3]")
    with pytest.raises(InputError) as caught:
        Profile.load(path)
    assert f"{path}: {name}[2]" in str(caught.value)


@pytest.mark.parametrize("key", ["iteration_s", "sequence_s"])
def test_s13_bad_overheads_are_refused_by_name(profile: Profile, key: str) -> None:
    data = _changed(profile, "overhead", lambda overhead: overhead.__setitem__(key, float("nan")))
    with pytest.raises(InputError, match=f"overhead.{key}"):
        profile_from_json(data, "p.json")


def test_s13_times_that_fall_with_work_are_refused(profile: Profile) -> None:
    data = _changed(profile, "linear.tp1.down.us", lambda times: times.reverse())
    with pytest.raises(InputError, match=r"linear.tp1.down.y\[1\] is below the entry before it"):
        profile_from_json(data, "p.json")
    data = _changed(profile, "decode_attention.tp1.us", lambda rows: rows.reverse())
    with pytest.raises(InputError, match="falls with the number of sequences"):
        profile_from_json(data, "p.json")


def test_files_that_are_no_profile_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "old.json").write_text('{"kind": "latency_profile", "format": 0}')
    (tmp_path / "empty.json").write_text('{"kind": "latency_profile", "format": 1, "gpu": "x", "model": {}}')
    for name, text in (
        ("missing.json", "latency.profile"),
        ("text.json", "not JSON"),
        ("other.json", "latency_profile"),
        ("old.json", "refit"),
        ("empty.json", "has no section"),
    ):
        with pytest.raises(InputError, match=text) as caught:
            Profile.load(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value)


def test_a_missing_profile_names_those_that_exist(model: ModelSpec) -> None:
    with pytest.raises(InputError, match=r"no latency profile.*h100_sxm/qwen3_14b.*confsim fit"):
        FittedLatency().load(model, GpuSpec("b200_sxm", 1, 1.0, 1.0, 1.0, 1))


def test_results_record_hash_provenance_and_errors(profile: Profile, model: ModelSpec, gpu: GpuSpec) -> None:
    described = FittedLatency().describe(model, gpu)
    assert described["profile_hash"] == profile.profile_hash
    assert json.loads(json.dumps(described))["errors"]["gemm"]["held_out"]["rows"] > 10_000


def _changed(profile: Profile, entry: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The profile as plain data with one of its entries changed."""
    data = copy.deepcopy(profile_to_json(profile))
    value: Any = data
    for part in entry.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    change(value)
    return data
