"""Answers that are words or times of day, and numbers among words."""

from __future__ import annotations

import re

from trimtab.tasks._answer_text import tidy

_WORD = re.compile(r"\b[^\W\d_]{2,}\b")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# Words that LaTeX code holds without being a sentence: commands, environments, units.
_LATEX_NAMES = re.compile(rf"{_LATEX_TEXT.pattern}|\\(?:begin|end)\{{[^{{}}]*\}}(?:\{{[clr|]*\}})?|\\[a-zA-Z]+")
_PROSE = re.compile(r"\b[^\W\d_]{2,}[,.;:!?]?\s+[$(*]*-?\w|[\w)}%]\s+[^\W\d_]{3,}")
_OPERATOR = re.compile(r"[=^*+\\<>(){}\[\]|]|\d\s*/|\d\s*-\s*\d")
# "not 48", "less than 48", "half of 48", "minus 48", "48 thousand": the number alone is not what was said.
_MORE_THAN_A_NUMBER = re.compile(
    r"\b(?:not|no|never|neither|nor|or|than|least|most|under|over|above|below|minus|negative|plus|times|half|twice|thrice"
    r"|double|dozen|hundred|thousand|million|billion|trillion|percent|percentage|except|wrong|incorrect|up|between)\b|n't",
    re.IGNORECASE,
)
# Names that look like prose words and are mathematics.
_FUNCTION_NAMES = ("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "max", "min", "mod")
_MATH_NAMES = frozenset(
    {*_FUNCTION_NAMES, "frac", "abs", "pi", "inf", "infinity", "infty", "and", "or", "union", "floor", "ceil"}
)
_TEXT_ANSWER = re.compile(r"[^\W_]+(?:(?:, | |-|'|\.\s?)[^\W_]+)*")
_CHOICE = re.compile(r"\(?([A-Z])\)?\.?")
_CLOCK = re.compile(r"(\d{1,2})((?::\d{2}){0,2})\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)


def is_prose(text: str) -> bool:
    """Whether there are words in it with a number or another word beside them; a word alone may be a product (xyz)."""
    text = _LATEX_NAMES.sub(" + ", text)
    return (
        _PROSE.search(_WORD.sub(lambda match: "+" if match[0].lower() in _MATH_NAMES else match[0], text)) is not None
    )


def says_more_than_a_number(text: str) -> bool:
    """Whether words or operators around a number change what is said."""
    return _OPERATOR.search(text) is not None or _MORE_THAN_A_NUMBER.search(text) is not None


def words(text: str) -> str | None:
    """An answer in words or a choice's letter, normalised; None when it is anything else. math-verify would take
    "evil" and "live" for one product."""
    plain = " ".join(_LATEX_TEXT.sub(r"\1", tidy(text)).strip(" \t\n$.*").split())
    choice = _CHOICE.fullmatch(plain)
    if choice:
        return choice[1].casefold()
    long_words = [word for word in _WORD.findall(plain) if len(word) > 2 and word.lower() not in _MATH_NAMES]
    return plain.casefold() if long_words and _TEXT_ANSWER.fullmatch(plain) else None


def clock_time(text: str) -> tuple[int, ...] | None:
    """A time of day: (hour, minutes..., 0 or 1 for a.m. or p.m.); None when it is anything else.

    Without a.m. or p.m. it is one only where it could not be a ratio (05:00, 4:51:06).
    """
    match = _CLOCK.fullmatch(" ".join(_LATEX_TEXT.sub(r" \1", tidy(text)).split()))
    if match is None:
        return None
    parts = [int(part) for part in match[2].split(":") if part]
    half = match[3]
    if half is None and not (parts and (match[1].startswith("0") or len(parts) == 2 or parts[-1] == 0)):
        return None
    return (int(match[1]), *parts, *([int(half.lower() == "p")] if half else []))
