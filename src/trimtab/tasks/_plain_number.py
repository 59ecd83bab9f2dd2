"""Plain numbers as people write them: exact values without a computer algebra system."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Two measured values count as equal when they agree to about six significant digits and to six decimals; the relative
# bound is 2e-6 and not 1e-6 because 1/3, 1/7 and 1/9 cut to six digits are off by exactly 1e-6.
ABSOLUTE_TOLERANCE = Fraction(1, 10**6)
RELATIVE_TOLERANCE = Fraction(2, 10**6)

# Beyond these sizes exact arithmetic costs time and memory that belong into a process that can be killed.
MAX_CHARACTERS = 400
MAX_EXPONENT = 400

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<currency>[$€£¥]?)\s*(?P<inner_sign>[-+]?)"
    rf"(?P<integer>{_UNSIGNED})?(?:(?P<point>\.)(?P<decimals>\d*))?"
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,4}}))?\s*(?P<percent>%?)"
)
_FRACTION = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<top>[-+]?{_UNSIGNED})\s*/\s*(?P<bottom>[-+]?{_UNSIGNED})"
    r"|\\[dtc]?frac\s*\{\s*(?P<latex_top>[-+]?\d+)\s*\}\s*\{\s*(?P<latex_bottom>[-+]?\d+)\s*\})"
)


@dataclass(frozen=True)
class PlainNumber:
    """A number as written.

    Attributes:
        value: The exact value; a percent sign has been applied (35% is 7/20).
        exact: False when it was written with a decimal point, so that it may be a rounded value.
        latex: A canonical LaTeX form for the slow path.
        whole: Its digits when it was written as a whole number (35 for both 35 and 35%), else None.
    """

    value: Fraction
    exact: bool
    latex: str
    whole: int | None = None


def tidy(text: str) -> str:
    """Strip what surrounds an answer without changing it: spaces, maths delimiters, emphasis, LaTeX spacing, the full
    stop."""
    text = " ".join(text.split()).replace("−", "-")
    text = text.replace("{,}", ",").replace(r"\!", "").replace(r"\%", "%").replace(r"\$", "$")
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3})", ",", text)
    previous = None
    while previous != text:
        previous = text
        text = text.strip().removesuffix("\\").strip()
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")):
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                inner = text[len(opening) : len(text) - len(closing)]
                if opening not in inner:
                    text = inner.strip()
        if re.search(r"(?<!\.)[.,;:]$", text):
            text = text[:-1].rstrip()
    return text


def plain_number(text: str) -> PlainNumber | None:
    """Read an integer, decimal, percentage or fraction, with thousands separators, currency sign or a final full stop.

    Args:
        text: The answer, such as ``$1,250.``, ``-3.5``, ``35%``, ``3e-7``, ``3/8`` or ``\\frac{3}{8}``.

    Returns:
        The number, or None when the text is anything else (also for a zero denominator or an extreme size).
    """
    if len(text) > MAX_CHARACTERS or (not text.isascii() and not re.search("[−€£¥]", text)):
        return None
    text = tidy(text)
    if match := _DECIMAL.fullmatch(text):
        return _decimal(match)
    if match := _FRACTION.fullmatch(text):
        return _fraction(match)
    return None


def _decimal(match: re.Match[str]) -> PlainNumber | None:
    integer, decimals = (match["integer"] or "").replace(",", ""), match["decimals"] or ""
    exponent = int(match["exponent"] or 0)
    if (not integer and not decimals) or (match["sign"] and match["inner_sign"]) or abs(exponent) > MAX_EXPONENT:
        return None
    sign = "-" if "-" in (match["sign"], match["inner_sign"]) else ""
    # A point with nothing behind it ("12.") ends a sentence and says nothing about rounding.
    mantissa = sign + (integer or "0") + (f".{decimals}" if decimals else "")
    value = Fraction(mantissa) * Fraction(10) ** exponent / (100 if match["percent"] else 1)
    latex = mantissa + (f"*10^{{{exponent}}}" if exponent else "") + (r"\%" if match["percent"] else "")
    whole = int(mantissa) if not decimals and not match["exponent"] else None
    return PlainNumber(value, exact=not decimals, latex=latex, whole=whole)


def _fraction(match: re.Match[str]) -> PlainNumber | None:
    top = int((match["top"] or match["latex_top"]).replace(",", ""))
    bottom = int((match["bottom"] or match["latex_bottom"]).replace(",", ""))
    if bottom == 0:
        return None
    value = Fraction(top, bottom) * (-1 if match["sign"] == "-" else 1)
    return PlainNumber(value, exact=True, latex=rf"\frac{{{value.numerator}}}{{{value.denominator}}}")


def within_tolerance(gold: Fraction, prediction: Fraction) -> bool:
    """Whether two values, at least one of them possibly rounded, agree to about six significant digits and six
    decimals."""
    bound = min(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * max(abs(gold), abs(prediction)))
    return abs(gold - prediction) <= bound


def numbers_equal(gold: PlainNumber, prediction: PlainNumber) -> bool:
    """Compare two plain numbers: exactly when both are exact, else `within_tolerance`.

    A whole number also equals the same number with a percent sign (35 and 35%), because gold answers to "what
    percentage" come in both forms.
    """
    if gold.whole is not None and gold.whole == prediction.whole:
        return True
    if gold.exact and prediction.exact:
        return gold.value == prediction.value
    return within_tolerance(gold.value, prediction.value)
