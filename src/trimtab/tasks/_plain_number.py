"""Plain numbers as people write them: exact values without a computer algebra system."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from trimtab.tasks._answer_text import tidy

# Two measured values count as equal when they agree to about six significant digits and to six decimals; the relative
# bound is 2e-6 and not 1e-6 because 1/3, 1/7 and 1/9 cut to six digits are off by exactly 1e-6.
ABSOLUTE_TOLERANCE = Fraction(1, 10**6)
RELATIVE_TOLERANCE = Fraction(2, 10**6)

# Beyond these sizes exact arithmetic costs time and memory that belong into a process that can be killed.
MAX_CHARACTERS = 400
MAX_EXPONENT = 400

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_TIMES_TEN = r"(?:\*|\\times|\\cdot|×|·|x)\s*10\s*\^"
_DECIMAL = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<currency>[$€£¥]?)\s*(?P<inner_sign>[-+]?)"
    rf"(?P<integer>{_UNSIGNED})?(?:(?P<point>\.)(?P<decimals>\d*)(?:\\overline\s*\{{(?P<repeating>\d+)\}})?)?"
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,4}})"
    rf"|\s*{_TIMES_TEN}\s*(?:(?P<power>[-+]?\d{{1,4}})|\{{\s*(?P<braced_power>[-+]?\d{{1,4}})\s*\}}))?"
    r"\s*(?P<percent>%?)"
)
_FRACTION = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<currency>[$€£¥]?)\s*"
    rf"(?:(?P<top>[-+]?{_UNSIGNED})\s*/\s*(?P<bottom>[-+]?{_UNSIGNED})"
    rf"|(?:(?P<whole>{_UNSIGNED})\s*)?\\[dtc]?frac\s*"
    r"(?:\{\s*(?P<latex_top>[-+]?\d+)\s*\}|(?P<digit_top>\d))\s*(?:\{\s*(?P<latex_bottom>[-+]?\d+)\s*\}|(?P<digit_bottom>\d))"
    rf"|(?P<spaced_whole>{_UNSIGNED})\s+(?P<spaced_top>\d+)\s*/\s*(?P<spaced_bottom>\d+))"
    r"\s*(?P<percent>%?)"
)


@dataclass(frozen=True)
class PlainNumber:
    """A number as written.

    Attributes:
        value: The exact value; a percent sign has been applied (35% is 7/20).
        exact: False when it was written with a decimal point, so that it may be a rounded value.
        latex: A canonical LaTeX form for the slow path.
        percent: Whether it was written with a percent sign.
        division: Whether it was written as a fraction that is a whole number (28/2).
    """

    value: Fraction
    exact: bool
    latex: str
    percent: bool = False
    division: bool = False


def plain_number(text: str) -> PlainNumber | None:
    """Read an integer, decimal, percentage, fraction, mixed number or power of ten times a number.

    Thousands separators, a currency sign and a final full stop are allowed. A mixed number (``3 1/4``,
    ``-1\\frac12``) needs a proper fraction; its sign is that of the whole.

    Args:
        text: The answer, such as ``$1,250.``, ``-3.5``, ``35%``, ``3e-7``, ``3/8``, ``3 1/4`` or ``\\frac{3}{8}``.

    Returns:
        The number, or None when the text is anything else (also for a zero denominator or an extreme size).
    """
    if len(text) > MAX_CHARACTERS or (not text.isascii() and not re.search("[−€£¥×·]", text)):
        return None
    text = re.sub(r"^([-+]?)10\s*\^", r"\g<1>1*10^", tidy(text))
    if match := _DECIMAL.fullmatch(text):
        return _decimal(match)
    if match := _FRACTION.fullmatch(text):
        return _fraction(match)
    return None


def _decimal(match: re.Match[str]) -> PlainNumber | None:
    integer, decimals = (match["integer"] or "").replace(",", ""), match["decimals"] or ""
    exponent = int(match["exponent"] or match["power"] or match["braced_power"] or 0)
    repeating = match["repeating"] or ""
    two_signs = match["sign"] and match["inner_sign"]
    if two_signs or not (integer or decimals or repeating) or abs(exponent) > MAX_EXPONENT:
        return None
    sign = "-" if "-" in (match["sign"], match["inner_sign"]) else ""
    # A point with nothing behind it ("12.") ends a sentence and says nothing about rounding.
    mantissa = sign + (integer or "0") + (f".{decimals}" if decimals else "")
    value, latex = Fraction(mantissa), mantissa
    if repeating:
        tail = Fraction(int(repeating), (10 ** len(repeating) - 1) * 10 ** len(decimals))
        value += -tail if sign else tail
        latex = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    value *= Fraction(10) ** exponent
    latex += f"*10^{{{exponent}}}" if exponent else ""
    return _number(value, exact=bool(repeating) or not decimals, latex=latex, percent=bool(match["percent"]))


def _fraction(match: re.Match[str]) -> PlainNumber | None:
    top = _whole(match["top"] or match["latex_top"] or match["digit_top"] or match["spaced_top"])
    bottom = _whole(match["bottom"] or match["latex_bottom"] or match["digit_bottom"] or match["spaced_bottom"])
    whole = match["whole"] or match["spaced_whole"]
    if bottom == 0 or (whole and not 0 < top < bottom):
        return None
    value = (_whole(whole) if whole else 0) + Fraction(top, bottom)
    value = -value if match["sign"] == "-" else value
    latex = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return _number(value, exact=True, latex=latex, percent=bool(match["percent"]), division=value.denominator == 1)


def _whole(digits: str) -> int:
    return int(digits.replace(",", ""))


def _number(value: Fraction, *, exact: bool, latex: str, percent: bool, division: bool = False) -> PlainNumber:
    if percent:
        value, latex = value / 100, rf"{latex}\%"
    return PlainNumber(value, exact=exact, latex=latex, percent=percent, division=division)


def within_tolerance(gold: Fraction, prediction: Fraction) -> bool:
    """Whether two values, at least one of them possibly rounded, agree to about six significant digits and six
    decimals."""
    bound = min(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * max(abs(gold), abs(prediction)))
    return abs(gold - prediction) <= bound


def numbers_equal(gold: PlainNumber, prediction: PlainNumber) -> bool:
    """Compare two plain numbers: exactly when both are exact, else `within_tolerance`.

    A number of at least 1 also equals the same number with a percent sign (35 and 35%), because gold answers to "what
    percentage" come in both forms. Below 1 the forms would be mistaken for each other: 0.35 is 35%, not 0.35%.
    """
    exact = gold.exact and prediction.exact
    pairs = [(gold.value, prediction.value)]
    if gold.percent != prediction.percent:
        bare = tuple(number.value * (100 if number.percent else 1) for number in (gold, prediction))
        if abs(bare[0]) >= 1:
            pairs.append((bare[0], bare[1]))
    return any(left == right if exact else within_tolerance(left, right) for left, right in pairs)
