"""Single expressions: read by math-verify's LaTeX parser, compared by SymPy. Runs in the worker process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from trimtab.tasks._answer_text import with_powers_of_ten
from trimtab.tasks._plain_number import PlainNumber, numbers_equal, plain_number, within_tolerance

EVALUATION_DIGITS = 50
EQUAL_DIGITS = 35

_CHARACTERS = re.compile(r"[\w\s+\-*/^=()\[\]{}|!.,:'\\&%]*", re.ASCII)
# Each is read by the parser as something that nobody means: "2 5" as seven, "3 foo" as a product of letters.
_UNREADABLE = re.compile(
    r"(?<![_\d])\d+\s+\d|\d\s+\.|(?<![\d])\.(?!\d)|\d\.\d+\.|\.\.|(?<![A-Za-z\\])[a-z]{4,}|\\(?:pmod|bmod|mod|equiv|ldots|cdots|dots|q?quad)"
)
_NUMERAL_IN_BASE = re.compile(r"(-?)\s*\(?([0-9A-Z]*\d[0-9A-Z]*)\)?\s*_\s*\{?\s*(\d+)\s*\}?")
_FUNCTIONS = re.compile(
    r"\\(arc\w+|sinh?|cosh?|tanh?|cot|sec|csc|log|ln|exp|d?binom|choose|gcd|lcm|det|sum|prod|int|lim|max|min|lfloor|lceil|mod"
    r"|begin)(?![a-z])|(!)|(\|)"
)
# Unless the gold has them too.
_NEVER_AN_ANSWER = {"sum", "prod", "int", "lim", "begin", "det"}


@dataclass(frozen=True)
class Leaf:
    """One expression.

    Attributes:
        text: As read.
        number: Its value when it is written as a plain number.
        expression: The SymPy object; None for a numeral with its base (1011_2).
    """

    text: str
    number: PlainNumber | None
    expression: Any

    @property
    def name(self) -> str:
        """The text without spaces, to tell names apart."""
        return "".join(self.text.split())

    @property
    def is_symbol(self) -> bool:
        """Whether it is a single unknown."""
        return bool(getattr(self.expression, "is_Symbol", False))

    @property
    def is_name(self) -> bool:
        """Whether it can stand left of an equals sign as a name: x, AB, f(x), a_1."""
        return self.is_symbol or re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?", self.name) is not None

    @cached_property
    def is_constant(self) -> bool:
        """Whether it is a number or an infinity, however written."""
        return bool(getattr(self.expression, "is_number", False))

    @property
    def functions(self) -> set[str]:
        """The operations in it that a person would have worked out: functions, sums, factorials."""
        found = {next(filter(None, match.groups())) for match in _FUNCTIONS.finditer(self.text)}
        return {"log" if name == "ln" else name for name in found}


@lru_cache(maxsize=8192)
def read_leaf(latex: str) -> Leaf:
    """Read one expression.

    Raises:
        ValueError: It is none, it has no value (1/0), or the parser is known to misread it.
    """
    text = latex.strip().removeprefix("+")
    number = plain_number(text)
    text = number.latex if number else with_powers_of_ten(text)
    numeral = _NUMERAL_IN_BASE.fullmatch(text)
    if numeral:
        return Leaf(f"{numeral[1]}{numeral[2]}_{numeral[3]}", None, None)
    if not text or not _CHARACTERS.fullmatch(text) or (number is None and _UNREADABLE.search(text)):
        raise ValueError(f"not an expression: {text}")
    expression = _parse(re.sub(r"(?<!\\)%", r"\\%", text))
    return Leaf(text, number, expression)


def _parse(latex: str) -> Any:
    import sympy  # type: ignore[import-untyped]
    from latex2sympy2_extended.latex2sympy2 import (  # type: ignore[import-untyped]
        ConversionConfig,
        NormalizationConfig,
        latex2sympy,
        normalize_latex,
    )

    # Its removal of units takes variables for units: the t of sin^2 t, the h of 2 pi r h.
    cleaning = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        expression = latex2sympy(
            normalize_latex(latex, cleaning),
            is_real=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception as error:  # The parser raises exceptions of many kinds for text that it cannot read.
        raise ValueError(f"not an expression: {latex}") from error
    if isinstance(expression, sympy.MatrixBase):
        raise ValueError("a matrix inside an expression")
    if not isinstance(expression, (sympy.Expr, sympy.Set)) or expression.has(sympy.zoo, sympy.nan):
        raise ValueError(f"no value: {latex}")
    return expression.xreplace({item: sympy.I for item in expression.free_symbols if item.name == "i"})


def leaves_equal(gold: Leaf, prediction: Leaf) -> bool:
    """Whether two expressions are equal and the prediction is worked out as far as the gold asks.

    A gold that is a plain number wants a plain number: 2^10, 28/2 and sqrt(196) are not answers to 1024, 14 and 14.
    Only a decimal gold may be met by an irrational expression (3.605551 by sqrt(13)). A constant gold without
    functions is not met by a constant with functions (sin 60 degrees for sqrt(3)/2), which may be the question itself.
    """
    import sympy

    if gold.expression is None or prediction.expression is None:
        digits, _, _ = gold.text.partition("_")
        return prediction.text in (gold.text, digits) and gold.expression is None
    if gold.number and prediction.number:
        unfinished = prediction.number.division and gold.number.value.denominator == 1 and not gold.number.division
        return not unfinished and numbers_equal(gold.number, prediction.number)
    left, right = gold.expression, prediction.expression
    if isinstance(left, sympy.Set) or isinstance(right, sympy.Set):
        return bool(left == right)
    new_functions = prediction.functions - gold.functions
    if gold.is_constant != prediction.is_constant or new_functions & _NEVER_AN_ANSWER:
        return False
    if not gold.is_constant:
        return _simplifies_to_zero(left - right)
    if new_functions:
        return False
    rounded = [side.has(sympy.Float) for side in (left, right)]
    if gold.number and (gold.number.exact or rounded[1] or right.doit().is_rational):
        return False
    return _close(left, right) if any(rounded) else _same_value(left, right)


def same_ratio(gold: list[Leaf], prediction: list[Leaf], *, positive: bool) -> bool:
    """Whether two relations are the same up to a constant, non-zero (or `positive`) factor."""
    import sympy

    left, right = (sides[0].expression - sides[1].expression for sides in (gold, prediction))
    if left.is_number or left.free_symbols != right.free_symbols:
        return False
    ratio = sympy.simplify(right / left)
    return bool(ratio.is_number and ratio.is_finite and (ratio.is_positive if positive else ratio.is_nonzero))


def _simplifies_to_zero(difference: Any) -> bool:
    import sympy

    return bool(difference == 0 or sympy.simplify(difference.doit()).is_zero)


def _same_value(left: Any, right: Any) -> bool:
    """Compare two exact constants, irrational ones by their first digits; SymPy's own test calls 1e-20 and 2e-20
    equal."""
    import sympy

    left, right = left.doit(), right.doit()
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    values = [sympy.N(side, EVALUATION_DIGITS) for side in (left, right)]
    if not all(value.is_finite for value in values):
        return bool(values[0] == values[1])
    size = max(abs(value) for value in values)
    return bool(abs(values[0] - values[1]) <= size * sympy.Float(10) ** -EQUAL_DIGITS)


def _close(gold: Any, prediction: Any) -> bool:
    """Compare two constants of which one is a decimal."""
    import sympy

    values = [sympy.N(item.doit(), EVALUATION_DIGITS) for item in (gold, prediction)]
    for part in (sympy.re, sympy.im):
        left, right = (part(value) for value in values)
        if not (left.is_finite and right.is_finite):
            return False
        if not within_tolerance(Fraction(str(left)), Fraction(str(right))):
            return False
    return True
