"""Compare two answers by their outer form, here, and by their algebra, with math-verify's parser and SymPy.

Lists, sets, pairs, intervals, unions, matrices, equations and inequalities are taken apart as text, because brackets
decide what they mean: (0,4) and [0,4] differ, {4, 9} has no order. What remains are single expressions. Runs in the
worker process, since any expression may be endless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab.tasks._expression import Leaf, leaves_equal, read_leaf, same_ratio

LIST, SET, PAIR, UNION, MATRIX, ROW = "list", "{}", "()", "union", "matrix", "row"
_UNORDERED = (LIST, SET, UNION)
MAX_ITEMS = 64

_OPENERS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", "{": "}"}
_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_COMPARISON = {"<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", "=": "=", r"\ne": "!=", r"\in": "in"}
_FLIPPED = {">": "<", ">=": "<="}
_BUILDER = re.compile(r"\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|:|\|)\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Group:
    """Several answers in one: `kind` is LIST, SET, UNION, MATRIX, ROW or the pair of brackets as written."""

    kind: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Relation:
    """Sides joined by ``=``, ``!=``, ``<`` or ``<=`` (greater-than is turned round)."""

    operators: tuple[str, ...]
    sides: tuple[Node, ...]


Node = Group | Relation | Leaf


def read_answer(text: str) -> Node:
    """Take an answer apart (`canonical_latex` has been applied).

    Raises:
        ValueError: It is not an expression, or has no value (1/0).
    """
    text = text.strip()
    if text == r"\mathbb{R}":
        text = r"(-\infty,\infty)"
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        return Group(MATRIX, tuple(Group(ROW, _read_all(row.split("&"))) for row in rows))
    pieces = split_top(text, (",", ";"))
    if len(pieces) > 1:
        return Group(LIST, _flat(_read_all(pieces)))
    pieces = split_top(text, (r"\cup",))
    if len(pieces) > 1:
        return Group(UNION, _read_all(pieces))
    relation = _read_relation(text)
    if relation is not None:
        return relation
    brackets = _outer_brackets(text)
    if brackets is not None:
        return _read_bracketed(*brackets)
    if re.search(r"\\[pm][pm](?![A-Za-z])", text):
        return Group(LIST, tuple(read_answer(_choose_sign(text, sign)) for sign in "+-"))
    return read_leaf(text)


def _read_all(pieces: Sequence[str]) -> tuple[Node, ...]:
    if len(pieces) > MAX_ITEMS:
        raise ValueError("too many items")
    return tuple(read_answer(piece) for piece in pieces)


def _flat(items: tuple[Node, ...]) -> tuple[Node, ...]:
    """The items with lists among them (from a plus-minus sign) opened."""
    flat: list[Node] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Group) and item.kind == LIST else (item,))
    return tuple(flat)


def _choose_sign(text: str, sign: str) -> str:
    other = "-" if sign == "+" else "+"
    text = re.sub(r"\\pm(?![A-Za-z])", sign, text)
    return re.sub(r"\\mp(?![A-Za-z])", other, text).strip().removeprefix("+")


def split_top(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split at separators that are outside all brackets. Raises ValueError when the brackets do not balance."""
    pieces, current, depth = [], "", 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if depth == 0 and token in separators:
            pieces.append(current)
            current = ""
            continue
        depth += (token in _OPENERS) - (token in _OPENERS.values())
        if depth < 0:
            break
        current += token
    if depth != 0:
        raise ValueError("brackets do not balance")
    return [*pieces, current]


