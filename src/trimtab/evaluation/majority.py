"""maj@k, also called self-consistency (arXiv 2203.11171): the answer that most of k samples give.

`vote_classes` groups a problem's answers once; the two counts of votes then work on class numbers alone.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from trimtab.evaluation.metrics import has_enough
from trimtab.tasks.verify import verify

logger = logging.getLogger("trimtab")

# Enough to compare all pairs of 64 different spellings.
MAX_COMPARISONS = 2100
# An ordinary comparison takes milliseconds; one that needs seconds would not succeed in more.
COMPARISON_SECONDS = 2.0


def answers_equal(first: str, second: str) -> bool:
    """Whether two answers are mathematically equal whichever of them is taken for the gold (see `verify`).

    Both directions, because a sum left standing (15+2-3) is accepted as a gold answer and refused as a prediction.
    """
    return (
        verify(gold=first, prediction=second, time_limit=COMPARISON_SECONDS) is True
        and verify(gold=second, prediction=first, time_limit=COMPARISON_SECONDS) is True
    )


def vote_classes(
    answers: Sequence[str | None],
    equal: Callable[[str, str], bool] = answers_equal,
    *,
    max_comparisons: int = MAX_COMPARISONS,
) -> list[int | None]:
    """Group a problem's answers, so that 0.75 and 3/4 vote together.

    Answers with the same spelling share a class without a comparison. The spellings, the most frequent first, are then
    compared with the most frequent spelling of every class there is, and join the first that is equal. So where
    equality is not transitive (35% equals 35 and 0.35) the outcome is still repeatable. A spelling that does not equal
    itself (it cannot be parsed, or takes too long) is compared with no other.

    Args:
        answers: the extracted answer of each sample, in the order of sampling; None or blank for no answer.
        equal: whether two spellings are the same answer.
        max_comparisons: calls of `equal` for this problem; when they are used up, the spellings left over, the rarest,
            vote by their spelling alone, and a warning says so.

    Returns:
        The class of each answer, numbered from 0 in the order in which the classes appear; None for no answer.
    """
    spellings = [answer.strip() if answer else "" for answer in answers]
    # most_common keeps the order of appearance among equally frequent spellings.
    by_frequency = [spelling for spelling, _ in Counter(spellings).most_common() if spelling]
    leader_of: dict[str, str] = {}
    comparable: list[str] = []
    comparisons = unplaced = 0
    for spelling in by_frequency:
        leader_of[spelling] = spelling
        if len(by_frequency) == 1:
            break
        if comparisons + len(comparable) + 1 > max_comparisons:
            unplaced += 1
            continue
        comparisons += 1
        if not equal(spelling, spelling):
            continue
        for leader in comparable:
            comparisons += 1
            if equal(leader, spelling):
                leader_of[spelling] = leader
                break
        else:
            comparable.append(spelling)
    if unplaced:
        logger.warning(
            "%d of %d different answers to one problem vote by their spelling alone: the limit is %d comparisons",
            unplaced,
            len(by_frequency),
            max_comparisons,
        )
    numbers: dict[str, int] = {}
    return [numbers.setdefault(leader_of[s], len(numbers)) if s else None for s in spellings]


def class_verdicts(classes: Sequence[int | None], verdicts: Sequence[bool]) -> list[bool]:
    """Whether each class is correct: the verdict of most of its members, on a tie of the one that appeared first.

    Members can differ, since equality to the gold answer is not quite transitive.

    Args:
        classes: from `vote_classes`.
        verdicts: of the same samples.

    Returns:
        A verdict for each class number.
    """
    members: dict[int, list[bool]] = {}
    for number, verdict in zip(classes, verdicts, strict=True):
        if number is not None:
            members.setdefault(number, []).append(bool(verdict))
    ordered = [members[number] for number in range(len(members))]
    return [2 * sum(own) > len(own) or (2 * sum(own) == len(own) and own[0]) for own in ordered]


def majority_first_k(classes: Sequence[int | None], class_correct: Sequence[bool], k: int) -> bool | None:
    """Whether the majority of a problem's first k samples is correct.

    Of classes with equally many votes the one that appeared first wins. "No answer" never wins; when none of the k
    samples has an answer, the majority is wrong.

    Returns:
        None when the problem has fewer than k samples.

    Raises:
        ValueError: k is below 1.
    """
    if not has_enough(len(classes), k):
        return None
    votes = Counter(number for number in classes[:k] if number is not None)
    # most_common keeps the order of appearance among equals.
    return bool(class_correct[votes.most_common(1)[0][0]]) if votes else False


def majority_at_k(
    classes: Sequence[int | None],
    class_correct: Sequence[bool],
    k: int,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> float | None:
    """Expectation of `majority_first_k` over all choices of k of the n samples and all orders of the chosen.

    Over the orders, each of the classes with equally many votes is the first as often as the others; so on a tie the
    value is the share of the tied classes that is correct, and k = 1 gives the share of correct samples.

    Exact when there are at most `resamples` choices, or n (k = 1, n - 1 and n are always exact); otherwise the mean of
    `resamples` choices without replacement, with a standard error of at most 0.5 / sqrt(resamples).

    Args:
        classes: from `vote_classes`; None never wins.
        class_correct: from `class_verdicts`.
        k: samples that vote.
        resamples: choices drawn.
        seed: of the draws; give each problem its own (`derive_seed(seed, problem)`), so that errors average out.

    Returns:
        A value from 0 to 1; None when the problem has fewer than k samples.

    Raises:
        ValueError: k or resamples is below 1.
    """
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}: it must be at least 1")
    n = len(classes)
    if not has_enough(n, k):
        return None
    # The last column collects the samples without an answer.
    columns_n = np.array([len(class_correct) if number is None else number for number in classes])
    counts_C = np.bincount(columns_n, minlength=len(class_correct) + 1)
    if math.comb(n, k) <= max(resamples, n):
        chosen_RK = columns_n[np.array(list(itertools.combinations(range(n), k)))]
        votes_RC = np.stack([(chosen_RK == column).sum(axis=1) for column in range(len(counts_C))], axis=1)
    else:
        votes_RC = np.random.default_rng(seed).multivariate_hypergeometric(counts_C, k, size=resamples, method="count")
    return _mean_of_winners(votes_RC[:, :-1], np.asarray(class_correct, dtype=bool))


def _mean_of_winners(votes_RC: npt.NDArray[np.int64], correct_C: npt.NDArray[np.bool_]) -> float:
    """Mean over R votes of the share of the winners that is correct; 0 for a vote in which nobody gave an answer."""
    if votes_RC.shape[1] == 0:
        return 0.0
    most_R1 = votes_RC.max(axis=1, keepdims=True)
    wins_RC = (votes_RC == most_R1) & (most_R1 > 0)
    return float(np.mean(wins_RC[:, correct_C].sum(axis=1) / np.maximum(wins_RC.sum(axis=1), 1)))
