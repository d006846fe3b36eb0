"""A trace that misbehaves as its `mode` says, for sweeps that must survive it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confsim.errors import InputError
from traces.synthesis import FixedTrace
from traces.trace import Trace


@dataclass(frozen=True)
class Trouble(FixedTrace):
    """`mode`: ok, mistake, defect, exit, exit_process, kill, kill_once or full, after `seconds`."""

    mode: str = "ok"
    seconds: float = 0.0
    marker: str = ""
    number: int = 0

    def load(self, *arguments: Any, **options: Any) -> Trace:
        time.sleep(self.seconds)
        if self.mode == "mistake":
            raise InputError("trace.mode=mistake: this cannot be, use ok")
        if self.mode == "defect":
            raise ZeroDivisionError("a defect")
        if self.mode == "exit":
            sys.exit(0)
        if self.mode == "exit_process":
            os._exit(0)
        if self.mode == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.mode == "kill" or (self.mode == "kill_once" and not Path(self.marker).exists()):
            if self.marker:
                Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(*arguments, **options)
