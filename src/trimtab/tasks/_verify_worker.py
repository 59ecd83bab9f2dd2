"""The child process that compares answers with math-verify; it speaks JSON lines on its standard streams.

It runs alone so that an expression that never finishes, or eats the memory, can be killed. Nothing here may import
torch or
transformers: a start takes well under a second and a restart must stay cheap.

Protocol: one line ``{"ready": true}`` (or ``{"error": text}``) at the start. Per request ``{"gold", "prediction",
"limit"}`` two lines: ``{"gold": bool}``, whether the gold could be parsed, then ``{"equal": bool}``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from fractions import Fraction
from functools import lru_cache
from typing import Any

from trimtab.tasks._plain_number import plain_number, tidy, within_tolerance

MEMORY_LIMIT_BYTES = 4 * 1024**3
EVALUATION_DIGITS = 40
GRACE_SECONDS = 1.0

_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")


def latex_of(text: str) -> str:
    """The answer as LaTeX that math-verify reads as one expression."""
    number = plain_number(text)
    if number is not None:
        return number.latex
    # math-verify reads 3e-7 as three times Euler's number minus seven.
    return _SCIENTIFIC.sub(r"\1*10^{\2}", tidy(text)).replace("%", r"\%")


def parse_answer(text: str) -> list[Any]:
    """Parse one answer.

    Returns:
        math-verify's list of candidate expressions; empty when the text is no mathematical expression or has no value
        (1/0).
    """
    import math_verify
    import sympy  # type: ignore[import-untyped]

    latex = latex_of(text)
    if not latex:
        return []
    wrapped = latex if "$" in latex else f"${latex}$"
    found = math_verify.parse(wrapped, fallback_mode="no_fallback", parsing_timeout=None)
    return [item for item in found if not (hasattr(item, "has") and item.has(sympy.zoo, sympy.nan))]


@lru_cache(maxsize=4096)
def parse_gold(text: str) -> tuple[Any, ...]:
    """Parse a gold answer once, however many completions are compared with it."""
    try:
        return tuple(parse_answer(text))
    except (Exception, RecursionError):
        return ()


def compare(gold: list[Any], prediction: list[Any]) -> bool:
    """Whether any parsed form of the prediction equals any of the gold."""
    import math_verify

    for gold_item in gold:
        for prediction_item in prediction:
            close = _close(gold_item, prediction_item)
            if close is None:
                close = math_verify.verify(gold_item, prediction_item, timeout_seconds=None)
            if close:
                return True
    return False


def _close(gold: Any, prediction: Any) -> bool | None:
    """Compare two real numbers of which one is a decimal; None when that is not what they are.

    math-verify rounds to six decimals, for which 3e-7 equals 4e-7.
    """
    import sympy

    if not all(isinstance(item, sympy.Expr) and item.is_number for item in (gold, prediction)):
        return None
    if not (gold.has(sympy.Float) or prediction.has(sympy.Float)):
        return None
    values = [sympy.N(item.doit(), EVALUATION_DIGITS) for item in (gold, prediction)]
    if not all(value.is_real and value.is_finite for value in values):
        return None
    return within_tolerance(*(Fraction(str(value)) for value in values))


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
    send({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        # Should the parent die while an expression holds the interpreter's lock, this watchdog in C still ends the
        # process.
        faulthandler.dump_traceback_later(request["limit"] + GRACE_SECONDS, exit=True, file=devnull)
        gold = parse_gold(request["gold"])
        send({"gold": bool(gold)})
        try:
            equal = bool(gold) and compare(list(gold), parse_answer(request["prediction"]))
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
