"""Entry of a rank's process: `python -m executor.worker FD`; everything else comes through that socket."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path


def main() -> int:
    """Read the configuration from the socket, serve, and exit."""
    parent = os.getppid()
    connection = Connection(int(sys.argv[1]))
    config = connection.recv()
    folder = str(Path(config.store).parent)
    threading.Thread(target=_watch, args=(parent, folder), daemon=True).start()
    from executor.serve import connect_processes, failure, process_device, serve

    try:
        device = process_device(config.device, config.rank)
    except Exception as error:
        connection.send(failure(config.rank, -1, error))
        return 1
    try:
        good = serve(_Line(connection, folder), config, lambda: connect_processes(config), device)
    except (EOFError, ConnectionError):
        shutil.rmtree(folder, ignore_errors=True)  # the driver is gone and cannot tidy up
        good = False
    sys.stderr.flush()
    # Communicators of a broken team cannot be taken down in order: leave without ceremony.
    os._exit(0 if good else 1)


class _Line:
    """A socket as a rank's channel."""

    def __init__(self, connection: Connection, folder: str) -> None:
        self._connection = connection
        self._folder = folder

    def receive(self):  # type: ignore[no-untyped-def]
        """The next message."""
        return self._connection.recv()

    def send(self, message: object) -> None:
        """Answer; a driver that is gone needs none, and cannot tidy up."""
        try:
            self._connection.send(message)
        except ConnectionError:
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)


def _watch(parent: int, folder: str) -> None:
    # A rank may be deep inside a collective when its driver is killed: nothing else would end it, or tidy up.
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
