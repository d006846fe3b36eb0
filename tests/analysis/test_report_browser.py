"""The report in a real browser, over the DevTools protocol: figures are drawn, and nothing goes wrong."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from factory import make_result
from test_report import goodput_content, write_goodput

from analysis.pages.report import write_report

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
    pytest.mark.xdist_group("browser"),
]


class DevTools:
    """As much of a WebSocket client as the DevTools protocol needs."""

    def __init__(self, url: str) -> None:
        host, port, path = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", url).groups()  # type: ignore[union-attr]
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        self._file = self._socket.makefile("rb")
        while self._file.readline().strip():
            pass
        self._count = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        self._send(json.dumps({"id": self._count, "method": method, "params": params}).encode())
        while True:
            message = self._receive()
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _send(self, payload: bytes) -> None:
        size = len(payload)
        head = struct.pack("!BB", 0x81, 0x80 | (size if size < 126 else 126))
        if size >= 126:
            head += struct.pack("!H", size)
        mask = os.urandom(4)
        self._socket.sendall(head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload)))

    def _receive(self) -> dict[str, Any]:
        data = b""
        while True:
            first, size = struct.unpack("!BB", self._file.read(2))
            if size == 126:
                (size,) = struct.unpack("!H", self._file.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._file.read(8))
            data += self._file.read(size)
            if first & 0x80:
                return json.loads(data)


@contextmanager
def browser(folder: Path) -> Iterator[DevTools]:
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    command = [str(CHROMIUM), *arguments, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        port = _port(folder / "profile" / "DevToolsActivePort", process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        tools = DevTools(pages[0]["webSocketDebuggerUrl"])
        yield tools
        tools.close()
    finally:
        process.terminate()
        process.wait(30)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.skip("Chromium does not start here")
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    pytest.skip("Chromium does not answer here")


def open_page(tools: DevTools, page: Path) -> None:
    for domain in ("Runtime", "Log", "Page", "Network"):
        tools.call(f"{domain}.enable")
    tools.call("Page.navigate", url=page.as_uri())
    waiting = "document.readyState !== 'complete' || document.querySelector('.plot:not([data-drawn])') !== null"
    deadline = time.monotonic() + 60
    time.sleep(0.2)
    while tools.evaluate(f"location.protocol !== 'file:' || {waiting}"):
        assert time.monotonic() < deadline, "the figures were not drawn in a minute"
        time.sleep(0.1)


OUTSIDE = """[...document.querySelectorAll('.plot text')]
    .filter((text) => { const box = text.getBoundingClientRect(), own = text.closest('.plot').getBoundingClientRect();
        return box.width && (box.left < own.left - 1 || box.right > own.right + 1); })
    .map((text) => text.textContent)
    .concat(document.documentElement.scrollWidth > document.documentElement.clientWidth ? ['the page'] : [])"""


def _shown_toolbars(tools: DevTools) -> Any:
    """Opacities of the toolbars that are seen while the pointer is elsewhere."""
    bars = "[...document.querySelectorAll('.modebar')].map((bar) => getComputedStyle(bar).opacity)"
    assert tools.evaluate(f"{bars}.length") > 0
    return tools.evaluate(f"{bars}.filter((opacity) => opacity !== '0')")


def complaints(tools: DevTools) -> list[Any]:
    """Errors and warnings of the console, exceptions, and every request to somewhere else."""
    found: list[Any] = []
    for event in tools.events:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            found.append(params)
        if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            found.append(params)
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            found.append(params)
        if event.get("method") == "Network.requestWillBeSent" and params["request"]["url"].startswith("http"):
            found.append(params["request"]["url"])
    return found


def test_goodput_report_draws_every_figure(tmp_path: Path):
    folder = tmp_path / "search"
    content = goodput_content(conflux={"folder": "conflux"}, chunked_prefill={"folder": "chunked_prefill"})
    for scheme in content["schemes"]:
        make_result(scheme).write(folder / scheme)
    page = write_report([write_goodput(folder, content)], tmp_path / "report.html")
    with browser(tmp_path) as tools:
        open_page(tools, page)
        drawn = tools.evaluate("document.querySelectorAll('.plot .main-svg').length > 0")
        plots = tools.evaluate("document.querySelectorAll('.plot').length")
        lines = tools.evaluate("document.querySelectorAll('.plot .scatterlayer .trace').length")
        bars = tools.evaluate("document.querySelectorAll('.plot .barlayer .point').length")
        axis = tools.evaluate("document.querySelector('.plot .g-ytitle').textContent")
        assert drawn and plots == 9
        assert bars == 2
        assert lines >= 2 + 2 + 3 * 2 + 2 * 4
        assert axis == "goodput, req/s"
        assert _shown_toolbars(tools) == []
        for width in (1400, 480):
            tools.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            deadline = time.monotonic() + 20  # figures are drawn again for the new width
            while found := tools.evaluate(OUTSIDE):
                assert time.monotonic() < deadline, f"clipped at {width} pixels: {found}"
                time.sleep(0.1)
        assert complaints(tools) == []


def test_report_follows_the_dark_theme_and_opens_folded_figures(tmp_path: Path):
    for number in range(5):
        make_result(rate=1.0 + number).write(tmp_path / "runs" / f"run{number}")
    page = write_report([tmp_path / "runs"], tmp_path / "report.html")
    folded = "document.querySelectorAll('details:not([open]) .plot').length"
    colour = "getComputedStyle(document.querySelector('.plot .g-ytitle text, .plot .ytitle')).fill"
    with browser(tmp_path) as tools:
        for domain in ("Runtime", "Log", "Page", "Network"):
            tools.call(f"{domain}.enable")
        tools.call("Page.navigate", url=page.as_uri())
        ready = "document.querySelectorAll('.plot[data-drawn]').length === document.querySelectorAll('.plot').length - "
        deadline = time.monotonic() + 60
        time.sleep(0.2)
        while not tools.evaluate(f"document.readyState === 'complete' && {ready}{folded}"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert tools.evaluate(folded) == 4
        light = tools.evaluate(colour)
        tools.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        deadline = time.monotonic() + 20
        while tools.evaluate(colour) == light:
            assert time.monotonic() < deadline, "the figures kept their light colours"
            time.sleep(0.1)
        tools.evaluate("document.querySelectorAll('details').forEach(box => { box.open = true; })")
        while tools.evaluate("document.querySelector('.plot:not([data-drawn])') !== null"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert complaints(tools) == []
