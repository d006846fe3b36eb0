"""Fetching public traces from a local server that behaves well, and badly."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from traces import catalog
from traces.catalog import CATALOG, cache_directory, count_records, fetch, fetch_with_bar
from traces.errors import InputError

LINE = b'{"timestamp": 0, "input_length": 20, "output_length": 8, "hash_ids": [0]}\n'
BODY = LINE * 3993
FILE = "synthetic_trace.jsonl"


class Server(ThreadingHTTPServer):
    """Serves `body`; each request takes the next entry of `plan` (default: behave)."""

    body = BODY
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan: list[str] = []
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests quiet."""

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        behaviour = self.server.plan.pop(0) if self.server.plan else "well"
        if behaviour.isdigit():
            self.send_error(int(behaviour))
            return
        body, start = self.server.body, 0
        if wanted and behaviour != "no_ranges":
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        rest = body[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: len(rest) // 2] if behaviour == "cut" else rest)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    running = Server()
    known = replace(CATALOG["synthetic"], sha256=hashlib.sha256(BODY).hexdigest())
    monkeypatch.setitem(CATALOG, "synthetic", known)
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()


def get(server: Server, folder: Path) -> catalog.Fetched:
    return fetch("synthetic", folder, server.url, retry_wait_s=0.0)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_fetch_checks_counts_and_caches(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    first = fetch("synthetic", tmp_path, server.url, lambda done, total: seen.append((done, total)))
    assert (first.records, first.known, first.cached) == (3993, True, False)
    assert first.path.read_bytes() == BODY
    assert seen[-1] == (len(BODY), len(BODY))
    assert first.usage == f"confsim simulate trace=mooncake trace.path={tmp_path / FILE}"
    again = get(server, tmp_path)
    assert (again.cached, len(server.ranges)) == (True, 1)
    assert names(tmp_path) == [FILE]


def test_an_interrupted_download_resumes_within_the_call(server: Server, tmp_path: Path) -> None:
    server.plan = ["cut", "cut", "well"]
    assert get(server, tmp_path).known
    assert server.ranges == [None, f"bytes={len(BODY) // 2}-", f"bytes={len(BODY) // 2 + (len(BODY) + 1) // 4}-"]
    assert (tmp_path / FILE).read_bytes() == BODY
    assert names(tmp_path) == [FILE]


def test_a_truncated_download_is_kept_and_resumed_by_the_next_call(server: Server, tmp_path: Path) -> None:
    server.plan = ["cut"] * catalog.ATTEMPTS
    with pytest.raises(InputError, match="bytes are kept, run the command again to resume"):
        get(server, tmp_path)
    assert names(tmp_path) == [f"{FILE}.part"]
    assert get(server, tmp_path).known
    assert names(tmp_path) == [FILE]


def test_a_killed_download_leaves_a_part_that_is_resumed(server: Server, tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done > len(BODY) // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("synthetic", tmp_path, server.url, interrupt)
    assert names(tmp_path) == [f"{FILE}.part"]
    assert get(server, tmp_path).path.read_bytes() == BODY
    assert server.ranges[-1] is not None


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.part").write_bytes(BODY[:1000])
    server.plan = ["no_ranges"]
    assert get(server, tmp_path).path.read_bytes() == BODY


def test_a_complete_part_is_taken_as_it_is(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.part").write_bytes(BODY)
    assert get(server, tmp_path).known


def test_a_part_of_another_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.part").write_bytes(b"x" * 1000 + b"\n")
    assert get(server, tmp_path).path.read_bytes() == BODY
    (tmp_path / FILE).unlink()
    (tmp_path / f"{FILE}.part").write_bytes(b"x" * (len(BODY) + 5))
    assert get(server, tmp_path).path.read_bytes() == BODY


def test_wrong_count_is_refused_and_removed(server: Server, tmp_path: Path) -> None:
    server.body = LINE * 3000
    with pytest.raises(InputError, match="3,000 records where 3,993 are known"):
        get(server, tmp_path)
    assert names(tmp_path) == []
    server.body = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    with pytest.raises(InputError, match="Git LFS pointer"):
        get(server, tmp_path)


def test_another_checksum_with_the_right_count_is_told(server: Server, tmp_path: Path) -> None:
    server.body = LINE.replace(b"20", b"21") * 3993
    fetched = get(server, tmp_path)
    assert (fetched.records, fetched.known) == (3993, False)


def test_http_errors(server: Server, tmp_path: Path) -> None:
    server.plan = ["404"]
    with pytest.raises(InputError, match="HTTP 404"):
        get(server, tmp_path)
    assert len(server.ranges) == 1
    assert names(tmp_path) == []
    server.plan = ["503", "well"]
    assert get(server, tmp_path).known


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run the command again to resume"):
        fetch("synthetic", tmp_path, "http://127.0.0.1:9", retry_wait_s=0.0)
    with pytest.raises(InputError, match="not an address"):
        fetch("synthetic", tmp_path, "nonsense", retry_wait_s=0.0)


def test_X1_unknown_name_and_unusable_cache(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="toolagent, conversation, synthetic, qwen_a"):
        fetch("toolagents", tmp_path)
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(InputError, match="CONFSIM_CACHE"):
        fetch("synthetic", blocked / "traces", "http://127.0.0.1:9")


def test_two_downloads_of_one_trace_exclude_each_other(server: Server, tmp_path: Path) -> None:
    with catalog._locked(tmp_path / f"{FILE}.part"), pytest.raises(InputError, match="another download"):
        get(server, tmp_path)


def test_cache_directory_and_bar(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalog.CACHE_ENV, str(tmp_path))
    monkeypatch.setenv(catalog.URL_ENV, server.url)
    assert cache_directory() == tmp_path / "traces"
    assert fetch_with_bar("synthetic").path == tmp_path / "traces" / FILE
    monkeypatch.delenv(catalog.CACHE_ENV)
    assert cache_directory().parts[-2:] == ("confsim", "traces")


def test_the_catalog_knows_the_real_files(shared_traces: Path) -> None:
    for name in ("conversation", "synthetic"):
        path = shared_traces / CATALOG[name].filename
        assert count_records(path) == CATALOG[name].records
        assert hashlib.sha256(path.read_bytes()).hexdigest() == CATALOG[name].sha256
