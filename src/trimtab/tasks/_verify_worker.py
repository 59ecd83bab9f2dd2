"""The child process that compares answers with math-verify's parser; it speaks JSON lines on its standard streams.

It runs alone so that an expression that never finishes, or eats the memory, can be killed. Nothing here may import
torch or transformers: a start takes well under a second and a restart must stay cheap.

Protocol: one line ``{"ready": true}`` (or ``{"error": text}``) at the start. Per request ``{"gold", "prediction",
"limit"}`` two lines: ``{"gold": bool}``, whether the gold could be parsed, then ``{"equal": bool}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import lru_cache
from typing import Any

from trimtab.tasks._answer_tree import Node, answers_equal, read_answer

MEMORY_LIMIT_BYTES = 4 * 1024**3
GRACE_SECONDS = 1.0


@lru_cache(maxsize=4096)
def parse(latex: str) -> Node | None:
    """Parse an answer once, however often it comes back; None when it is no mathematical expression."""
    try:
        return read_answer(latex)
    except (Exception, RecursionError):
        return None


def main() -> None:
    """Serve requests until standard input closes, which it does when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then decides about this process.
    _limit_memory()
    # Whatever a library prints goes to the null device: the pipe carries the protocol only.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    devnull = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open for the life of the process)
    os.dup2(devnull.fileno(), 1)
    sys.stdout = sys.stderr = devnull

    def send(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        send({"error": str(error)})
        return
    import faulthandler
    import logging

    logging.disable(logging.CRITICAL)
    parse(r"\frac{x}{2}+1")  # The parser builds its tables once, which is not to count against an answer's limit.
    send({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        # Should the parent die while an expression holds the interpreter's lock, this watchdog in C still ends the
        # process.
        faulthandler.dump_traceback_later(request["limit"] + GRACE_SECONDS, exit=True, file=devnull)
        gold = parse(request["gold"])
        send({"gold": gold is not None})
        prediction = None if gold is None else parse(request["prediction"])
        try:
            equal = gold is not None and prediction is not None and answers_equal(gold, prediction)
        except (Exception, RecursionError):
            equal = False
        send({"equal": bool(equal)})
        faulthandler.cancel_dump_traceback_later()


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Not a POSIX system.
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