def _outer_brackets(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) when one pair of brackets holds the whole text."""
    tokens = [match[0] for match in _TOKEN.finditer(text)]
    if len(tokens) < 2 or tokens[0] not in _OPENERS or tokens[-1] not in _OPENERS.values():
        return None
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token in _OPENERS) - (token in _OPENERS.values())
        if depth == 0 and index < len(tokens) - 1:
            return None
    return tokens[0], "".join(tokens[1:-1]).strip(), tokens[-1]


def _read_bracketed(opening: str, inside: str, closing: str) -> Node:
    if opening in ("{", r"\{"):
        if closing not in ("}", r"\}"):
            raise ValueError("brackets do not match")
        builder = _BUILDER.fullmatch(inside)
        if builder:
            return read_answer(builder[2])
        items = _flat(_read_all(split_top(inside, (",", ";")))) if inside else ()
        return Group(SET, items)
    if opening == r"\langle":
        opening, closing = "(", ")"
    items = _read_all(split_top(inside, (",", ";")))
    if len(items) == 1:
        if opening + closing != PAIR:
            raise ValueError("one value in square brackets")
        return items[0]
    return Group(opening + closing, items)


def _read_relation(text: str) -> Node | None:
    operators, sides, current, depth = [], [], "", 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth += (token in _OPENERS) - (token in _OPENERS.values())
        if depth == 0 and token in _COMPARISON:
            operators.append(_COMPARISON[token])
            sides.append(current)
            current = ""
        else:
            current += token
    if not operators:
        return None
    sides.append(current)
    if operators == ["in"]:
        return read_answer(sides[1])
    if set(operators) == {"="} and len(operators) > 1:
        operators, sides = ["="], [sides[0], sides[-1]]
    nodes = _read_all(sides)
    if all(operator in _FLIPPED for operator in operators):
        operators, nodes = [_FLIPPED[operator] for operator in reversed(operators)], nodes[::-1]
    return _as_interval(tuple(operators), nodes) or Relation(tuple(operators), nodes)


def _as_interval(operators: tuple[str, ...], sides: tuple[Node, ...]) -> Group | None:
    """A solved inequality (x < 3, 0 <= x < 4) as an interval; None for any other relation."""
    if not set(operators) <= {"<", "<="} or not all(isinstance(side, Leaf) for side in sides):
        return None
    leaves = [side for side in sides if isinstance(side, Leaf)]
    infinity = read_leaf(r"\infty")
    if len(leaves) == 2 and leaves[0].is_symbol and leaves[1].is_constant:
        return Group("(" + ("]" if operators[0] == "<=" else ")"), (read_leaf(r"-\infty"), leaves[1]))
    if len(leaves) == 2 and leaves[1].is_symbol and leaves[0].is_constant:
        return Group(("[" if operators[0] == "<=" else "(") + ")", (leaves[0], infinity))
    if len(leaves) == 3 and leaves[1].is_symbol and leaves[0].is_constant and leaves[2].is_constant:
        kind = ("[" if operators[0] == "<=" else "(") + ("]" if operators[1] == "<=" else ")")
        return Group(kind, (leaves[0], leaves[2]))
    return None


def answers_equal(gold: Node, prediction: Node) -> bool:
    """Whether a prediction says the same as the gold answer, in a form as finished as the gold's."""
    if isinstance(gold, Relation) and isinstance(prediction, Relation):
        return _relations_equal(gold, prediction)
    if isinstance(prediction, Relation):
        value = _assigned(prediction, any_left_side=True)
        return value is not None and answers_equal(gold, value)
    if isinstance(gold, Relation):
        value = _assigned(gold, any_left_side=False)
        return value is not None and answers_equal(value, prediction)
    if isinstance(gold, Group) and isinstance(prediction, Group):
        return _groups_equal(gold, prediction)
    if isinstance(gold, Leaf) and isinstance(prediction, Leaf):
        return leaves_equal(gold, prediction)
    return False


def _assigned(relation: Relation, any_left_side: bool) -> Node | None:
    """The right side of ``x = value``; None for any other relation."""
    if relation.operators != ("=",):
        return None
    left = relation.sides[0]
    return relation.sides[1] if any_left_side or (isinstance(left, Leaf) and left.is_name) else None


def _relations_equal(gold: Relation, prediction: Relation) -> bool:
    if gold.operators != prediction.operators:
        return False
    if len(gold.sides) > 2 or not all(isinstance(side, Leaf) for side in gold.sides + prediction.sides):
        return all(answers_equal(*pair) for pair in zip(gold.sides, prediction.sides, strict=True))
    gold_sides = [side for side in gold.sides if isinstance(side, Leaf)]
    sides = [side for side in prediction.sides if isinstance(side, Leaf)]
    symmetric = gold.operators[0] in ("=", "!=")
    orders = [sides, sides[::-1]] if symmetric else [sides]
    if gold_sides[0].is_name and any(
        gold_sides[0].name == order[0].name and leaves_equal(gold_sides[1], order[1]) for order in orders
    ):
        return True
    # A gold that is solved for its unknown is not met by the equation it came from (2x = 10 for x = 5).
    if _solved(gold_sides):
        return False
    return same_ratio(gold_sides, sides, positive=not symmetric)


def _solved(sides: list[Leaf]) -> bool:
    return any(left.is_name and right.is_constant for left, right in (sides, sides[::-1]))


def _groups_equal(gold: Group, prediction: Group) -> bool:
    kinds = {gold.kind, prediction.kind}
    if LIST in kinds and len(kinds) == 2:
        # A list without brackets has no notation of its own: it is ordered only where the gold is.
        ordered = gold.kind not in _UNORDERED
        if UNION in kinds or MATRIX in kinds or not kinds <= {LIST, SET, PAIR}:
            return False
    elif len(kinds) == 2:
        return False
    else:
        ordered = gold.kind not in _UNORDERED
    left, right = gold.items, prediction.items
    if SET in kinds:
        left, right = _distinct(left), _distinct(right)
    if len(left) != len(right):
        return False
    if ordered:
        return all(answers_equal(*pair) for pair in zip(left, right, strict=True))
    return _match(left, right, answers_equal)


def _distinct(items: tuple[Node, ...]) -> tuple[Node, ...]:
    kept: list[Node] = []
    for item in items:
        if not any(answers_equal(other, item) for other in kept):
            kept.append(item)
    return tuple(kept)


def _match(left: tuple[Node, ...], right: tuple[Node, ...], equal: Callable[[Node, Node], bool]) -> bool:
    """Whether the items pair off, each with one of its own."""
    rest = list(right)
    for item in left:
        found = next((index for index, other in enumerate(rest) if equal(item, other)), None)
        if found is None:
            return False
        del rest[found]
    return True
