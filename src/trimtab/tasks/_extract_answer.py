"""Where the answer stands in a completion; `trimtab.tasks.verify` offers `extract_answer` under its own name."""

from __future__ import annotations

import re
from collections import deque

from trimtab.tasks._answer_text import matching_brace

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
FINAL_ANSWER = re.compile(r"final answer is", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    # A minus behind a digit, a letter or a bracket is an operator, not a sign ("10-3").
    r"(?:(?<![\w)\]}])[-−])?"
    rf"(?:\\[dtc]?frac\{{-?\d+\}}\{{-?\d+\}}|[$€£¥]?(?:(?<![\w])-)?(?:\d+\s+\d+/\d+(?![\d/])"
    rf"|(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+(?![\d/]))?))"
    r"\s?\\?%?",
    re.ASCII,
)


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
    block = answer_block(text)
    if block is not None:
        return last_box(block) if BOX.search(block) else block
    if BOX.search(text):
        return last_box(text)
    phrases = list(FINAL_ANSWER.finditer(text))
    if phrases:
        following = text[phrases[-1].end() :].lstrip(" \t\n:*")
        return _SENTENCE_END.split(following, maxsplit=1)[0].strip(" \t*") or None
    return last_number(text)


def answer_block(text: str) -> str | None:
    """The content of the last complete ``<answer>`` block, stripped."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def last_box(text: str) -> str | None:
    """The content of the last box; None when its braces do not balance."""
    match = next(iter(deque(BOX.finditer(text), maxlen=1)), None)
    if match is None:
        return None
    end = matching_brace(text, match.end())
    return None if end is None else text[match.end() : end].strip()


def numbers_in(text: str) -> list[str]:
    """All numbers in a text, as written."""
    return [match.group().strip() for match in _NUMBER.finditer(text)]


def last_number(text: str) -> str | None:
    """The last number in a text, as written; None when there is none."""
    match = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    return None if match is None else match.group().strip()
