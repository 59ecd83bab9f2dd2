from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.evaluation.metrics import (
    first_k,
    has_enough,
    mean_at_k,
    mean_over_problems,
    mean_pass_at_k,
    pass_at_k,
    pass_at_k_per_problem,
)


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


def test_each_problem_counts_the_samples_that_it_produced() -> None:
    assert pass_at_k_per_problem([4, 8, 4, 2], [2, 2, 2, 1], 4) == [1.0, pytest.approx(1 - 15 / 70), 1.0, None]
    assert pass_at_k_per_problem([], [], 4) == []


@given(st.lists(st.integers(0, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))), st.integers(1, 12))
def test_many_problems_at_once_give_what_each_gives_alone(counts: list[tuple[int, int]], k: int) -> None:
    alone = [pass_at_k(n, c, k) if k <= n else None for n, c in counts]
    assert pass_at_k_per_problem([n for n, _ in counts], [c for _, c in counts], k) == alone


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        pass_at_k_per_problem([4, 4], [1], 2)


def test_first_k_looks_at_the_first_k_samples_and_at_no_other() -> None:
    verdicts = [False, False, True, False]
    assert [first_k(verdicts, k) for k in (1, 2, 3, 4)] == [False, False, True, True]
    assert [mean_at_k(verdicts, k) for k in (1, 2, 3, 4)] == [0.0, 0.0, pytest.approx(1 / 3), 0.25]


def test_more_than_the_samples_there_are_has_no_value_even_when_all_are_correct() -> None:
    assert first_k([True, True], 3) is None
    assert mean_at_k([True, True], 3) is None
    assert pass_at_k_per_problem([2], [2], 3) == [None]
    assert first_k([], 1) is None


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_pass_at_k_is_the_mean_of_first_k_over_the_orders_of_the_samples(verdicts: list[bool]) -> None:
    orders = list(permutations(verdicts))
    for k in range(1, len(verdicts) + 1):
        mean = sum(bool(first_k(order, k)) for order in orders) / len(orders)
        assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(mean)


def test_a_mean_over_problems_needs_a_value_of_every_problem() -> None:
    assert mean_over_problems([1.0, 0.0, 0.5]) == 0.5
    assert mean_over_problems([1.0, None]) is None
    assert mean_over_problems([]) is None


@pytest.mark.parametrize("k", [0, -1])
def test_a_k_below_one_is_refused(k: int) -> None:
    for call in (lambda: first_k([True], k), lambda: mean_at_k([True], k), lambda: has_enough(1, k)):
        with pytest.raises(ValueError, match="at least 1"):
            call()
    with pytest.raises(ValueError, match="at least 1"):
        pass_at_k_per_problem([1], [1], k)
