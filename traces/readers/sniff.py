"""What a file is, judged by its first bytes, so that a wrong format is refused by name."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from traces.errors import InputError

HEAD_BYTES = 1 << 16
FIRST_LINE_BYTES = 1 << 24
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
FORMATS = ("mooncake", "bailian", "azure", "parquet")  # that are told apart here
BAILIAN_FIELDS = ("chat_id", "parent_chat_id", "turn")
JSON_FIELDS = ("timestamp", "input_length", "output_length")
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Sniffed:
    """`format` that the content has (None: not known) and the `evidence` for it."""

    format: str | None
    evidence: str


def is_gzip(path: Path) -> bool:
    """Whether the file opens with the gzip magic number, whatever its name."""
    with path.open("rb") as file:
        return file.read(2) == GZIP_MAGIC


def require_file(path: Path) -> None:
    """Raise `InputError` unless `path` is a readable file with something in it."""
    if path.is_dir():
        raise InputError(f"{path}: is a directory, trace.path takes one file")
    if not path.exists():
        raise InputError(f"{path}: no such file; check trace.path, or download a public trace with `confsim fetch`")
    if not path.is_file():
        raise InputError(f"{path}: not a regular file, trace.path takes one file")
    try:
        with path.open("rb") as file:
            head = file.read(1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not head:
        raise InputError(f"{path}: the file is empty, a trace needs at least one request")


def sniff(path: Path) -> Sniffed:
    """Tell the format of a file from its first bytes and first line.

    Raises `InputError` for what cannot be a trace: missing, empty, binary, damaged, a Git LFS pointer.
    """
    require_file(path)
    head, first = _head(path)
    if head.startswith(PARQUET_MAGIC):
        return Sniffed("parquet", "it starts with the Parquet magic number")
    text = _text(path, head, first)
    if not text:
        raise InputError(f"{path}: the file is empty, a trace needs at least one request")
    if text.startswith("version https://git-lfs"):
        raise InputError(f"{path}: a Git LFS pointer, not the data; download the file itself (`git lfs pull`)")
    if text.startswith("{"):
        return _sniff_json(text)
    names = [name.strip().strip('"') for name in text.split(",")]
    found = [name for name in AZURE_FIELDS if name in names]
    if found:
        return Sniffed("azure", f"its header has {', '.join(found)}")
    return Sniffed(None, "")


def require_format(path: Path, expected: str) -> None:
    """Raise `InputError` when the content is that of another format than `expected`.

    What a format looks like that is not told apart here (a user's own) is for its reader to say.
    """
    found = sniff(path)
    if expected in FORMATS and found.format not in (None, expected):
        article = "an" if str(found.format)[0] in "aeiou" else "a"
        text = f"{path}: {article} {found.format} file, not {expected} ({found.evidence})"
        raise InputError(f"{text}; use trace={found.format}")


def _head(path: Path) -> tuple[bytes, bytes]:
    """First bytes, and the first line that is not blank, both decompressed."""
    try:
        with gzip.open(path, "rb") if is_gzip(path) else path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            file.seek(0)
            line = b"\n"
            while line and not line.strip():
                line = file.readline(FIRST_LINE_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip data ({error}); download or compress it again") from error
    return head, line


def _text(path: Path, head: bytes, first: bytes) -> str:
    if b"\0" in head:
        raise InputError(f"{path}: a binary file, not a trace (it has NUL bytes)")
    try:
        return first.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a binary file, not a trace (it is not UTF-8 text)") from error


def _sniff_json(line: str) -> Sniffed:
    try:
        fields = list(json.loads(line))
    except ValueError:
        return Sniffed(None, "")
    bailian = [name for name in BAILIAN_FIELDS if name in fields]
    if bailian:
        return Sniffed("bailian", f"its rows have {', '.join(bailian)}")
    if all(name in fields for name in JSON_FIELDS):
        return Sniffed("mooncake", f"its rows have {', '.join(JSON_FIELDS)} and no {BAILIAN_FIELDS[0]}")
    return Sniffed(None, "")
