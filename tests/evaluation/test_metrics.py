from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.evaluation.metrics import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),
        (4, 2, 2, 1 - 1 / 6),
        (5, 2, 3, 1 - 1 / 10),
        (5, 3, 3, 1.0),
        (10, 0, 10, 0.0),
        (10, 1, 10, 1.0),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-14)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_that_hold_a_correct_sample(case: tuple[int, int, int]) -> None:
    n, c, k = case
    choices = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@given(st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(1, n - 1))))
def test_pass_at_k_grows_with_the_correct_samples_and_with_k(case: tuple[int, int, int]) -> None:
    n, c, k = case
    assert pass_at_k(n, c, k) <= pass_at_k(n, c + 1, k) + 1e-12
    assert pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1) + 1e-12


def test_large_counts_keep_their_digits() -> None:
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-6)
    assert pass_at_k(10**6, 0, 1000) == 0.0
    assert pass_at_k(10**6, 500_000, 1000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs 0 <= c <= n and 1 <= k <= n"):
        pass_at_k(n, c, k)


def test_the_mean_is_over_problems_and_absent_when_one_has_too_few_samples() -> None:
    verdicts = [[True, False, False, False], [True, True], [False, False, False]]
    assert mean_pass_at_k(verdicts, 1) == pytest.approx((1 / 4 + 1 + 0) / 3)
    assert mean_pass_at_k(verdicts, 2) == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert mean_pass_at_k(verdicts, 3) is None
    assert mean_pass_at_k([], 1) is None
