"""Files that are whole or absent, whatever ends the process that writes them, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NAME_LETTERS = 40  # of a file's name that its draft carries; file systems limit the length of names

FULL = (errno.ENOSPC, errno.EDQUOT)

Content = str | bytes | Callable[[Path], object]


def write_whole(path: Path, content: Content, durable: bool = False) -> Path:
    """Put a file in place in one step and return its path: a reader sees what was there before or all of the new.

    `content` is text (written as UTF-8), bytes, or a function that writes a file under the path that it is given.
    Missing folders are made. A `durable` file is on disk before it has its name, which a power failure may ask for.

    Raises:
        OSError: where it cannot be written; nothing is left over then.
        Exception: whatever `content` raises; nothing is left over then either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name[:NAME_LETTERS]}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        _fill(draft, content)
        if durable:
            _sync(draft)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    return path


def _fill(draft: Path, content: Content) -> None:
    if isinstance(content, str):
        draft.write_text(content, encoding="utf-8")
    elif isinstance(content, bytes):
        draft.write_bytes(content)
    else:
        content(draft)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[BinaryIO]:
    """Keep other processes that lock the same file out; gives the file, made if need be and opened for appending.

    The lock goes with the process that holds it, however that ends. A file system without locks gives none.

    Raises:
        BlockingIOError: if another process holds it and this one does not `wait`.
        OSError: if the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield file


def is_full(error: BaseException | None) -> bool:
    """Whether an exception, or one that led to it, comes from a full disk or quota."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
