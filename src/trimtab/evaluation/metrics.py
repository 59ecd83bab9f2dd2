"""pass@k and relatives, from counts of correct samples."""

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


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float | None:
    """Mean pass@k over problems, each a list of verdicts; None when a problem has fewer than k samples."""
    if not correct or any(len(verdicts) < k for verdicts in correct):
        return None
    return sum(pass_at_k(len(v), sum(v), k) for v in correct) / len(correct)
