"""Public traces: where they are, what they must hold, and how they get into the user's cache."""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from traces.errors import InputError
from traces.files import locked

CACHE_ENV = "CONFSIM_CACHE"
URL_ENV = "CONFSIM_TRACE_URL"
MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces"
# Git LFS keeps this one: only the media host serves the data, `raw` serves a pointer.
BAILIAN = "https://media.githubusercontent.com/media/alibaba-edu/qwen-bailian-usagetraces-anon/main"
CHUNK = 1 << 16
ATTEMPTS = 4

ByteProgress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says


@dataclass(frozen=True)
class PublicTrace:
    """A published trace: `records` it must have, and the SHA-256 that its file had when it was recorded here."""

    name: str
    format: str
    base_url: str
    filename: str
    records: int
    sha256: str
    about: str


CATALOG = {
    entry.name: entry
    for entry in (
        PublicTrace(
            "toolagent",
            "mooncake",
            MOONCAKE,
            "toolagent_trace.jsonl",
            23_608,
            "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
            "Mooncake FAST'25, tool and agent traffic, one hour (Apache-2.0)",
        ),
        PublicTrace(
            "conversation",
            "mooncake",
            MOONCAKE,
            "conversation_trace.jsonl",
            12_031,
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            "Mooncake FAST'25, conversations, 59 minutes (Apache-2.0)",
        ),
        PublicTrace(
            "synthetic",
            "mooncake",
            MOONCAKE,
            "synthetic_trace.jsonl",
            3_993,
            "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
            "Mooncake FAST'25, made from public data sets, 17 minutes (Apache-2.0)",
        ),
        PublicTrace(
            "qwen_a",
            "bailian",
            BAILIAN,
            "qwen_traceA_blksz_16.jsonl",
            43_058,
            "07cedc9ed8aff301994ac68ed4aede8123b7603673575eeba9dd677de663db17",
            "Qwen-Bailian trace A, chat, two hours (Apache-2.0)",
        ),
    )
}


@dataclass(frozen=True)
class Fetched:
    """A trace in the cache. `known` says that its checksum is the recorded one; `cached` that it was there."""

    trace: PublicTrace
    path: Path
    records: int
    sha256: str
    known: bool
    cached: bool

    @property
    def usage(self) -> str:
        """How to replay it."""
        return f"confsim simulate trace={self.trace.format} trace.path={self.path}"


def cache_directory() -> Path:
    """Where fetched traces are kept: `traces` under $CONFSIM_CACHE, or under the user's cache directory."""
    root = os.environ.get(CACHE_ENV)
    return (Path(root).expanduser() if root else platformdirs.user_cache_path("confsim")) / "traces"


def fetch(
    name: str,
    directory: Path | None = None,
    base_url: str | None = None,
    progress: ByteProgress | None = None,
    retry_wait_s: float = 1.0,
) -> Fetched:
    """Bring a public trace into `directory` (default: the user's cache) and check its record count.

    The file appears under its name only when it is complete. A download that was interrupted leaves a `.part` file
    and is resumed, in this call or the next. `base_url` (or $CONFSIM_TRACE_URL) replaces the public address.
    Raises `InputError` for an unknown name, an address that does not answer, a wrong record count, a full disk.
    """
    if name not in CATALOG:
        raise InputError(f"fetch {name}: unknown trace, use one of {', '.join(CATALOG)}")
    entry = CATALOG[name]
    folder = directory or cache_directory()
    target = folder / entry.filename
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            return _checked(entry, target, cached=True)
        url = f"{(base_url or os.environ.get(URL_ENV) or entry.base_url).rstrip('/')}/{entry.filename}"
        part = target.with_name(f"{entry.filename}.part")
        with _locked(part) as file:
            resumed = _download(url, file, progress, retry_wait_s)
            if resumed and _digest(part) != entry.sha256:  # the two halves may be of different files
                file.truncate(0)
                _download(url, file, progress, retry_wait_s)
            fetched = _checked(entry, part, cached=False)
            part.replace(target)
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror or error}; free or choose another place with ${CACHE_ENV}"
        ) from error
    return Fetched(entry, target, fetched.records, fetched.sha256, fetched.known, cached=False)


