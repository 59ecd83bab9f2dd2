"""pass@k and relatives, from the verdicts on a problem's samples.

A problem that has fewer than k samples has no value at k: None, never 1.0. n is always the number of samples that were
produced, not the number that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is correct, given that c of n were: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of arXiv 2107.03374 (section 2.1), as a product in log space.

    Args:
        n: samples produced for the problem.
        c: how many of them were correct.
        k: samples allowed.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    # The ratio does not change when c and k are exchanged: the product over the smaller one is the shorter.
    few, many = sorted((c, k))
    log_miss = math.fsum(math.log1p(-many / (n - i)) for i in range(few))
    # expm1 keeps the digits of a small probability.
    return -math.expm1(log_miss) if c else 0.0


def pass_at_k_per_problem(produced: Sequence[int], correct: Sequence[int], k: int) -> list[float | None]:
    """pass@k of each problem, computed once for every pair of counts that occurs.

    Args:
        produced: samples produced, a number for each problem.
        correct: how many of them were correct.
        k: samples allowed.

    Returns:
        One value for each problem; None where fewer than k samples were produced.

    Raises:
        ValueError: k below 1, lists of different lengths, or more correct samples than produced ones.
    """
    counts = list(zip(produced, correct, strict=True))
    values = {(n, c): pass_at_k(n, c, k) for n, c in set(counts) if has_enough(n, k)}
    return [values.get(pair) for pair in counts]


def first_k(verdicts: Sequence[bool], k: int) -> bool | None:
    """Whether any of a problem's first k samples is correct; None with fewer than k. What arXiv 2508.03772 tabulates.

    Its mean over problems estimates the same number as pass@k, with more noise: one choice of k samples, not all.
    """
    return any(verdicts[:k]) if has_enough(len(verdicts), k) else None


def mean_at_k(verdicts: Sequence[bool], k: int) -> float | None:
    """Share of a problem's first k samples that is correct; None with fewer than k. Also written avg@k."""
    return sum(map(bool, verdicts[:k])) / k if has_enough(len(verdicts), k) else None


def mean_over_problems(values: Sequence[float | None]) -> float | None:
    """Mean of one value for each problem; None without problems, or when one has no value.

    A mean over the problems that happen to have enough samples would be a mean over other problems at each k.
    """
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float | None:
    """Mean pass@k over problems, each a list of verdicts; None when a problem has fewer than k samples."""
    return mean_over_problems(pass_at_k_per_problem([len(v) for v in correct], [sum(v) for v in correct], k))


def has_enough(samples: int, k: int) -> bool:
    """Whether a problem with so many samples has a value at k. Raises ValueError when k is below 1."""
    if k < 1:
        raise ValueError(f"k is {k}: it counts samples, so it must be at least 1")
    return samples >= k
