"""What a person is told in one sentence, without a traceback, and the exit code that goes with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error's sentence: the nearest name when there is one, else a full stop."""
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "."


class InputError(ValueError):
    """Bad input: what is wrong, where, and how to mend it."""

    code = 2


class RunError(RuntimeError):
    """A run that cannot go on, and why."""

    code = 1


class Interrupted(Exception):
    """A signal asked the run to stop; its checkpoint is written."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stopped by a signal ({code - 128}); the same command continues the run")
        self.code = code
