"""The built-in task: short word problems with a chain of +, - and x, solved step by step.

Every row comes from a seed, and the split of a problem is a property of the problem itself, so a model that has
seen any number of training rows has seen no test problem. The task is small enough for a model of one million
parameters on a CPU, and its difficulty (operations, operands, results) can be raised past what a model was trained on.
"""

import hashlib
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from trimtab.errors import InputError

SPLITS = ("train", "test")
MODES = ("terse", "varied")
MAX_ATTEMPTS = 20_000

NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe")
THINGS = ("apples", "coins", "books", "cards", "pens", "eggs", "cups", "maps")
OPENINGS = ("{name} has {n} {things}.", "{name} starts with {n} {things}.", "{name} brings {n} {things}.")
EVENTS = {
    "+": ("{name} gets {n} more.", "{name} finds {n} more.", "Then {n} more come."),
    "-": ("{name} loses {n}.", "{name} sells {n}.", "Then {n} get lost."),
    "x": ("Then {name} has {n} times as many.", "Soon there are {n} times as many."),
}
QUESTIONS = ("How many {things} now?\n", "How many does {name} have?\n", "What is the total?\n")

VERBS = {
    "+": ("add", "gain", "get", "put on"),
    "-": ("take", "lose", "drop", "remove"),
    "x": ("multiply by", "scale by", "repeat"),
}
FILLERS = ("", "", "okay", "well", "right", "hmm", "sure", "fine", "good", "let me see")
STARTS = ("start with", "begin with", "there are", "we have", "at first", "from")
CONNECTORS = ("", "first ", "then ", "next ", "now ", "also ", "here ", "so ")
LINKS = (": ", ", ", " so ", " gives ", " is ", " makes ", " and ")
REASONS = (" as we ", " since we ", " when we ", " after we ", " because we ", " once we ")
SEPARATORS = (" ; ", ", ", ". ", "; ", " and ", " | ")
CLOSINGS = ("", "", "done", "so {r}", "total {r}", "result {r}", "that is {r}", "we get {r}", "it is {r}", "answer {r}")
# x is missing here because it is the multiplication sign.
LETTERS = "abcdkmnp"

EQUATION = re.compile(r"(?<!\w)(?<!\d\.)(\d+) *([-+x*×]) *(\d+) *= *(-?\d+)(?!\d|\.\d)")
LONGER_LEFT_SIDE = re.compile(r"(?:[\w)] *[-+*/×]|[\d)] *x) *$")


class Step(NamedTuple):
    """One operation of a chain: `left operator right = result`."""

    left: int
    operator: str
    right: int
    result: int

    def equation(self) -> str:
        """The step as text without spaces, like `15+2=17`."""
        return f"{self.left}{self.operator}{self.right}={self.result}"


def make_rows(
    n: int,
    *,
    seed: int,
    split: str = "train",
    mode: str = "varied",
    operations: tuple[int, int] = (1, 3),
    max_operand: int = 20,
    max_result: int = 99,
) -> list[dict[str, Any]]:
    """Draw `n` word problems with their solutions.

    The same arguments give the same rows, and a smaller `n` gives the first rows of a larger one. `mode` changes the
    completions and nothing else. A problem belongs to `test` (about one in eight) or to `train` by the hash of its
    expression with the terms in one order, so the splits never share a problem or its mirror (7+5 and 5+7), whatever
    the seeds, sizes and difficulty. Within a split a problem may appear more than once.

    Args:
        n: number of rows, at least 1.
        seed: the rows' only source of randomness.
        split: `train` or `test`.
        mode: `terse` (the equations alone) or `varied` (one of the solution styles in `STYLES`, drawn for each row).
        operations: fewest and most operations in a chain, both included.
        max_operand: largest start quantity and operand.
        max_result: largest intermediate and final result; none is below 0.

    Returns:
        Rows with `prompt` (ends with a newline, so the completion starts right away), `answer`, `completion`,
        `expression` (as `15+2+12` or `(15+2)x3`, ordinary precedence) and `operations` (their number).

    Raises:
        InputError: an argument is out of range, or the settings leave the split without a problem.
    """
    _check_arguments(n, seed, split, mode, operations, max_operand, max_result)
    problem_rng = random.Random(f"arithmetic problems {split} {seed}")
    style_rng = random.Random(f"arithmetic styles {split} {seed}")
    rows = []
    for _ in range(n):
        steps = _draw_problem(problem_rng, split, operations, max_operand, max_result)
        rows.append(
            {
                "prompt": _word_problem(steps, problem_rng),
                "answer": str(steps[-1].result),
                "completion": _completion(steps, mode, style_rng),
                "expression": expression_of(steps),
                "operations": len(steps),
            }
        )
    return rows


