"""Golden results: shows that a change of the code changes no number.

    python tests/golden.py record FILE.json [--only PATTERN] [--tree FOLDER]
    python tests/golden.py compare FILE.json [--only PATTERN] [--tree FOLDER]

`record` runs small cases and writes hashes of what comes out of them: one for each top-level entry of a JSON result,
one for each column of a table. `compare` runs them again, prints a line for every case that differs, with the files and
the entries that do, and then exits with 1.

It uses the public library and the command line alone, so one copy of it runs on any state of the tree: on the `confsim`
that Python finds (PYTHONPATH), or on the checkout that --tree names. CONFSIM_NATIVE=0 runs the interpreted sources.
What says where a result comes from, and not what it is, is left out: class paths, hashes, commits, versions, folders
and wall clock.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

WORKERS = 2
COMMAND_LIMIT_S = 300
SCHEMES = ("conflux", "chunked_prefill", "muxwise", "loongserve", "disaggregated", "data_parallel", "uniform_sp")
ROUTERS = ("round_robin", "least_requests", "least_tokens", "prefix_aware", "slo_aware")

DROPPED = {"_target_", "profile_hash", "config_hash", "trace_hash", "sha256", "versions", "id", "wall_s", "timing"}
DROPPED |= {"git_commit", "git_dirty", "commit", "dirty"}
RENAMED = {"gpus_a_group": "gpus_per_group"}

Hashes = dict[str, dict[str, str]]  # of the files of a case: of each entry or column


@dataclass(frozen=True)
class Case:
    """Overrides that run in the library, or on the command line where there is a `command`.

    `files` are what a command writes; `wants` is an entry of the summary that has to be above 0, so that a case goes on
    covering what it is there for.
    """

    name: str
    words: tuple[str, ...]
    command: str = ""
    files: tuple[str, ...] = ()
    wants: str = ""


# --- the cases -------------------------------------------------------------------------------------------------------


def _library(name: str, words: str, wants: str = "") -> Case:
    return Case(name, tuple(words.split()), wants=wants)


def _command(name: str, words: str, files: str) -> Case:
    command, *rest = words.split()
    return Case(name, tuple(rest), command, tuple(files.split()))


def _commands() -> Iterator[Case]:
    searches = "trace.requests=40 goodput.workers=1 goodput.tolerance=0.1"
    run = "summary.json requests.parquet iterations.parquet"
    yield _command(
        "cli-goodput",
        f"goodput schemes=[conflux,chunked_prefill] {searches} goodput.curve=[0.75,1.1]",
        "goodput.json conflux/summary.json conflux/requests.parquet chunked_prefill/iterations.parquet",
    )
    yield _command(
        "cli-goodput-searched",
        f"goodput schemes=[data_parallel,disaggregated] scheme.tp=auto scheme.split=auto {searches} "
        "goodput.band=false goodput.curve=[]",
        "goodput.json",
    )
    yield _command(
        "cli-advise",
        "advise trace=qwen_a requests=60 schemes=[conflux,data_parallel] goodput.workers=1 goodput.tolerance=0.1",
        "advise.json deadline_waterfill/goodput.json srpf/goodput.json",
    )
    yield _command("cli-sweep", "simulate -m trace.requests=40 rate=2,8 scheme=muxwise,uniform_sp", "results.parquet")
    yield _command("cli-simulate", "simulate trace.requests=60 rate=6 scheme=conflux", f"{run} timeline.json.gz")
    yield _command(
        "cli-scenario", "scenario decodes_per_gpu=8 prefill_tokens=8192 tbt_s=0.05", "summary.json iterations.parquet"
    )
    yield _command(
        "cli-scenario-uneven",
        "scenario decodes_per_gpu=[32,0,0,8] decode_tokens=1 prefill_tokens=6000 scheme=uniform_sp",
        "summary.json iterations.parquet",
    )
    yield _command("cli-stats", "stats trace=bailian trace.path=bailian.jsonl", "stats.json")


def _schemes() -> Iterator[Case]:
    for number, scheme in enumerate(SCHEMES):
        base = f"scheme={scheme} seed={number}"
        yield _library(f"{scheme}-fcfs", f"{base} trace.requests=70 rate=7")
        exposed = "" if scheme == "loongserve" else "scheme.async_schedule=false"  # it has no such option
        yield _library(f"{scheme}-srpf", f"{base} trace.requests=70 rate=12 policy=srpf {exposed}")
        chat = "trace=conversation trace.requests=50 rate=5"
        yield _library(f"{scheme}-deadline", f"{base} {chat} policy.order=deadline")
        yield _library(f"{scheme}-noise", f"{base} trace.requests=40 rate=6 latency.noise=0.05")
        sizes = "trace.prompt_tokens=900 trace.output_tokens=300 kv.capacity_tokens=6000"
        if scheme == "loongserve":  # reserves the output that it assumes, so answers have to be longer than that
            sizes = "trace.prompt_tokens=100 trace.output_tokens=1200 kv.capacity_tokens=1500"
        yield _library(
            f"{scheme}-pressure",
            f"{base} trace=fixed trace.requests=60 {sizes} rate=20 kv.admission=step",
            wants="requests.preemptions",
        )
        yield _library(
            f"{scheme}-prefix",
            f"{base} trace=synthetic trace.requests=60 rate=3 kv.prefix_cache=true",
            wants="" if scheme == "loongserve" else "prefix_hit_tokens",  # it keeps no prefixes
        )


def _options() -> Iterator[Case]:
    base = "trace.requests=60 rate=9 scheme="
    yield _library("conflux-waterfill", f"{base}conflux policy=deadline_waterfill")
    yield _library("conflux-least-context", f"{base}conflux policy.dispatch=even policy.placement=least_context")
    yield _library(
        "conflux-packing",
        f"{base}conflux policy.dispatch=waterfill policy.placement=packing policy.placement_threshold=0.1 "
        "kv.capacity_tokens=40000",
    )
    yield _library("conflux-in-turn", f"{base}conflux scheme.overlap=false")
    yield _library("conflux-separate", f"{base}conflux scheme.co_batch=false")
    yield _library("conflux-spread", f"{base}conflux scheme.spread_decode=true")
    yield _library("conflux-transfer", f"{base}conflux scheme.overlap_transfer=false")
    yield _library("conflux-fluid", f"{base}conflux scheme.sm_split=fluid")
    yield _library("conflux-adaptive", f"{base}conflux scheme.sm_split=adaptive")
    yield _library("conflux-groups", f"{base}conflux cluster.gpus=8 cluster.tp=2 scheme.max_partial_prefills=2")
    yield _library("chunked_prefill-static", f"{base}chunked_prefill scheme.chunk_tokens=512")
    yield _library("chunked_prefill-first", f"{base}chunked_prefill scheme.prefill_first=true")
    yield _library("chunked_prefill-tp", f"{base}chunked_prefill scheme.tp=2 cluster.gpus=2")
    yield _library("loongserve-one-batch", f"{base}loongserve scheme.split_batches=false scheme.ring_overlap=true")
    yield _library("loongserve-eight", f"{base}loongserve cluster.gpus=8 scheme.max_prefill_s=0.5")
    yield _library("muxwise-preempt", f"{base}muxwise scheme.preempt_prefill=true scheme.contention=mean slo.ttft_s=6")
    yield _library("disaggregated-3+1", f"{base}disaggregated scheme.split=3+1 scheme.transfer=asynchronous")
    yield _library("disaggregated-small", f"{base}disaggregated scheme.decode_gpus=1 scheme.max_decode_batch=6")
    yield _library("data_parallel-router", f"{base}data_parallel scheme.router=least_requests scheme.chunk_tokens=1024")
    yield _library("uniform_sp-groups", f"{base}uniform_sp cluster.gpus=8 cluster.tp=2")


def _traces() -> Iterator[Case]:
    two = "cluster.instances=2 rate=8"
    for router in ROUTERS:
        yield _library(f"router-{router}", f"trace=mooncake trace.path=mooncake.jsonl {two} cluster.router={router}")
    yield _library(
        "router-prefix-cache",
        "trace=synthetic trace.requests=60 rate=6 cluster.instances=3 cluster.gpus=2 cluster.router=prefix_aware "
        "kv.prefix_cache=true scheme=data_parallel",
        wants="prefix_hit_tokens",
    )
    yield _library("trace-mooncake", "trace=mooncake trace.path=mooncake.jsonl kv.prefix_cache=true trace.limit=80")
    yield _library("trace-bailian", "trace=bailian trace.path=bailian.jsonl kv.prefix_cache=true trace.sample=0.8")
    yield _library("trace-azure", "trace=azure trace.path=azure.csv trace.window=[2,40]")
    yield _library("trace-parquet", "trace=parquet trace.path=trace.parquet kv.prefix_cache=true")
    yield _library("trace-qwen_a", "trace=qwen_a trace.requests=80 rate=12 seed=3")
    yield _library("arrivals-recorded", "trace=mooncake trace.path=mooncake.jsonl arrivals=recorded rate=5")
    yield _library("arrivals-random", "trace.requests=60 arrivals=spread arrivals.within=random rate=5 seed=5")
    yield _library("arrivals-poisson", "trace.requests=60 arrivals=poisson rate=5 seed=6")
    yield _library("arrivals-gamma", "trace.requests=60 arrivals=gamma arrivals.cv=3 rate=5 seed=7")
    yield _library("arrivals-closed", "trace.requests=60 arrivals=closed_loop arrivals.concurrency=9")
    sessions = "trace=bailian trace.path=bailian.jsonl arrivals.sessions=closed"
    yield _library("arrivals-sessions", f"{sessions} arrivals=recorded rate=6")
    yield _library("arrivals-think", f"{sessions} arrivals=poisson arrivals.think_s=0.5 rate=6 scheme=muxwise")


def _settings() -> Iterator[Case]:
    base = "trace.requests=60 rate=9"
    yield _library("horizon", f"{base} horizon_s=4", wants="requests.unfinished")
    yield _library("window", f"{base} warmup_s=2 cooldown_s=1.5 scheme=chunked_prefill")
    yield _library("deadline-rule", f"{base} slo.rule=deadline slo.ttft_per_token_s=0.0005 slo.margin=0.1")
    yield _library("affine", f"{base} latency=affine")
    yield _library("affine-muxwise", f"{base} latency=affine scheme=muxwise")
    yield _library("affine-adaptive", f"{base} latency=affine scheme.sm_split=adaptive latency.noise=0.02")
    slower = "latency.prefill_slowdown=1.7 latency.decode_slowdown=1.2"
    yield _library("slowdowns", f"{base} {slower} latency.split_kv=false")
    yield _library("a100", f"{base} gpu=a100_sxm model=llama3_1_8b scheme=muxwise")
    yield _library("fp8-h200", f"{base} gpu=h200_sxm model=llama3_1_70b_fp8 cluster.gpus=8 cluster.tp=2")
    yield _library("rejected", f"{base} kv.capacity_tokens=12000 scheme=data_parallel", wants="requests.rejected")


def all_cases() -> list[Case]:
    """Every case, those that take longest first."""
    cases = [*_commands(), *_schemes(), *_options(), *_traces(), *_settings()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    return cases


# --- trace files -----------------------------------------------------------------------------------------------------


def write_traces(folder: Path) -> None:
    """The same small file of every format each time."""
    _write_mooncake(folder / "mooncake.jsonl")
    _write_bailian(folder / "bailian.jsonl")
    _write_azure(folder / "azure.csv")
    _write_parquet(folder / "trace.parquet")


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_mooncake(path: Path) -> None:
    """Requests on ticks of 3 seconds, of which many open with the same blocks."""
    draw = random.Random(11)
    rows = []
    for number in range(100):
        prompt = draw.randint(20, 12_000)
        shared = draw.randint(0, 8)
        blocks = [block if block < shared else 1000 * (number + 1) + block for block in range(-(-prompt // 512))]
        row = {"timestamp": 3000 * (number // 12), "input_length": prompt, "output_length": draw.randint(1, 200)}
        rows.append({**row, "hash_ids": blocks})
    _write_lines(path, rows)


def _write_bailian(path: Path) -> None:
    """Chats of one to four turns; a turn opens with the blocks of the one before it."""
    draw = random.Random(12)
    rows = []
    for chat in range(40):
        start, prompt, blocks, parent = round(0.7 * chat, 3), draw.randint(30, 2000), list[int](), -1
        for turn in range(1, draw.randint(1, 4) + 1):
            count = -(-prompt // 16)
            blocks = blocks[: count - 1] + [100_000 * chat + 1000 * turn + i for i in range(count)]
            blocks = blocks[:count]
            output = draw.randint(1, 150)
            name = 10 * chat + turn
            row: dict[str, Any] = {
                "chat_id": name,
                "parent_chat_id": parent,
                "timestamp": round(start + 9.5 * (turn - 1), 3),
            }
            row |= {"input_length": prompt, "output_length": output, "type": "text", "turn": turn}
            rows.append({**row, "hash_ids": blocks})
            parent, prompt = name, prompt + output + draw.randint(10, 300)
    _write_lines(path, sorted(rows, key=lambda row: row["timestamp"]))


def _write_azure(path: Path) -> None:
    draw = random.Random(13)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number in range(100):
        second, fraction = divmod(number * 4_567_891, 10_000_000)
        stamp = f"2023-11-16 18:15:{second % 60:02d}.{fraction:07d}"
        lines.append(f"{stamp},{draw.randint(10, 6000)},{draw.randint(1, 250)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_parquet(path: Path) -> None:
    draw = random.Random(14)
    prompts = [draw.randint(1, 5000) for _ in range(80)]
    ids = [[i if i < 20 else 1000 * n + i for i in range(-(-prompt // 64))] for n, prompt in enumerate(prompts)]
    columns = {
        "request_id": pa.array(range(80), pa.int64()),
        "arrival_s": pa.array([0.21 * number for number in range(80)], pa.float64()),
        "prompt_tokens": pa.array(prompts, pa.int32()),
        "output_tokens": pa.array([draw.randint(1, 180) for _ in prompts], pa.int32()),
        "block_ids": pa.array(ids, pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns).replace_schema_metadata({"confsim.block_tokens": "64"}), path)


# --- hashes ----------------------------------------------------------------------------------------------------------


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """JSON data without what says where it comes from, under the present names, and free of this run's folder."""
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if key not in DROPPED}
        return {RENAMED.get(key, key): plain(item) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return value.replace(str(Path.cwd()), "FOLDER")
    return value


def hash_json(data: Any) -> dict[str, str]:
    """A hash for each top-level entry."""
    data = plain(data)
    return {key: _digest(data[key]) for key in data} if isinstance(data, dict) else {"all": _digest(data)}


def hash_table(table: pa.Table) -> dict[str, str]:
    """A hash for each column, of its type and exact values, and one for the order of columns; not of any metadata."""
    names = {}
    for name in table.schema.names:
        *path, last = name.split(".")
        if last not in DROPPED and "_target_" not in name:
            names[".".join([*path, RENAMED.get(last, last)])] = name
    hashes = {new: _digest([str(table[old].type), plain(table[old].to_pylist())]) for new, old in names.items()}
    return {**hashes, "(columns)": _digest(list(names))}


def hash_file(path: Path) -> dict[str, str]:
    """Hashes of a JSON file, zipped or not, or of a Parquet file."""
    if path.suffix == ".parquet":
        return hash_table(pq.read_table(path))
    raw = path.read_bytes()
    return hash_json(json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw))


