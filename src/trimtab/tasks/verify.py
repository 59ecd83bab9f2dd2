"""Find the answer in a completion and compare it with the gold answer.

Training and evaluation use the same functions, so that a reward and a reported accuracy mean the same thing. Where a
rule has to choose, it refuses: a wrong answer that is rewarded teaches a policy more than a right one that is missed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from trimtab.errors import InputError
from trimtab.tasks import _verify_process
from trimtab.tasks._answer_text import canonical_latex, is_name, last_of_chain, unwrap_text
from trimtab.tasks._extract_answer import (
    BOX,
    FINAL_ANSWER,
    answer_block,
    extract_answer,
    last_box,
    last_number,
    numbers_in,
)
from trimtab.tasks._plain_number import numbers_equal, plain_number
from trimtab.tasks._word_answer import clock_time, is_prose, says_more_than_a_number, words

__all__ = ["extract_answer", "verify", "verify_all"]

# No gold is near this long; the worker would spend its whole time limit on a runaway completion inside a box.
MAX_ANSWER_CHARACTERS = 2000

Scalar = str | int | float | None


class Question(NamedTuple):
    """What a worker is asked: two answers as `canonical_latex` writes them."""

    gold: str
    prediction: str


def verify(*, gold: Scalar, prediction: Scalar, time_limit: float = 5.0) -> bool | None:
    """Compare a prediction with the gold answer.

    Plain numbers, words and times of day are compared here; everything else in a worker process, which is killed at
    the limit. The rules:

    - Two exact values (whole numbers, fractions, expressions) must be equal; when either has a decimal point they must
      agree to six decimals and about six significant digits.
    - A plain number as gold wants a plain number, with a name (``x =``), currency, percent sign, degrees or unit if
      you like: 15+2-3, 28/2, 2^10 and sqrt(196) are not worked out and are wrong. Units are not compared.
    - 35% equals 0.35 and 7/20, and also 35, because golds to "what percentage" come in both forms; a bare number below
      1 is never a percentage without its sign. 3 1/4 is a mixed number.
    - Of an equation chain the last value counts; several answers where the gold has one are wrong.
    - Lists and sets have no order, pairs and intervals do, and brackets count: (0,4), [0,4] and {0,4} differ. A list
      without brackets may stand for a pair (in its order), or for a set.
    - Equations and inequalities may differ by a non-zero (positive) factor, unless the gold is solved for its unknown.
    - A constant in closed form is not met by one with functions that the gold lacks (sin 60 degrees for sqrt(3)/2).

    Args:
        gold: The right answer. A worked solution is accepted when it marks its answer with ``#### `` or a box.
        prediction: A completion, of which the answer is extracted by `extract_answer`, or an answer alone.
        time_limit: Seconds for one comparison, more than 0.

    Returns:
        True or False; None when the gold is missing or cannot be parsed, so that the row can be left out of every
        mean. A prediction that is empty, has no answer, or cannot be judged within the limit is False.

    Raises:
        InputError: The limit is not positive.
        RuntimeError: The worker cannot start (math-verify is not installed), or the program is ending.
    """
    _check_limit(time_limit)
    verdict = _compare_here(gold, prediction)
    return (
        _verify_process.judge(verdict.gold, verdict.prediction, time_limit)
        if isinstance(verdict, Question)
        else verdict
    )


def verify_all(*, golds: Sequence[Scalar], predictions: Sequence[Scalar], time_limit: float = 5.0) -> list[bool | None]:
    """`verify` for a whole batch, over all worker processes at once; the same question is asked once.

    Args:
        golds: The right answers, one for each prediction.
        predictions: Completions or answers.
        time_limit: Seconds for each comparison, more than 0.

    Returns:
        The verdicts, in order.

    Raises:
        InputError: The limit is not positive.
        ValueError: The two sequences differ in length.
        RuntimeError: As in `verify`.
    """
    _check_limit(time_limit)
    here = [_compare_here(*pair) for pair in zip(golds, predictions, strict=True)]
    questions = list(dict.fromkeys(verdict for verdict in here if isinstance(verdict, Question)))
    answers = dict(zip(questions, _ask(questions, time_limit), strict=True))
    return [answers[verdict] if isinstance(verdict, Question) else verdict for verdict in here]


def _ask(questions: Sequence[Question], time_limit: float) -> list[bool | None]:
    def judge(question: Question) -> bool | None:
        return _verify_process.judge(question.gold, question.prediction, time_limit)

    threads = min(len(questions), _verify_process.pool_size())
    if threads <= 1:
        return [judge(question) for question in questions]
    executor = ThreadPoolExecutor(threads, thread_name_prefix="trimtab-verify")
    try:
        return list(executor.map(judge, questions))
    finally:
        executor.shutdown(cancel_futures=True)  # After an interrupt, nothing that waits is begun.


def _check_limit(time_limit: float) -> None:
    if not time_limit > 0 or math.isinf(time_limit):
        raise InputError(f"time_limit is {time_limit}: it must be a positive number of seconds.")


def _compare_here(gold: Any, prediction: Any) -> bool | Question | None:
    """The verdict where it can be had without a worker, else the question for one."""
    gold_text = _as_text(gold)
    gold_answer = None if gold_text is None else _gold_answer(gold_text)
    if not gold_answer or len(gold_answer) > MAX_ANSWER_CHARACTERS:
        return None
    answer = _predicted_answer(_as_text(prediction) or "")
    if len(answer) > MAX_ANSWER_CHARACTERS:
        answer = ""
    verdict = _compare_numbers(gold_answer, answer)
    if verdict is not None:
        return verdict
    for read in (clock_time, words):
        gold_read = read(gold_answer)
        if gold_read is not None:
            # The whole text too, because of "June 20" only the number would be taken.
            return gold_read in (read(answer), read(str(prediction)))
    return Question(canonical_latex(gold_answer), canonical_latex(answer))


def _compare_numbers(gold_answer: str, answer: str) -> bool | None:
    """The verdict when the gold is a plain number; None when that needs a worker."""
    gold, prediction = plain_number(gold_answer), plain_number(answer)
    if gold is None or prediction is None:
        if clock_time(gold_answer) is not None:
            return None
        gold_name, gold_value = last_of_chain(canonical_latex(gold_answer))
        gold = plain_number(gold_value)
        if gold is None or (re.search("[A-Za-z]", gold_name) and not is_name(gold_name)):
            return None  # Not a number, or an equation between unknowns.
        name, value = last_of_chain(canonical_latex(_number_among_words(answer)))
        prediction = plain_number(value)
        if (is_name(gold_name) and name and _joined(gold_name) != _joined(name)) or clock_time(answer) is not None:
            return False
    if prediction is None:
        # Only a rounded gold can stand for something that is no plain number: 3.605551 for sqrt(13).
        return False if gold.exact or not answer else None
    # A division that is not worked out; a policy would learn to leave it standing.
    unfinished = prediction.division and gold.value.denominator == 1 and not gold.division
    return not unfinished and numbers_equal(gold, prediction)


def _joined(text: str) -> str:
    return "".join(text.split())


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
    if BOX.search(text):
        return last_box(text) or ""
    block = answer_block(text)
    return text.strip() if block is None else block


def _predicted_answer(text: str) -> str:
    """The answer in a completion, or the text itself when it is an answer alone."""
    marked = answer_block(text) is not None or BOX.search(text) or FINAL_ANSWER.search(text)
    if not marked:
        bare = "\n" not in text.strip() and not is_prose(text)
        return text.strip() if bare else (last_number(text) or "")
    return extract_answer(text) or ""


def _number_among_words(answer: str) -> str:
    """The number in "He has 48 pens", where there is no doubt which one is meant; any other answer as it is."""
    plain = unwrap_text(answer)
    if is_prose(plain) and not says_more_than_a_number(plain):
        numbers = numbers_in(plain)
        if len(numbers) == 1:
            return numbers[0]
    return answer
