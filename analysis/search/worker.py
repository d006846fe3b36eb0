"""The other end of `search.pool`: reads cases, then jobs, from standard input and answers on standard output."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any, BinaryIO

from analysis.search.runner import Runner


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer every job with `(failed, outcome or exception)` until the parent closes the stream."""
    runner: Runner | None = None
    while True:
        try:
            message = pickle.load(requests)
        except EOFError:
            return
        if runner is None:
            runner = Runner(message)
            continue
        pickle.dump(_answer(runner, message), answers)
        answers.flush()


def _answer(runner: Runner, job: Any) -> tuple[bool, Any]:
    try:
        return False, runner(job)
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))  # a traceback itself cannot be pickled
        return True, error


def main() -> None:
    """Keep standard output for answers; whatever prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