# --- running ---------------------------------------------------------------------------------------------------------


def run_case(case: Case) -> tuple[str, Hashes, str, float]:
    """A case's name, its hashes, what is wrong with it ("" if nothing), and its seconds."""
    started = time.perf_counter()
    try:
        hashes, mistake = _run_command(case) if case.command else _run_library(case)
    except Exception as error:
        hashes, mistake = {}, f"{type(error).__name__}: {error}"
    return case.name, hashes, mistake, time.perf_counter() - started


def _run_library(case: Case) -> tuple[Hashes, str]:
    import confsim

    cfg = confsim.compose(list(case.words))
    trace = confsim.load_trace(cfg)
    result = confsim.simulate(cfg, trace)
    hashes = {
        "trace": hash_table(trace.table),
        "summary": hash_json(result.summary),
        "requests": hash_table(result.requests),
        "iterations": hash_table(result.iterations),
    }
    found: Any = result.summary
    for key in case.wants.split(".") if case.wants else ():
        found = found[key]
    return hashes, f"{case.wants} is 0" if case.wants and not found else ""


def _run_command(case: Case) -> tuple[Hashes, str]:
    folder = Path("outputs") / case.name
    key = "hydra.sweep.dir" if "-m" in case.words else "hydra.run.dir"
    words = [sys.executable, "-m", "confsim", case.command, *case.words, "quiet=true", f"{key}={folder}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    if done.returncode:
        return {}, f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    return {name: hash_file(folder / name) for name in case.files}, ""


def run_cases(cases: Sequence[Case], show_times: bool) -> tuple[dict[str, Hashes], dict[str, str]]:
    """Hashes of each case, and what is wrong with those that failed."""
    import confsim

    root = Path(str(confsim.__file__)).resolve().parents[1]
    print(f"confsim of {root}", file=sys.stderr)
    home = Path.cwd()
    results: dict[str, Hashes] = {}
    mistakes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name).resolve()
        write_traces(folder)
        os.environ["CONFSIM_CACHE"] = str(folder / "cache")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        os.chdir(folder)
        try:
            with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork")) as pool:
                for case, hashes, mistake, seconds in pool.map(run_case, cases):
                    results[case] = hashes
                    if mistake:
                        mistakes[case] = mistake
                    if show_times:
                        print(f"{seconds:6.2f} s  {case}", file=sys.stderr)
        finally:
            os.chdir(home)
    return results, mistakes


