"""Rewrite an answer as it was typed into LaTeX that has one reading, before anything is compared.

Everything here keeps the meaning: what cannot be read in one way only is left as it is, and the reader then refuses it.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "±": r"\pm ", "°": r"^\circ ",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∞": r"\infty ", "∅": r"\emptyset ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "√": r"\sqrt ", "⁄": "/", "’": "'", "ℝ": r"\mathbb{R}",
}  # fmt: skip
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{")
_SPACING = re.compile(r"\\(?:displaystyle|left|right|[Bb]igg?[lr]?|phantom)(?![A-Za-z])|(?<!\\)\\[!,;: ]")
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|frac|pi|infinity|infty|theta"
_BARE_FUNCTION = re.compile(rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])")
_PLAIN_WORDS = (
    (re.compile(r"\s*\b(?:percent(?:age)?|pct)\b", re.IGNORECASE), "%"),
    (re.compile(r"(?<![A-Za-z\\])inf(?![A-Za-z])|\\infinity"), r"\\infty "),
    (re.compile(r"(?<![A-Za-z\\])union(?![A-Za-z])|\\bigcup|(?<=[\])])\s*U\s*(?=[\[(])"), r"\\cup "),
    (re.compile(r"\\(?:empty|varnothing)(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\(?:[dtc]frac)(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\*\*"), "^"),
)
_AND_OR = re.compile(r"\s*[,;]?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*")
_SCALE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(?<=\d)\s*({'|'.join(_SCALE)})s?(?![A-Za-z])", re.IGNORECASE)
_THOUSANDS_GAP = re.compile(r"(?<=\d)(?:,?\s*\\[!,;: ]\s*|\{,\}\s*)(?=\d{3}(?!\d))")
_SPACED_LIST = re.compile(r",\s")
_LIST_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,]\d)")
_BRACED_THOUSANDS = re.compile(r"(?<=(?<!\\)\{)\s*(\d{1,3}(?:,\d{3})+)\s*(?=(?<!\\)\})")
_MIXED = re.compile(r"(?<![\d.^_/{A-Za-z)])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/.^])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")
_DEGREES_AT_END = re.compile(r"(?<=[\d})])\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*[CF]?$")
_SHORT_UNITS = "cm|mm|km|kg|mg|gm|lbs?|oz|ft|in|yd|mi|mph|kmh|hrs?|mins?|secs?|ml|cl|sq|cu|k?m/[hs]"
_BEHIND_A_VALUE = r"(?:(?<=[\d})%])|(?<=\\pi)|(?<=\\pi ))\s*"
_UNIT_POWER = r"(?:\s*\^\s*\{?\s*[1-4]\s*\}?)?"
_UNIT_WORDS = re.compile(
    rf"{_BEHIND_A_VALUE}(?:(?:{_SHORT_UNITS}|[A-Za-z]{{3,}})\.?(?:\s*/\s*[a-z]+|\s+|$))+{_UNIT_POWER}$"
)
_UNIT_IN_TEXT = re.compile(
    rf"{_BEHIND_A_VALUE}\\(?:text|textrm|textnormal|mathrm|mbox)\s*"
    rf"\{{\s*[A-Za-z][A-Za-z ./^2-4-]*\}}{_UNIT_POWER}\s*\.?$"
)
# One token that TeX takes as an argument without braces.
_ARGUMENT = r"\\(?!frac|sqrt)[A-Za-z]+|[A-Za-z0-9]"
# A word behind a number that says more than a unit does.
_NOT_A_UNIT = re.compile(
    r"(?<![A-Za-z])(?:and|or|if|when|where|with|not|to|than|more|less|mod|hundred|dozen|half|out|of|[ap]\.?m\.?|plus|minus"
    rf"|times|{_FUNCTIONS}|{'|'.join(_SCALE)})(?![A-Za-z])",
    re.IGNORECASE,
)
_SEVERAL_ANSWERS = re.compile(r"[,;<>]|\\(?:le|ge|ne|cup|in|to|quad|implies|Rightarrow|lor|vee)(?![A-Za-z])|\\\\")


def tidy(text: str) -> str:
    """Strip what surrounds an answer without changing it: spaces, maths delimiters, emphasis, LaTeX spacing, the full
    stop."""
    text = " ".join(text.replace("~", " ").split()).replace("−", "-")
    text = _THOUSANDS_GAP.sub(",", text)
    text = text.replace(r"\!", "").replace(r"\%", "%").replace(r"\$", "$")
    previous = None
    while previous != text:
        previous = text
        text = text.strip().removesuffix("\\").strip()
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")):
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                inner = text[len(opening) : len(text) - len(closing)]
                if opening not in inner:
                    text = inner.strip()
        if text.endswith((".", ",", ";", ":")) and text[-2:-1] != ".":
            text = text[:-1].rstrip()
    return text


def canonical_latex(text: str) -> str:
    """One answer as LaTeX of the kind that the reader of the worker takes apart.

    Typographic characters become commands, ``\\text`` is unwrapped, "and"/"or" between answers become commas,
    thousands separators disappear, mixed numbers and scientific notation get their LaTeX forms, and a unit behind the
    last number is dropped (units are not compared).
    """
    text = _drop_unit(tidy(_SPACING.sub(" ", _ascii(tidy(text)))))
    text = tidy(re.sub(r"(?<!\\)\$", "", unwrap_text(text)))
    for pattern, replacement in _PLAIN_WORDS:
        text = pattern.sub(replacement, text)
    text = _SCALED.sub(lambda match: f"e{_SCALE[match[1].lower()]}", text)
    text = _join_answers(text)
    text = _BARE_FUNCTION.sub(lambda match: rf"\{match[1].replace('infinity', 'infty')} ", text)
    text = _brace_fractions(_brace_roots(text))
    text = _BRACED_THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    if _SPACED_LIST.search(text):
        text = _LIST_THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    text = _DEGREES_AT_END.sub("", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return tidy(re.sub(r"^\\approx\s*", "", text))


def with_powers_of_ten(text: str) -> str:
    """3e-7 as ``3*10^{-7}``; math-verify reads the letter as Euler's number."""
    return _SCIENTIFIC.sub(r"\1*10^{\2}", text)


