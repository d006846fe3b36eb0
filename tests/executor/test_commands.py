"""`confsim run`, `confsim check`, ranks of torchrun, and ranks inside a sweep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from executor_harness import THREADS, generate, prompts, tiny

from confsim.errors import InputError
from confsim.setup.configuration import compose
from confsim.specs import KvConfig
from executor import check
from executor import generate as generating
from executor.config import Layout, model_from_dict, read_model
from executor.runtime import Runtime

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("executor.device.launcher=threads", "quiet=true")


def run(folder: Path, *overrides: str) -> tuple[dict, list[dict]]:  # type: ignore[type-arg]
    """Compose and run `confsim run`; its summary and outputs."""
    cfg = compose([f"output.dir={folder}", *QUICK, *overrides], "run")
    assert generating.command(cfg) == 0
    rows = [json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), rows


@pytest.mark.parametrize("layout", [("xp", 2, 1), ("sp", 2, 1), ("tp", 1, 2), ("mux", 1, 2), ("xp", 2, 2)])
def test_run_generates_the_same_on_any_layout(tmp_path: Path, layout: tuple[str, int, int]) -> None:
    shape = [f"executor.layout.{key}={value}" for key, value in zip(("kind", "groups", "tp"), layout, strict=True)]
    asked = ("prompts=[[1,2,3],[400],[7,7,7,7,7,7]]", "max_tokens=5", "chunk_tokens=2")
    summary, rows = run(tmp_path / "a", *asked, *shape)
    _, expected = run(tmp_path / "b", *asked, "executor.layout.kind=tp", "executor.layout.groups=1")
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in expected]
    assert summary["kind"] == "run"
    assert (summary["requests"], summary["completed"], summary["emitted_tokens"]) == (3, 3, 15)


def test_run_reads_text_and_files(tmp_path: Path) -> None:
    """Without a tokenizer a text is its bytes; files hold one prompt a line."""
    _, direct = run(tmp_path / "a", "prompts='hello, you'", "max_tokens=4")
    (tmp_path / "p.txt").write_text("hello, you\n\n")
    (tmp_path / "p.jsonl").write_text(json.dumps({"token_ids": list(b"hello, you")}) + "\n")
    _, text = run(tmp_path / "b", f"prompts={tmp_path / 'p.txt'}", "max_tokens=4")
    _, ids = run(tmp_path / "c", f"prompts={tmp_path / 'p.jsonl'}", "max_tokens=4")
    assert direct[0]["prompt_tokens"] == 10
    assert direct[0]["token_ids"] == text[0]["token_ids"] == ids[0]["token_ids"]
    assert isinstance(direct[0]["text"], str)
    assert ids[0]["text"] is None


def test_run_rejects_and_counts(tmp_path: Path) -> None:
    """S5: a request over the context limit is counted by its reason."""
    summary, rows = run(
        tmp_path, "prompts=[[1,2,3],[1]]", "max_tokens=6", "executor.model.max_context_tokens=8", "temperature=0.7"
    )
    assert summary["rejected"] == {"context_limit": 1}
    assert [row["rejected"] for row in rows] == ["context_limit", None]


def test_run_of_nothing_but_rejected_prompts_fails(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^every prompt was rejected \(context_limit\): see "):
        run(tmp_path, "prompts=[[1,2,3]]", "max_tokens=6", "executor.model.max_context_tokens=8")
    assert json.loads((tmp_path / "summary.json").read_text())["rejected"] == {"context_limit": 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompts=[]", "prompts is empty"),
        ("prompts=/nope.jsonl", "cannot be read"),
        ("prompts=[[1,x]]", "expected a text or a list of token ids"),
        ("prompts=[[9999]]", "token ids outside 0 to 511"),
        ("max_tokens=0", "use 1 or more"),
        ("executor.layout.groups=3", "cannot be split over 3 ranks"),
        ("executor.layout.kind=pp", "use one of mux, sp, tp, xp"),
        ("executor.device.overlap=streams", "use one of turn, threads"),
        ("executor.kv.prefix_cache=true", "use false"),
        ("temperature=-1", "sampling.temperature"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, override: str, message: str) -> None:
    from confsim.setup.configuration import input_error

    words = [f"output.dir={tmp_path}", *QUICK, *([] if override.startswith("prompts") else ["prompts=[[1]]"]), override]
    with pytest.raises(Exception, match=r".") as error:
        generating.command(compose(words, "run"))
    found = input_error(error.value)
    assert found is not None
    assert message in str(found)
    assert "\n" not in str(found)


def test_check_writes_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose([f"output.dir={tmp_path}", "executor.device.launcher=threads"], "check")
    assert check.command(cfg) == 0
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["cases"], found["passed"], found["failed"]) == (28, 28, 0)
    assert found["max_abs_error"] < 1e-4
    assert found["device"].startswith("cpu")
    assert "28 of 28 cases passed" in capsys.readouterr().out


def test_check_fails_where_a_rank_computes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite notices a wrong result, and goes on after a case that could not run."""
    from executor.exchange import Exchange

    cfg = compose(list(QUICK), "check")
    import hydra

    config = hydra.utils.instantiate(cfg.executor, _convert_="all")
    original = Exchange.to_rows
    monkeypatch.setattr(Exchange, "to_rows", lambda self, out, shards: original(self, out, shards) * 1.01)
    outcomes = check.run_checks(config, (Layout("xp", 2, 1), Layout("tp", 1, 2)))
    assert [outcome.passed for outcome in outcomes] == [False, False, True, True] * 2

    def broken(self: Exchange, out: object, shards: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(Exchange, "to_rows", broken)
    outcomes = check.run_checks(config, (Layout("xp", 2, 1),))
    assert "boom" in outcomes[0].error
    assert not outcomes[0].passed


JOINED = """
import sys
sys.path.insert(0, {tests!r})
from executor_harness import *
runtime = Runtime(tiny(), Layout("xp", 2, 1), Device(), KvConfig(capacity_tokens=512))
with runtime:
    found = generate(runtime, prompts([20, 9]), 4, 7).tokens
    if {fail}:
        from test_faults import whole
        runtime.run(whole(77, 8))
print("tokens", found, flush=True)
"""


def _torchrun(code: str, tmp_path: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)


def test_ranks_of_torchrun_are_joined(tmp_path: Path) -> None:
    """The script goes on in rank 0 alone; results are those of ranks that were spawned."""
    with Runtime(tiny(), Layout("xp", 2, 1), THREADS, KvConfig(capacity_tokens=512)) as runtime:
        expected = generate(runtime, prompts([20, 9]), 4, 7).tokens
    done = _torchrun(JOINED.format(tests=str(Path(__file__).parent), fail=False), tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("tokens")] == [f"tokens {expected}"]


def test_failure_of_a_joined_rank_is_named(tmp_path: Path) -> None:
    done = _torchrun(JOINED.format(tests=str(Path(__file__).parent), fail=True), tmp_path, 2)
    assert done.returncode != 0
    assert "RankError: rank" in done.stderr
    assert "request 77 is unknown" in done.stderr


def test_wrong_number_of_joined_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.config import Device
    from executor.joined import joined_team, world_of

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "localhost"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="2 ranks but 3 were started"):
        joined_team(tiny(), Layout("xp", 2, 1), Device(), KvConfig(capacity_tokens=64))
    slurm = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "node7",
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
    }
    assert world_of(slurm) == (3, 4, 1)
    assert slurm["MASTER_ADDR"] == "node7"
    assert world_of({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0"}) is None  # a batch script: ranks are spawned


def test_ranks_get_a_resolved_configuration() -> None:
    """H6: the command line of a rank's process names its socket and nothing else."""
    from executor_harness import PROCESSES, pids

    with Runtime(tiny(), Layout("xp", 2, 1), PROCESSES, KvConfig(capacity_tokens=64)) as runtime:
        for pid in pids(runtime):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:-1]
            assert words[:2] == [b"-m", b"executor.worker"]
            assert words[2].isdigit()
            assert len(words) == 3


def test_ranks_inside_a_sweep(tmp_path: Path) -> None:
    """H6: two runs of a sweep, each with its own layout and ranks that are processes."""
    words = ["prompts=[[5,6,7]]", "max_tokens=3", "executor.layout.kind=xp,sp", "quiet=true", f"output.dir={tmp_path}"]
    subprocess.run([sys.executable, "-m", "confsim", "run", "-m", *words], check=True, cwd=tmp_path)
    summaries = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/*/summary.json"))]
    outputs = [path.read_text() for path in sorted(tmp_path.glob("*/*/outputs.jsonl"))]
    assert [summary["layout"]["kind"] for summary in summaries] == ["xp", "sp"]
    assert outputs[0] == outputs[1]


def test_every_executor_config_composes(tmp_path: Path) -> None:
    """The Qwen3 one runs; the GPU one says in one line what this machine lacks."""
    import torch

    _, rows = run(tmp_path / "a", "executor=cpu_tiny_qwen3", "prompts=[[1,2,3]]", "max_tokens=3")
    assert len(rows[0]["token_ids"]) == 3
    hf = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**hf, "num_attention_heads": 2, "head_dim": 16}))
    words = ["executor=gpu", f"executor.model.path={tmp_path}", "executor.model.weights=false", "prompts=[[1]]"]
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="PyTorch sees no CUDA device here"):
            generating.command(compose([f"output.dir={tmp_path}", *words], "run"))