def fetch_with_bar(name: str, base_url: str | None = None, console: Console | None = None) -> Fetched:
    """`fetch` into the user's cache with a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=console or Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        return fetch(name, None, base_url, lambda done, total: bar.update(task, completed=done, total=total))


def count_records(path: Path) -> int:
    """Lines that are not blank."""
    with path.open("rb") as file:
        return sum(1 for line in file if not line.isspace())


def _checked(entry: PublicTrace, path: Path, cached: bool) -> Fetched:
    """Raises `InputError`, and removes the file, when it does not have the known number of records."""
    records = count_records(path)
    if records != entry.records:
        with path.open("rb") as file:
            head = file.read(64)
        path.unlink()
        pointer = " (the address serves a Git LFS pointer)" if head.startswith(b"version https://git-lfs") else ""
        raise InputError(
            f"fetch {entry.name}: {records:,} records where {entry.records:,} are known{pointer}; "
            "the file was removed, fetch it again or check the address"
        )
    digest = _digest(path)
    return Fetched(entry, path, records, digest, digest == entry.sha256, cached)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    """The part file, open for appending, locked against a second download of the same trace."""
    try:
        with locked(part, wait=False) as file:
            try:
                yield file
            finally:
                if part.exists() and part.stat().st_size == 0:
                    part.unlink()
    except BlockingIOError as error:
        raise InputError(f"{part}: another download of this trace is running; wait for it") from error


def _download(url: str, file: BinaryIO, progress: ByteProgress | None, wait_s: float) -> bool:
    """Append what is missing, in several attempts; whether bytes of an earlier attempt or call were kept."""
    resumed = False
    for attempt in range(ATTEMPTS):
        before = file.seek(0, os.SEEK_END)
        resumed = resumed or before > 0
        try:
            _attempt(url, file, progress)
            return resumed
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == ATTEMPTS - 1:
                raise InputError(
                    f"{url}: HTTP {error.code} {error.reason}; check the address, or set ${URL_ENV} to a mirror"
                ) from error
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            if attempt == ATTEMPTS - 1:
                size, reason = file.seek(0, os.SEEK_END), getattr(error, "reason", error)
                raise InputError(
                    f"{url}: {reason}; {size:,} bytes are kept, run the command again to resume"
                ) from error
        time.sleep(wait_s * attempt)
    return resumed


def _attempt(url: str, file: BinaryIO, progress: ByteProgress | None) -> None:
    """One request for the rest of the file. Raises `ConnectionError` when the connection ends early."""
    done = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "confsim", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        if _total(error.headers) == done:  # the part is the whole file
            return
        file.truncate(0)
        raise ConnectionError("the part on disk did not match the server's file") from error
    except ValueError as error:
        raise InputError(f"{url}: not an address ({error})") from error
    with response:
        if done and not (response.status == 206 and _start(response.headers) == done):
            file.truncate(0)  # the server sends the whole file
            done = 0
        _copy(response, file, done, progress)


def _copy(response: Any, file: BinaryIO, done: int, progress: ByteProgress | None) -> None:
    length = response.headers.get("Content-Length")
    total = done + int(length) if length is not None else None
    while chunk := response.read(CHUNK):
        file.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, total)
    file.flush()
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")


def _start(headers: Any) -> int:
    """First byte of a `Content-Range: bytes 5-9/10`, or -1."""
    value = str(headers.get("Content-Range", ""))
    digits = value.removeprefix("bytes ").split("-")[0]
    return int(digits) if digits.isdigit() else -1


def _total(headers: Any) -> int:
    """Size of the whole file in a `Content-Range: bytes */10`, or -1."""
    digits = str(headers.get("Content-Range", "")).rpartition("/")[2]
    return int(digits) if digits.isdigit() else -1
