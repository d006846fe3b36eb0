"""Entry of a rank's process: `python -m executor.worker FD`; everything else comes through that socket."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor.collectives import Groups
    from executor.message import RankConfig


def main() -> int:
    """Read the configuration from the socket, serve, and exit."""
    parent = os.getppid()
    line = Connection(int(sys.argv[1]))
    config: RankConfig = line.recv()
    folder = str(Path(config.store).parent)
    threading.Thread(target=_watch, args=(parent, folder), daemon=True).start()
    from executor.serve import failure, process_device, serve

    try:
        device = process_device(config.device, config.rank)
    except Exception as error:
        line.send(failure(config.rank, -1, error))
        return 1
    try:
        good = serve(line, config, lambda: _connect(config), device)
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)  # the driver is gone and cannot tidy up
        good = False
    sys.stderr.flush()
    # Communicators of a broken team cannot be taken down in order: leave without ceremony.
    os._exit(0 if good else 1)


def _connect(config: RankConfig) -> Groups:
    from torch.distributed import FileStore

    from executor.cores import keep_to_cores
    from executor.serve import connect

    ranks = config.layout.ranks
    if config.device.kind == "cpu":
        keep_to_cores(config.rank, ranks, config.device.torch_threads, config.store)
    return connect(config, FileStore(config.store, ranks))


def _watch(parent: int, folder: str) -> None:
    # A rank may be deep inside a collective when its driver is killed: nothing else would end it, or tidy up.
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