def expression_of(steps: list[Step]) -> str:
    """The chain as one expression under ordinary precedence, with parentheses only where they are needed."""
    expression, last = str(steps[0].left), ""
    for step in steps:
        if step.operator == "x" and last in ("+", "-"):
            expression = f"({expression})"
        expression += f"{step.operator}{step.right}"
        last = step.operator
    return expression


def canonical(expression: str) -> str:
    """The chain with the terms of each sum and the factors of each product in one order, so that 7+5 equals 5+7."""
    start, *steps = re.findall(r"[-+x]?\d+", expression.replace("(", "").replace(")", ""))
    family, parts = "", [start]
    for step in steps:
        kind = "x" if step[0] == "x" else "+"
        if family not in ("", kind):
            parts = [f"({family.join(sorted(parts))})"]
        family = kind
        parts.append(step.lstrip("+x"))
    return family.join(sorted(parts))


def split_of(expression: str) -> str:
    """The split a problem belongs to: `test` for about one in eight, else `train`, whatever the order of its terms."""
    digest = hashlib.blake2b(canonical(expression).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % 8 == 0 else "train"


def check_equations(text: str) -> list[tuple[int, bool]]:
    """Find each `a op b = c` in a text and say whether it is right.

    Numbers are whole, `c` may be negative, `op` is one of `+ - x * ×`, and spaces around the signs are allowed. In a
    run like `15+2=17+12=29` each link is read as an equation of its own. A left side with more than two operands
    (`1+2+3=6`) and decimals are left out, since judging a part of them would call a right line wrong.

    Returns:
        For each equation in order: the position just past its last character (in characters, so
        `text[:end]` ends with the equation) and whether it holds.
    """
    found = []
    position = 0
    while match := EQUATION.search(text, position):
        # A run shares a number between two equations, so the next search begins at this one's result.
        position = match.start(4)
        if not LONGER_LEFT_SIDE.search(text, 0, match.start()):
            left, right, result = int(match[1]), int(match[3]), int(match[4])
            found.append((match.end(), _apply(left, match[2], right) == result))
    return found


def _apply(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


def _check_arguments(
    n: int, seed: int, split: str, mode: str, operations: tuple[int, int], max_operand: int, max_result: int
) -> None:
    for name, value, least in (("n", n, 1), ("max_operand", max_operand, 1), ("max_result", max_result, 1)):
        if not _is_whole(value) or value < least:
            raise InputError(f"make_rows: {name} must be a whole number of at least {least}, not {value!r}.")
    if not _is_whole(seed):
        raise InputError(f"make_rows: seed must be a whole number, not {seed!r}.")
    for name, choice, allowed in (("split", split, SPLITS), ("mode", mode, MODES)):
        if choice not in allowed:
            raise InputError(f"make_rows: {name} must be one of {', '.join(allowed)}, not {choice!r}.")
    if (
        not isinstance(operations, (tuple, list))
        or len(operations) != 2
        or not all(_is_whole(bound) for bound in operations)
        or not 1 <= operations[0] <= operations[1]
    ):
        raise InputError(
            "make_rows: operations must be a pair (fewest, most) of whole numbers with 1 <= fewest <= most, "
            f"not {operations!r}."
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _draw_problem(
    rng: random.Random, split: str, operations: tuple[int, int], max_operand: int, max_result: int
) -> list[Step]:
    for _ in range(MAX_ATTEMPTS):
        steps = _draw_chain(rng, rng.randint(*operations), max_operand, max_result)
        if split_of(expression_of(steps)) == split:
            return steps
    raise InputError(
        f"make_rows: no {split} problem turned up in {MAX_ATTEMPTS:,} draws with operations={tuple(operations)}, "
        f"max_operand={max_operand} and max_result={max_result}; allow larger ones."
    )


def _draw_chain(rng: random.Random, length: int, max_operand: int, max_result: int) -> list[Step]:
    steps: list[Step] = []
    value = rng.randint(1, min(max_operand, max_result))
    for _ in range(length):
        # Smallest and largest right operand each operator allows here; times 0 and times 1 would be no step at all.
        bounds = {"+": (1, max_result - value), "-": (1, value), "x": (2, max_result // value if value else 0)}
        feasible = [sign for sign, (low, high) in bounds.items() if low <= min(high, max_operand)]
        operator = rng.choice(feasible)
        low, high = bounds[operator]
        right = rng.randint(low, min(high, max_operand))
        steps.append(Step(value, operator, right, _apply(value, operator, right)))
        value = steps[-1].result
    return steps


def _word_problem(steps: list[Step], rng: random.Random) -> str:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    start = steps[0].left
    opening = rng.choice(OPENINGS)
    if start == 1:
        opening = opening.replace("{things}", things[:-1])
    parts = [opening.format(name=name, n=start, things=things)]
    parts += [rng.choice(EVENTS[step.operator]).format(name=name, n=step.right) for step in steps]
    parts.append(rng.choice(QUESTIONS).format(name=name, things=things))
    return " ".join(parts)


def _completion(steps: list[Step], mode: str, rng: random.Random) -> str:
    body = _varied_body(steps, rng) if mode == "varied" else " ; ".join(step.equation() for step in steps)
    return f"<reasoning>{body}</reasoning><answer>{steps[-1].result}</answer>"


def _varied_body(steps: list[Step], rng: random.Random) -> str:
    filler = rng.choice(FILLERS)
    if filler:
        filler += rng.choice((", ", ". ", ": ", " "))
    restatement = ""
    if rng.random() < 0.12:
        told = [f"{rng.choice(VERBS[step.operator])} {step.right}" for step in steps]
        restatement = ", ".join([str(steps[0].left), *told]) + rng.choice((": ", ". ", "; "))
    body = STYLES[rng.choice(tuple(STYLES))](steps, rng)
    closing = rng.choice(CLOSINGS).format(r=steps[-1].result)
    if closing:
        closing = rng.choice((". ", ", ", "; ", " | ")) + closing + rng.choice(("", "."))
    return filler + restatement + body + closing


def _verbal(steps: list[Step], rng: random.Random) -> str:
    parts = []
    if rng.random() < 0.5:
        parts.append(f"{rng.choice(STARTS)} {steps[0].left}")
    for step in steps:
        words = rng.choice(CONNECTORS)
        if rng.random() < 0.8:
            words += f"{rng.choice(VERBS[step.operator])} {step.right}{rng.choice(LINKS)}"
        parts.append(words + step.equation())
    return _join(parts, rng)


def _equation_first(steps: list[Step], rng: random.Random) -> str:
    return _join(
        [
            f"{step.equation()}{rng.choice(REASONS)}{rng.choice(VERBS[step.operator])} {step.right}"
            if rng.random() < 0.6
            else f"{rng.choice(CONNECTORS)}{step.equation()}"
            for step in steps
        ],
        rng,
    )


def _algebraic(steps: list[Step], rng: random.Random) -> str:
    letters = rng.sample(LETTERS, len(steps) + 1) if len(steps) < len(LETTERS) else rng.choices(LETTERS, k=99)
    parts = [f"{letters[0]}={steps[0].left}"] if rng.random() < 0.5 else []
    parts += [f"{letter}={step.equation()}" for letter, step in zip(letters[1:], steps, strict=False)]
    return _join(parts, rng)


def _symbols(steps: list[Step], rng: random.Random) -> str:
    return _join([f"{rng.choice(CONNECTORS)}{step.equation()}" for step in steps], rng)


def _join(parts: list[str], rng: random.Random) -> str:
    text = parts[0]
    for part in parts[1:]:
        text += rng.choice(SEPARATORS) + part
    return text


STYLES: dict[str, Callable[[list[Step], random.Random], str]] = {
    "verbal": _verbal,
    "equation_first": _equation_first,
    "algebraic": _algebraic,
    "symbols": _symbols,
}
