"""The disk cache: made once by any number of processes, whole or absent, never in the way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sweep_harness import CHEAP

from confsim import api
from confsim.errors import InputError
from confsim.setup.cache import Store, cached_json, cached_trace, code_digest, named_files
from confsim.setup.configuration import compose
from traces.synthesis import SyntheticTrace

# 100 processes, forked after one import, ask for the same entries at once.
CROWD = """
import os, sys, time
from pathlib import Path
from confsim.setup.cache import Store, cached_json

root, made = Path(sys.argv[1]), Path(sys.argv[2])
start = time.time() + 0.5

def make(name):
    with made.open("a") as file:
        file.write(name + "\\n")
    time.sleep(0.05)
    return {"name": name, "data": list(range(20000))}

def user(number):
    time.sleep(max(0.0, start - time.time()))
    store = Store(root)
    for name in ("a", "b", "c") if number % 2 else ("c", "b", "a"):
        assert cached_json("crowd", name, lambda: make(name), store) == {"name": name, "data": list(range(20000))}

children = []
for number in range(100):
    pid = os.fork()
    if pid == 0:
        try:
            user(number)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


def test_a_hundred_concurrent_users(tmp_path: Path, environment: dict[str, str]) -> None:
    made = tmp_path / "made"
    words = (sys.executable, "-c", CROWD, str(tmp_path / "store"), str(made))
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(made.read_text().split()) == ["a", "b", "c"]  # once each, whoever came first
    assert not [path for path in (tmp_path / "store").rglob("*") if path.name.startswith(".")]


def trace_words(path: Path) -> list[str]:
    return ["trace=mooncake", f"trace.path={path}", "latency=affine", "kv.prefix_cache=true"]


def write_trace(path: Path, rows: int = 20) -> None:
    lines = [
        {"timestamp": i * 100, "input_length": 600 + i, "output_length": 5, "hash_ids": [0, i + 1]} for i in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_cached_trace_is_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFSIM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "trace.jsonl"
    write_trace(path)
    plain = api.load_trace(compose([*trace_words(path), "cache=false"]))
    assert not (tmp_path / "cache").exists()
    first, second = (api.load_trace(compose(trace_words(path))) for _ in range(2))
    for trace in (first, second):
        assert trace.table.equals(plain.table) and trace.table.schema == plain.table.schema
        assert (trace.block_tokens, trace.provenance) == (plain.block_tokens, plain.provenance)
    write_trace(path, rows=21)
    assert len(api.load_trace(compose(trace_words(path)))) == 21
    assert len(api.load_trace(compose([*trace_words(path), "trace.limit=3"]))) == 3


def test_results_are_the_same_with_and_without_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFSIM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "trace.jsonl"
    write_trace(path)
    words = [*trace_words(path), "rate=3"]
    results = [api.simulate(compose([*words, f"cache={cache}"])) for cache in ("false", "true", "true")]
    for result in results[1:]:
        assert result.requests.equals(results[0].requests) and result.iterations.equals(results[0].iterations)
        own, first = (
            {**r.summary, "provenance": {**r.summary["provenance"], "config": None}} for r in (result, results[0])
        )
        assert json.dumps(own) == json.dumps(first)


def without_config(result: Any) -> dict[str, Any]:
    """The summary; the configuration says whether there was a cache."""
    return {**result.summary, "provenance": {**result.summary["provenance"], "config": None}}


def test_mistakes_are_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("not json\n")
    for _ in range(2):
        with pytest.raises(InputError):
            api.load_trace(compose(trace_words(path)))
    write_trace(path)
    assert len(api.load_trace(compose(trace_words(path)))) == 20


@pytest.mark.parametrize("harm", [b"", b"garbage", None])
def test_damaged_entries_are_made_again(tmp_path: Path, harm: bytes | None) -> None:
    store = Store(tmp_path)
    source = SyntheticTrace("conversation", requests=50)

    def load() -> Any:
        return source.load(seed=0, block_ids=True)

    config = {"_target_": "traces.synthesis.SyntheticTrace", "preset": "conversation", "requests": 50}
    first = cached_trace(config, 0, True, load, store)
    entry = next(path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock")
    entry.write_bytes(entry.read_bytes()[:200] if harm is None else harm)
    assert cached_trace(config, 0, True, load, store).table.equals(first.table)
    assert cached_trace(config, 0, True, lambda: pytest.fail("made twice"), store).table.equals(first.table)


def test_a_cache_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert cached_json("kind", "key", lambda: [1, 2], Store(blocked / "store")) == [1, 2]


def test_pruning_takes_what_was_used_longest_ago(tmp_path: Path) -> None:
    import os

    store = Store(tmp_path, limit_bytes=2500)
    for number, name in enumerate("abcd"):
        cached_json("kind", name, lambda: "x" * 1000, store)
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.suffix != ".lock" and time.time() - path.stat().st_mtime < 50:
                os.utime(path, (0, 1_000_000 + number))
    assert cached_json("kind", "a", lambda: pytest.fail("it was there"), store)  # used: now the latest
    assert store.prune() <= 2500
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert len(left) == 2
    assert cached_json("kind", "a", lambda: pytest.fail("it was used last"), store)


def test_named_files_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text("a")
    found = named_files({"trace": {"path": "trace.csv", "format": "csv"}, "rate": 3, "list": ["trace.csv"]})
    assert list(found) == ["trace.path"]
    Path("trace.csv").write_text("bc")
    assert named_files({"path": "trace.csv"})["path"] != found["trace.path"]
    monkeypatch.setenv("CONFSIM_CACHE", str(tmp_path / "user"))
    (tmp_path / "user" / "traces").mkdir(parents=True)
    (tmp_path / "user" / "traces" / "fetched.jsonl").write_text("a")
    fetched = named_files({"path": "fetched.jsonl"})  # a bare name of a fetched trace
    assert fetched["path"] == found["trace.path"]
    assert code_digest("confsim") != code_digest("confsim", "traces")
    assert code_digest("no_such_module_here") == code_digest()


def test_workers_of_a_sweep_share_one_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import confsim

    monkeypatch.setenv("CONFSIM_CACHE", str(tmp_path / "cache"))
    confsim.sweep(CHEAP, {"rate": [1, 2, 3]}, folder="s")
    entries = [path for path in (tmp_path / "cache" / "store" / "traces").rglob("*") if path.is_file()]
    assert len([path for path in entries if path.suffix != ".lock"]) == 1
