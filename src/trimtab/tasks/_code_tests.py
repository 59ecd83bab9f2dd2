"""The forms in which data sets write tests of code, and what the process that judges keeps of them for itself."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from trimtab.errors import InputError
from trimtab.tasks._sandbox.launch import Observation
from trimtab.tasks._sandbox.values import encode

_CONTAINERS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list}


@dataclass(frozen=True)
class AssertTest:
    """A test made of assert statements.

    Attributes:
        source: The test, in which ``assert value == literal`` has become a report of the value.
        expected: The literals, as text, by the number of their comparison.
        required: Comparisons that a run which ends well must have passed.
    """

    source: str
    expected: tuple[str, ...] = ()
    required: frozenset[int] = field(default_factory=frozenset)

    def request(self) -> dict[str, str]:
        """What the sandbox gets to see."""
        return {"kind": "assert", "source": self.source}

    def failure(self, seen: Observation) -> str:
        """What was wrong; empty when the test passed."""
        if seen.ended:
            return seen.ended
        if not all(0 <= number < len(self.expected) and self.expected[number] == text for number, text in seen.values):
            return "wrong value"
        return "" if self.required <= {number for number, _ in seen.values} else "a comparison was not reached"


@dataclass(frozen=True)
class ProgramTest:
    """What a program reads, and what it should print."""

    stdin: str
    stdout: str

    def request(self) -> dict[str, str]:
        """What the sandbox gets to see."""
        return {"kind": "io", "input": self.stdin}

    def failure(self, seen: Observation) -> str:
        """What was wrong; empty when the test passed."""
        return seen.ended or ("" if _lines(seen.stdout) == _lines(self.stdout) else "wrong output")


Test = AssertTest | ProgramTest


def parse_tests(tests: Any, entry_point: str | None = None) -> list[Test]:
    """Read a row's tests in any of these forms.

    - a list of strings: each is one test, usually a single assert statement;
    - a string: one test program; with `entry_point` a call ``check(entry_point)`` is added. A string that is a JSON
      list or object is read as such;
    - ``{"inputs": [...], "outputs": [...]}``, or a list of ``{"input": ..., "output": ...}``: what the program reads
      and prints. A list of lines stands for the lines joined.

    Raises:
        InputError: There is no test in it, or it has none of these forms, or a test is no valid Python.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # A test program may begin with a bracket too.
            tests = json.loads(tests)
    if isinstance(tests, str) and tests.strip():
        return [_parse_asserts(f"{tests}\ncheck({entry_point})\n" if entry_point else tests, bool(entry_point))]
    if isinstance(tests, Mapping):
        tests = _pairs(tests)
    found: list[Test] = []
    for test in [] if tests is None or isinstance(tests, str) else list(tests):
        if isinstance(test, str):
            found.append(_parse_asserts(test, False))
        elif isinstance(test, Mapping) and {"input", "output"} <= set(test):
            found.append(ProgramTest(_joined(test["input"]), _joined(test["output"])))
        else:
            raise InputError(
                "a test must be a string of Python or a mapping with the keys 'input' and 'output', but there is "
                f"{str(test)[:80]!r}."
            )
    if not found:
        raise InputError("there are no tests.")
    return found


def _pairs(tests: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = tests.get("inputs", tests.get("input")), tests.get("outputs", tests.get("output"))
    if tests.get("fn_name") or inputs is None or outputs is None:
        raise InputError(
            "a mapping of tests must have the keys 'inputs' and 'outputs', what a program reads and prints (calls of a "
            f"function, 'fn_name', are not supported); this one has {', '.join(map(str, tests)) or 'none'}."
        )
    if isinstance(inputs, str) or isinstance(outputs, str) or len(inputs) != len(outputs):
        raise InputError("the 'inputs' and 'outputs' of the tests must be lists of the same length.")
    return [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text)) if isinstance(text, Sequence) else str(text)


def _lines(text: str) -> list[str]:
    """The lines without the white space at their ends, and without empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


@lru_cache(maxsize=4096)
def _parse_asserts(source: str, has_check: bool) -> AssertTest:
    try:
        module = ast.parse(source)
        places = [module, *(node for node in module.body if has_check and _is_check(node))]
        direct = {id(statement) for place in places for statement in place.body}  # type: ignore[attr-defined]
        rewriter = _Rewriter(direct)
        rewritten = ast.unparse(ast.fix_missing_locations(rewriter.visit(module)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"a test is no valid Python ({error}): {source[:80]!r}.") from None
    return AssertTest(rewritten, tuple(rewriter.expected), frozenset(rewriter.required))


def _is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "check"


class _Rewriter(ast.NodeTransformer):
    """Takes the literals out of ``assert value == literal``."""

    def __init__(self, direct: set[int]) -> None:
        self.direct = direct
        self.expected: list[str] = []
        self.required: set[int] = set()

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        test = node.test
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
            return node
        for value, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            expected = _encoded_literal(literal)
            if expected is None:
                continue
            number = len(self.expected)
            self.expected.append(expected)
            if id(node) in self.direct:
                self.required.add(number)
            report = ast.Call(ast.Name("__equal__", ast.Load()), [ast.Constant(number), value], [])
            return ast.copy_location(ast.Expr(report), node)
        return node

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    # A test that catches its own AssertionError means something else by it.
    visit_Try = visit_TryStar = visit_With = _leave


def _encoded_literal(node: ast.expr) -> str | None:
    try:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _CONTAINERS
            and len(node.args) == 1
            and not node.keywords
        ):
            return encode(_CONTAINERS[node.func.id](ast.literal_eval(node.args[0])))
        return encode(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
