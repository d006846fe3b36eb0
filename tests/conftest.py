"""Fixtures that every room's tests share."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # Started in the background of a script: what tests start would inherit it and could not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)


ENV = "CONFSIM_SHARED"


def _shared_directory() -> Path:
    given = os.environ.get(ENV)
    return Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "traces"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use the real traces carry the marker `shared`."""
    for item in items:
        if "shared_traces" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONFSIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Directory of the real traces (conversation_trace.jsonl, synthetic_trace.jsonl), or skip."""
    directory = _shared_directory()
    if not (directory / "conversation_trace.jsonl").is_file():
        pytest.skip(f"no real traces at {directory}; set {ENV} to their directory")
    return directory
