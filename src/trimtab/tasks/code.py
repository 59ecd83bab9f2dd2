"""Rewards for code: run a data set's unit tests against the code block of a completion.

The code runs in processes that are shut in as far as the machine allows (docs/code-rewards.md says what holds where).
Nothing here runs unless a configuration names one of the reward functions.
"""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trimtab.errors import InputError
from trimtab.tasks._builtin_rewards import Completion, completion_text
from trimtab.tasks._code_tests import Test, parse_tests
from trimtab.tasks._sandbox.launch import Limits, isolation_mode, observe
from trimtab.tasks._verify_process import pool_size

__all__ = [
    "CodeResult",
    "Limits",
    "code_reward",
    "extract_code",
    "isolation_mode",
    "partial_code_reward",
    "run_tests",
]

logger = logging.getLogger("trimtab")

_FENCE = re.compile(r" {0,3}(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)")
_PYTHON = ("python", "py", "python3")
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True)
class CodeResult:
    """How a piece of code did.

    Attributes:
        passed: Tests that it passed.
        total: Tests that there are.
        reason: The first failure, in words; empty when all passed.
        stdout_tail: The end of standard output in the first test that failed, else in the last one.
        stderr_tail: Likewise for standard error.
        verdicts: One a test.
    """

    passed: int
    total: int
    reason: str
    stdout_tail: str
    stderr_tail: str
    verdicts: tuple[bool, ...]


def extract_code(text: str, *, whole_text: bool = False) -> str | None:
    """The code of a completion: its last closed Markdown block marked python, py or python3.

    A block opens with three or more backticks or tildes and the mark (in any case), and closes with at least as many
    of the same. A block that is never closed does not count, since it was cut off. Common indentation is removed.

    Args:
        text: The completion.
        whole_text: Without any such block, take the whole text.

    Returns:
        The code; None when there is none.
    """
    found: str | None = None
    marks, info, lines = "", "", list[str]()
    for line in text.splitlines():
        fence = _FENCE.fullmatch(line)
        if not marks:
            if fence is not None:
                marks, info, lines = fence["marks"], fence["info"].strip().lower(), []
        elif fence is not None and fence["marks"].startswith(marks) and not fence["info"].strip():
            if info.split(" ")[0] in _PYTHON:
                found = textwrap.dedent("\n".join(lines)) + "\n"
            marks = ""
        else:
            lines.append(line)
    return text if found is None and whole_text else found


def run_tests(
    code: str, tests: Any, *, entry_point: str | None = None, setup: str = "", limits: Limits | None = None
) -> CodeResult:
    """Run tests against code; every test starts afresh, in a process of its own.

    Of an assert statement that compares a value with a literal, only the value is computed beside the code; it is
    compared in this process, and the code cannot know the literal. Such a value must be plain data (None, numbers,
    strings, bytes, and lists, tuples, sets and dictionaries of them). All other statements run beside the code. Output
    is compared line by line without white space at the ends of lines and empty lines at the end, and the program must
    end with exit code 0.

    Args:
        code: Python source.
        tests: A list of assert statements, a test program, or input and output pairs (see docs/code-rewards.md).
        entry_point: For a test program with a function ``check``: the name of what it is called with.
        setup: Source that runs before the code, such as imports.
        limits: For all tests together; `Limits()` by default.

    Raises:
        InputError: The tests cannot be used, or code cannot be run here (not Linux, or root that cannot change user).
    """
    return _judge(code, parse_tests(tests, entry_point), setup, limits or Limits())


def _judge(code: str, tests: Sequence[Test], setup: str, limits: Limits) -> CodeResult:
    seen = observe(code, [test.request() for test in tests], setup=setup, limits=limits)
    failures = [test.failure(observation) for test, observation in zip(tests, seen, strict=True)]
    failed = next((number for number, failure in enumerate(failures) if failure), None)
    shown = seen[-1 if failed is None else failed]
    return CodeResult(
        passed=failures.count(""),
        total=len(failures),
        reason="" if failed is None else f"test {failed + 1} of {len(failures)}: {failures[failed]}",
        stdout_tail=shown.stdout[-_TAIL_CHARACTERS:],
        stderr_tail=shown.stderr[-_TAIL_CHARACTERS:],
        verdicts=tuple(not failure for failure in failures),
    )


def code_reward(
    completions: Sequence[Completion],
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    setup: Sequence[Any] | None = None,
    **_: Any,
) -> list[float | None]:
    """1 when the completion's code passes all tests of its row, else 0; None when the row has no usable tests.

    Args:
        completions: The code is what `extract_code` finds; without a block the reward is 0.
        tests: As `run_tests` takes them.
        entry_point: Likewise.
        setup: Likewise; a list of lines is joined.

    Raises:
        InputError: Code cannot be run here.
    """
    shares = _shares(completions, tests, entry_point, setup)
    return [None if share is None else float(share == 1) for share in shares]


def partial_code_reward(
    completions: Sequence[Completion],
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    setup: Sequence[Any] | None = None,
    **_: Any,
) -> list[float | None]:
    """The share of its row's tests that the completion's code passes, 0 to 1; otherwise as `code_reward`."""
    return _shares(completions, tests, entry_point, setup)


def _shares(
    completions: Sequence[Completion],
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None,
    setup: Sequence[Any] | None,
) -> list[float | None]:
    isolation_mode()  # Here, so that a machine that cannot run code says so before anything else.
    nothing = [None] * len(completions)
    rows = list(zip(completions, tests, entry_point or nothing, setup or nothing, strict=True))
    # Threads only wait here; the work is in the processes that they start.
    with ThreadPoolExecutor(max_workers=pool_size(), thread_name_prefix="trimtab-code") as threads:
        return list(threads.map(lambda row: _share(*row), rows))


def _share(completion: Completion, tests: Any, entry_point: str | None, setup: Any) -> float | None:
    try:
        parsed = parse_tests(tests, entry_point)
    except InputError as error:
        _warn_of_unusable_tests(str(error))
        return None
    code = extract_code(completion_text(completion))
    if code is None:
        return 0.0
    before = setup if isinstance(setup, str) else "\n".join(setup or [])
    result = _judge(code, parsed, before, Limits())
    return result.passed / result.total


_warned = False


def _warn_of_unusable_tests(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning("code reward: rows without usable tests get no reward; the first: %s", reason)