def last_of_chain(text: str) -> tuple[str, str]:
    """The left side and the value of an equation chain: ("x", "14") for ``x = 15 + 2 - 3 = 14``.

    A rounded value behind the exact one is dropped (``x = 2/3 \\approx 0.67``). A text with several answers in it, or
    with an inequality, is no chain: its left side is "" and its value the whole text.
    """
    if _SEVERAL_ANSWERS.search(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)):
        return "", text
    head, _, tail = text.partition(r"\approx")
    if tail:
        text = f"{head}={tail}" if is_name(head) else head
    parts = [part.strip() for part in text.split("=")]
    return (parts[0] if len(parts) > 1 else ""), parts[-1]


def is_name(text: str) -> bool:
    """Whether it names a quantity (x, AB, f(2), \\angle A) and is no expression of several."""
    return re.search(r"[A-Za-z]", text) is not None and re.search(r"[-+*/^]|\d\s*[A-Za-z(\\]", text) is None


def _ascii(text: str) -> str:
    """Typographic characters as LaTeX; any other character stays, and the reader refuses it."""
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    written = []
    for character in text:
        if unicodedata.decomposition(character).startswith("<fraction>"):
            # A space, because 3½ is three and a half.
            written.append(" " + unicodedata.normalize("NFKC", character))
        elif unicodedata.category(character) == "Nd" and not character.isascii():
            written.append(unicodedata.normalize("NFKC", character))
        else:
            written.append(character)
    return re.sub(r"[^\x00-\x7f]", lambda match: _SYMBOLS.get(match[0], " " if match[0].isspace() else match[0]),
                  "".join(written))  # fmt: skip


def _drop_unit(text: str) -> str:
    for pattern in (_UNIT_IN_TEXT, _UNIT_WORDS):
        match = pattern.search(text)
        if match and not _NOT_A_UNIT.search(match[0]):
            return text[: match.start()].rstrip()
    return text


def unwrap_text(text: str) -> str:
    """Replace ``\\text{...}`` and its kin by their contents, set apart by spaces."""
    position = 0
    while match := _TEXT_COMMAND.search(text, position):
        end = matching_brace(text, match.end())
        if end is None:
            break
        text = f"{text[: match.start()]} {text[match.end() : end]} {text[end + 1 :]}"
        position = match.start()
    return text


def matching_brace(text: str, start: int) -> int | None:
    """The index of the brace that closes the one just before `start`; None when there is none."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2  # An escaped brace is a character of the answer.
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None


def _join_answers(text: str) -> str:
    # "x < -1 or x > 3" is one region of two pieces; between values the words separate answers.
    compares = re.search(r"[<>]|\\(?:le|ge)(?![A-Za-z])", text) and not re.search(r"\band\b", text)
    return _AND_OR.sub(r" \\cup " if compares else ", ", text)


def _brace_fractions(text: str) -> str:
    """``\\frac\\pi2`` as ``\\frac{\\pi}{2}``."""
    text = re.sub(rf"\\frac\s*({_ARGUMENT})", r"\\frac{\1}", text)
    return re.sub(rf"(\\frac\s*\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})\s*({_ARGUMENT})", r"\1{\2}", text)


def _brace_roots(text: str) -> str:
    """``\\sqrt(13)`` and ``\\sqrt 13`` as ``\\sqrt{13}``."""
    text = re.sub(r"\\sqrt\s+(?=[\d({\[])", r"\\sqrt", text)
    while match := re.search(r"\\sqrt\(", text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        if depth:
            break
        text = f"{text[: match.start()]}\\sqrt{{{text[match.end() : end - 1]}}}{text[end:]}"
    return re.sub(r"\\sqrt(\d{2,})", r"\\sqrt{\1}", text)
