"""Find the answer in a completion and compare it with the gold answer.

Training and evaluation use the same two functions, so that a reward and a reported accuracy mean the same thing.
"""

from __future__ import annotations

import math
import re
from collections import deque
from typing import Any

from trimtab.errors import InputError
from trimtab.tasks import _verify_process
from trimtab.tasks._plain_number import numbers_equal, plain_number

# No gold is near this long; the worker would spend its whole time limit on a runaway completion inside a box.
MAX_ANSWER_CHARACTERS = 2000

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FINAL_ANSWER = re.compile(r"final answer is", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    # A minus behind a digit, a letter or a bracket is an operator, not a sign ("10-3").
    r"(?:(?<![\w)\]}])[-−])?"
    rf"(?:\\[dtc]?frac\{{-?\d+\}}\{{-?\d+\}}|[$€£¥]?(?:(?<![\w])-)?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+(?![\d/]))?)"
    r"\s?\\?%?",
    re.ASCII,
)
_WORD = re.compile(r"\b[^\W\d_]{2,}\b")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
# Words that LaTeX code holds without being a sentence: commands, environments, units.
_LATEX_NAMES = re.compile(rf"{_LATEX_TEXT.pattern}|\\(?:begin|end)\{{[^{{}}]*\}}|\\[a-zA-Z]+")
_OPERATOR = re.compile(r"[=^*+\\<>(){}\[\]|]|\d\s*/|\d\s*-\s*\d")
# Names that look like prose words and are mathematics.
_FUNCTION_NAMES = ("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "max", "min", "mod")
_MATH_NAMES = frozenset(
    {*_FUNCTION_NAMES, "frac", "abs", "pi", "inf", "infinity", "and", "or", "union", "floor", "ceil"}
)
# 15+2-3 or 7 x 3, but neither a sign, an exponent, nor the times of scientific notation.
_SUM_NOT_WORKED_OUT = re.compile(r"[\d)}]\s*(?:[+−-]|(?:[*×·x]|\\times|\\cdot)(?!\s*10\s*\^))\s*[\d(\\]")
_TEXT_ANSWER = re.compile(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*")


def extract_answer(text: str) -> str | None:
    """Take the final answer out of a completion.

    The order, of which the first that applies decides:
    1. the last complete ``<answer>...</answer>`` block (a box inside it is opened);
    2. the last ``\\boxed{}`` or ``\\fbox{}`` with balanced braces; when that last box never closes there is no answer;
    3. what follows the last "final answer is", to the end of the sentence;
    4. the last number, with its sign, currency and percent sign.

    Args:
        text: The completion, without the prompt.

    Returns:
        The answer as written, stripped; "" for an empty block or box; None when there is no answer.
    """
    block = _answer_block(text)
    if block is not None:
        return _last_box(block) if _BOX.search(block) else block
    if _BOX.search(text):
        return _last_box(text)
    phrases = list(_FINAL_ANSWER.finditer(text))
    if phrases:
        following = text[phrases[-1].end() :].lstrip(" \t\n:*")
        return _SENTENCE_END.split(following, maxsplit=1)[0].strip(" \t*") or None
    return _last_number(text)


def verify(
    *, gold: str | int | float | None, prediction: str | int | float | None, time_limit: float = 5.0
) -> bool | None:
    """Compare a prediction with the gold answer.

    Plain numbers are compared here; everything else by math-verify in one worker process, which is killed at the
    limit. Two exact values (whole numbers, fractions, expressions) must be equal; when either has a decimal point they
    must agree to six decimals and about six significant digits. 35% equals 0.35, 7/20 and the whole number 35.
    A sum that is not worked out (15+2-3 where the gold is 14) is wrong.

    Args:
        gold: The right answer. A worked solution is accepted when it marks its answer with ``#### `` or a box.
        prediction: A completion, of which the answer is extracted by `extract_answer`, or an answer alone.
        time_limit: Seconds for one comparison, more than 0.

    Returns:
        True or False; None when the gold is missing or cannot be parsed, so that the row can be left out of every
        mean. A prediction that is empty, has no answer, or cannot be judged within the limit is False.

    Raises:
        InputError: The limit is not positive.
        RuntimeError: The worker cannot start (math-verify is not installed).
    """
    if not time_limit > 0 or math.isinf(time_limit):
        raise InputError(f"time_limit is {time_limit}: it must be a positive number of seconds.")
    gold_text = _as_text(gold)
    gold_answer = None if gold_text is None else _gold_answer(gold_text)
    if not gold_answer:
        return None
    answer = _predicted_answer(_as_text(prediction) or "")
    if len(answer) > MAX_ANSWER_CHARACTERS:
        answer = ""
    gold_number = plain_number(gold_answer)
    if gold_number is not None:
        prediction_number = plain_number(answer)
        if prediction_number is not None:
            return numbers_equal(gold_number, prediction_number)
        # math-verify would work the sum out, and a policy would learn to leave it standing.
        if not answer or _SUM_NOT_WORKED_OUT.search(answer.rsplit("=", 1)[-1]):
            return False
    gold_words = _words(gold_answer)
    if gold_words is not None:
        return gold_words == _words(answer)
    return _verify_process.judge(gold_answer, answer, time_limit)


def _as_text(value: Any) -> str | None:
    """A gold or prediction of any scalar type (numpy's and torch's included) as text; None when it holds no answer."""
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        # A column of whole numbers with a gap in it arrives as floats.
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    return str(value)


def _gold_answer(text: str) -> str:
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    if _BOX.search(text):
        return _last_box(text) or ""
    block = _answer_block(text)
    return text.strip() if block is None else block


def _predicted_answer(text: str) -> str:
    """The answer in a completion, or the text itself when it is an answer alone."""
    marked = _answer_block(text) is not None or _BOX.search(text) or _FINAL_ANSWER.search(text)
    if not marked:
        bare = "\n" not in text.strip() and not _is_prose(text)
        return text.strip() if bare or _words(text) is not None else (_last_number(text) or "")
    answer = extract_answer(text) or ""
    # "48 pens" in an answer block: with one number among plain words there is no doubt which one is meant.
    if _is_prose(answer) and not _OPERATOR.search(answer):
        numbers = _NUMBER.findall(answer)
        if len(numbers) == 1:
            return str(numbers[0])
    return answer


def _answer_block(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def _last_box(text: str) -> str | None:
    """The content of the last box; None when its braces do not balance."""
    match = next(iter(deque(_BOX.finditer(text), maxlen=1)), None)
    if match is None:
        return None
    depth, position = 1, match.end()
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2  # An escaped brace is a character of the answer.
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[match.end() : position].strip()
        position += 1
    return None


def _last_number(text: str) -> str | None:
    match = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    return None if match is None else match.group().strip()


def _is_prose(text: str) -> bool:
    return any(word.lower() not in _MATH_NAMES for word in _WORD.findall(_LATEX_NAMES.sub(" ", text)))


def _words(text: str) -> str | None:
    """An answer in words, normalised; None when it is anything else. math-verify would take "evil" and "live" for one
    product."""
    plain = " ".join(_LATEX_TEXT.sub(r"\1", text).strip(" \t\n$.*").split())
    words = _TEXT_ANSWER.fullmatch(plain)
    return plain.casefold() if words and plain.lower() not in _MATH_NAMES else None