def chosen(names: Sequence[str], pattern: str | None) -> list[str]:
    """Names that a pattern such as 'conflux-*' fits, or that contain it."""
    return [n for n in names if pattern is None or pattern in n or fnmatch.fnmatchcase(n, pattern)]


def differences(old: Hashes, new: Hashes) -> str:
    """The files that differ, with the entries or columns that do."""
    parts = []
    for file in sorted({*old, *new}):
        before, after = old.get(file, {}), new.get(file, {})
        keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
        if keys:
            more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
            parts.append(f"{file} ({', '.join(keys[:6])}{more})")
    return "; ".join(parts)


def record(path: Path, results: dict[str, Hashes], mistakes: dict[str, str]) -> int:
    """Write the file, unless a case failed."""
    for name, mistake in mistakes.items():
        print(f"{name}: {mistake}")
    if mistakes:
        print(f"{len(mistakes)} of {len(results)} cases failed, nothing written")
        return 1
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(results)} cases in {path}")
    return 0


def compare(expected: dict[str, Hashes], results: dict[str, Hashes], mistakes: dict[str, str]) -> int:
    """Print what differs; cases that only one side has differ too."""
    names = sorted({*expected, *results})
    same = 0
    for name in names:
        if name not in expected or name not in results:
            print(f"{name}: only in the {'file' if name in expected else 'script'}")
            continue
        text = mistakes.get(name) or differences(expected[name], results[name])
        same += not text
        if text:
            print(f"{name}: {text}")
    print(f"{same} of {len(names)} the same")
    return 0 if same == len(names) and names else 1


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Record the hashes of small simulations, or compare with them.")
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name fits, such as 'conflux-*', or contains it")
    parser.add_argument("--tree", type=Path, help="the checkout to run (default: the confsim that Python finds)")
    parser.add_argument("--times", action="store_true", help="show the seconds of each case")
    options = parser.parse_args()
    if options.tree:
        sys.path.insert(0, str(options.tree.resolve()))
    cases = {case.name: case for case in all_cases()}
    expected: dict[str, Hashes] = {}
    if options.action == "compare":
        written: dict[str, Hashes] = json.loads(options.file.read_text(encoding="utf-8"))
        expected = {name: written[name] for name in chosen(list(written), options.only)}
    results, mistakes = run_cases([cases[name] for name in chosen(list(cases), options.only)], options.times)
    if options.action == "record":
        return record(options.file, results, mistakes)
    return compare(expected, results, mistakes)


if __name__ == "__main__":
    raise SystemExit(main())