def test_config_of_a_hugging_face_folder(tmp_path: Path) -> None:
    raw = {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    model = model_from_dict(raw, "config.json", None)
    assert (model.head_dim, model.rope.theta, model.rope.factor) == (16, 500000.0, 8.0)
    for change, message in (
        ({"model_type": "mixtral"}, "not one that the executor runs"),
        ({"attention_bias": True}, "biases"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
        ({"num_attention_heads": None}, "config.json"),
    ):
        broken = {key: value for key, value in {**raw, **change}.items() if value is not None}
        with pytest.raises(InputError, match=message):
            model_from_dict(broken, "config.json", None)
    with pytest.raises(InputError, match="cannot be read"):
        read_model(str(tmp_path))


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    from dataclasses import replace

    import torch
    from safetensors.torch import save_file

    from executor.place import Place
    from executor.weights import load_weights

    model = replace(tiny(), weights=str(tmp_path))
    place = Place.of(0, Layout("tp"), model)
    arguments = (model, place, torch.float32, torch.device("cpu"))
    with pytest.raises(InputError, match=r"holds neither model\.safetensors"):
        load_weights(*arguments)
    save_file({"model.embed_tokens.weight": torch.zeros(131, 63)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"is \(131, 63\), the configuration says \(131, 64\)"):
        load_weights(*arguments)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"embed_tokens\.weight is missing"):
        load_weights(*arguments)
