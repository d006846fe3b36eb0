"""A disk cache of work that runs share: parsed traces, probes of a goodput search.

Entries are named by a hash of everything that they depend on, code included, and never change; so nothing has to be
invalidated. Any number of processes may use it at once: an entry appears whole or not at all, and while one process
makes it the others that want it wait. A cache that cannot be written costs time, never a result.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import pyarrow as pa

from confsim.setup.provenance import digest, file_digest
from confsim.setup.registry import foreign_modules
from traces.files import locked, write_whole
from traces.source import found
from traces.trace import SCHEMA, Trace

ROOT_ENV = "CONFSIM_CACHE"
FORMAT = 1  # of the entries; a change makes old ones unreachable
LIMIT_BYTES = 4 << 30  # entries that were used longest ago go first
PRUNE_EVERY = 64  # entries written by a process between two looks at the size
DAY_S = 86_400
META = b"confsim"

T = TypeVar("T")
Tree = Mapping[str, Any]


def cache_root() -> Path:
    """Where entries are kept: `store` under $CONFSIM_CACHE, or under the user's cache directory."""
    given = os.environ.get(ROOT_ENV)
    return (Path(given).expanduser() if given else platformdirs.user_cache_path("confsim")) / "store"


# --- what entries depend on ------------------------------------------------------------------------------------------


@cache
def code_digest(*modules: str) -> str:
    """SHA-256 of the Python sources of packages and modules, by their import names; of those that exist."""
    sources: list[tuple[str, str]] = []
    for name in modules:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        for folder in map(Path, folders):
            sources += [(f"{name}/{p.relative_to(folder)}", file_digest(p)) for p in sorted(folder.rglob("*.py"))]
        if not folders and spec is not None and spec.origin and Path(spec.origin).is_file():
            sources.append((name, file_digest(Path(spec.origin))))
    return digest(sources)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf; a list is a leaf."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def named_files(tree: Tree) -> dict[str, str]:
    """SHA-256 of each file (of a folder: of its `config.json`) that a configuration names, by key."""
    digests = {}
    for key, value in leaves(tree):
        if isinstance(value, str) and value and "\0" not in value and not key.endswith("_target_"):
            with suppress(OSError, RuntimeError):  # no such user, a name too long: not a file
                path = found(Path(value).expanduser())
                path = path / "config.json" if path.is_dir() else path
                if path.is_file():
                    digests[key] = _digest_now(path)
    return digests


def _digest_now(path: Path) -> str:
    stat = path.stat()
    return _digest_at(str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ino)


@cache
def _digest_at(path: str, size: int, mtime_ns: int, inode: int) -> str:
    return file_digest(Path(path))


# --- the store -------------------------------------------------------------------------------------------------------


class Store:
    """Entries of several kinds under one folder, at most `limit_bytes` in all."""

    def __init__(self, root: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.root = root or cache_root()
        self.limit_bytes = limit_bytes
        self._written = 0

    def fetch(
        self,
        kind: str,
        key: str,
        make: Callable[[], T],
        read: Callable[[Path], T],
        write: Callable[[Path, T], None],
    ) -> T:
        """The entry, made and written if there is none. `read` raises for a damaged one, which is made again.

        Raises:
            Exception: whatever `make` raises; nothing is written then.
        """
        path = self._path(kind, key)
        found = self._read(path, read)
        if found is not None:
            return found[0]
        with self._alone(path):
            found = self._read(path, read)  # made by another process meanwhile
            if found is not None:
                return found[0]
            value = make()
            self._write(path, value, write)
        return value

    def find(self, kind: str, key: str, read: Callable[[Path], T]) -> T | None:
        """The entry, or None."""
        found = self._read(self._path(kind, key), read)
        return None if found is None else found[0]

    def put(self, kind: str, key: str, value: T, write: Callable[[Path, T], None]) -> None:
        """Write an entry unless it is there."""
        path = self._path(kind, key)
        if not path.is_file():
            self._write(path, value, write)

    def _path(self, kind: str, key: str) -> Path:
        return self.root / kind / key[:2] / key

    def _read(self, path: Path, read: Callable[[Path], T]) -> tuple[T] | None:
        if not path.is_file():
            return None
        try:
            value = read(path)
        except Exception:  # damaged by whatever cut it short
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # pruning takes what was used longest ago
        return (value,)

    def _write(self, path: Path, value: T, write: Callable[[Path, T], None]) -> None:
        try:
            write_whole(path, lambda draft: write(draft, value))
        except OSError:  # read-only, full: go on without
            return
        self._written += 1
        if self._written % PRUNE_EVERY == 1:
            self.prune()

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """Hold the entry's lock; where there can be none, go on without one (work may be done twice)."""
        with ExitStack() as stack:
            with suppress(OSError):
                stack.enter_context(locked(path.with_name(f"{path.name}.lock")))
            yield

    def prune(self) -> int:
        """Remove what was used longest ago until the rest fits, and what dead processes left; returns bytes kept."""
        entries = []
        now = time.time()
        for path in self.root.glob("*/*/*"):
            with suppress(OSError):
                stat = path.stat()
                if path.name.startswith(".") or path.name.endswith(".lock"):
                    if now - stat.st_mtime > DAY_S:
                        path.unlink()
                else:
                    entries.append((stat.st_mtime, stat.st_size, path))
        kept = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if kept <= self.limit_bytes:
                break
            with suppress(OSError):
                path.unlink()
                kept -= size
        return kept


# --- traces ----------------------------------------------------------------------------------------------------------


def cached_trace(
    config: Tree, seed: int, block_ids: bool, load: Callable[[], Trace], store: Store | None = None
) -> Trace:
    """What `load` returns for a `trace` configuration, parsed once for a content of its files.

    The table of a cached trace is mapped from disk, so that the processes of a sweep share its memory.
    """
    key = digest(
        [
            FORMAT,
            pa.__version__,
            dict(config),
            seed,
            block_ids,
            named_files(config),
            _sources({"trace": config}, "traces"),
        ]
    )
    return (store or Store()).fetch("traces", key, load, _read_trace, _write_trace)


def _sources(config: Tree, *packages: str) -> str:
    """Code that an object of this configuration runs: the packages, and the modules of foreign `_target_`s."""
    own = {name.split(".")[0] for name in packages}
    foreign = {name for name in foreign_modules(config) if name.split(".")[0] not in own}
    return code_digest(*packages, *sorted(foreign))


def _write_trace(path: Path, trace: Trace) -> None:
    meta = json.dumps({"block_tokens": trace.block_tokens, "provenance": trace.provenance}, allow_nan=False)
    table = trace.table.replace_schema_metadata({META: meta.encode()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _read_trace(path: Path) -> Trace:
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    meta = json.loads(table.schema.metadata[META])
    return Trace(table.replace_schema_metadata(None).cast(SCHEMA), meta["block_tokens"], meta["provenance"])


# --- plain data and tables -------------------------------------------------------------------------------------------


def cached_json(kind: str, parts: Any, make: Callable[[], Any], store: Store | None = None) -> Any:
    """What `make` returns, plain JSON data, once for `parts` (plain data too) on this disk."""
    return (store or Store()).fetch(kind, digest([FORMAT, parts]), make, _read_json, _write_json)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
