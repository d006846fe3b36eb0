"""Files that are whole or absent, and locks between processes."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from traces.files import locked, write_whole

HOLD = """
import sys, time
from pathlib import Path
from traces.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("content", ["naïve", b"\x00\xff", lambda draft: draft.write_bytes(b"made")])
def test_content_of_every_kind_replaces_what_was_there(tmp_path: Path, content: object) -> None:
    path = tmp_path / "new" / "file"
    for _ in range(2):
        assert write_whole(path, content, durable=True) == path  # type: ignore[arg-type]
    expected = content.encode() if isinstance(content, str) else content if isinstance(content, bytes) else b"made"
    assert path.read_bytes() == expected
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("a defect")])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = write_whole(tmp_path / "file", "old")

    def fail(draft: Path) -> None:
        draft.write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "file", "text")
    assert names(tmp_path) == ["file"]


def test_a_name_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    assert write_whole(tmp_path / ("ü" * 127), "text").read_text() == "text"


def test_readers_see_one_version_or_the_other(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "file", "a" * 200_000)
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for letter in "ab":
                write_whole(path, letter * 200_000)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    seen = {path.read_text() for _ in range(300)}
    over.set()
    for writer in writers:
        writer.join()
    assert seen <= {"a" * 200_000, "b" * 200_000}


def test_a_lock_goes_with_the_process_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen((sys.executable, "-c", HOLD, str(path)), stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError), locked(path, wait=False):
        pass
    began = time.monotonic()
    threading.Timer(0.3, holder.kill).start()
    with locked(path):
        assert time.monotonic() - began >= 0.25
    holder.communicate()
    with locked(path, wait=False) as file:
        file.write(b"mine")
    assert path.read_bytes() == b"mine"
