import logging
from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.evaluation.majority import (
    answers_equal,
    class_verdicts,
    majority_at_k,
    majority_first_k,
    vote_classes,
)


def same_number(first: str, second: str) -> bool:
    return float(first) == float(second)


def never(first: str, second: str) -> bool:
    raise AssertionError(f"{first} and {second} were compared")


def problems(samples: int) -> st.SearchStrategy[tuple[list[int | None], list[bool]]]:
    """Classes numbered by appearance, as `vote_classes` numbers them, and a verdict for each."""

    def numbered(letters: list[str | None]) -> st.SearchStrategy[tuple[list[int | None], list[bool]]]:
        numbers: dict[str, int] = {}
        classes = [None if x is None else numbers.setdefault(x, len(numbers)) for x in letters]
        correct = st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers))
        return correct.map(lambda verdicts: (classes, verdicts))

    return st.lists(st.sampled_from([None, *"abcd"]), min_size=1, max_size=samples).flatmap(numbered)


def slow_majority(votes: Sequence[int | None], correct: Sequence[bool]) -> bool:
    """Count by hand: the most votes, among equals the first to appear, None never."""
    given_answers = [vote for vote in votes if vote is not None]
    if not given_answers:
        return False
    return correct[max(given_answers, key=lambda vote: (given_answers.count(vote), -given_answers.index(vote)))]


def test_equal_numbers_in_other_spellings_vote_together() -> None:
    assert vote_classes(["0.75", "3/4", "1/2", r"\frac{3}{4}", "75%", None, "0.5"]) == [0, 0, 1, 0, 0, None, 1]


def test_expressions_are_compared_as_mathematics() -> None:
    answers = [r"\sqrt{3}/2", r"\frac{\sqrt{3}}{2}", r"\sqrt{2}/2", "(2,5)", "(5,2)", r"\left(2, 5\right)"]
    assert vote_classes(answers) == [0, 0, 1, 2, 3, 2]


def test_a_sum_left_standing_does_not_vote_with_its_result() -> None:
    assert not answers_equal("15+2-3", "14")
    assert not answers_equal("14", "15+2-3")
    assert answers_equal("14.0", "14")


def test_classes_are_numbered_in_the_order_of_appearance() -> None:
    assert vote_classes(["9", "7", "7", "7.0", "9"], same_number) == [0, 1, 1, 1, 0]


def test_no_answer_and_blank_answers_have_no_class() -> None:
    assert vote_classes([None, "", "  ", "3"], never) == [None, None, None, 0]
    assert vote_classes([], never) == []


def test_equal_spellings_need_no_comparison() -> None:
    assert vote_classes(["x+1", " x+1", "x+1 "], never) == [0, 0, 0]


def test_comparisons_grow_with_the_classes_and_not_with_the_samples() -> None:
    compared: list[tuple[str, str]] = []

    def equal(first: str, second: str) -> bool:
        compared.append((first, second))
        return same_number(first, second)

    assert vote_classes(["1", "2", "1.0"] * 1000, equal) == [0, 1, 0] * 1000
    assert compared == [("1", "1"), ("2", "2"), ("1", "2"), ("1.0", "1.0"), ("1", "1.0")]


def test_an_answer_that_does_not_equal_itself_is_compared_with_no_other() -> None:
    compared: list[tuple[str, str]] = []

    def equal(first: str, second: str) -> bool:
        compared.append((first, second))
        return "slow" not in (first, second) and first == second

    assert vote_classes(["slow", "slow", "1", "2"], equal) == [0, 0, 1, 2]
    assert [pair for pair in compared if "slow" in pair] == [("slow", "slow")]


def test_past_the_limit_of_comparisons_the_rarest_spellings_vote_alone(caplog: pytest.LogCaptureFixture) -> None:
    answers = ["8", "1.0", "1", "1", "2", "2", "2", "2.0", "2.0"]
    calls = 0

    def equal(first: str, second: str) -> bool:
        nonlocal calls
        calls += 1
        return same_number(first, second)

    with caplog.at_level(logging.WARNING, logger="trimtab"):
        assert vote_classes(answers, equal, max_comparisons=6) == [0, 1, 2, 2, 3, 3, 3, 3, 3]
    assert calls <= 6
    assert "2 of 5 different answers to one problem vote by their spelling alone" in caplog.text
    caplog.clear()
    assert vote_classes(answers, equal) == [0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert not caplog.records


def test_all_pairs_of_64_different_answers_are_within_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    answers = [str(i) for i in range(63)] + ["62.0"]
    assert vote_classes(answers, same_number) == [*range(63), 62]
    assert not caplog.records


def test_where_equality_is_not_transitive_the_most_frequent_spelling_decides() -> None:
    # 35% equals both 35 and 0.35, which do not equal each other.
    assert vote_classes(["0.35", "35", "35%", "35%"]) == [0, 0, 0, 0]
    assert vote_classes(["0.35", "35", "35", "35%"]) == [0, 1, 1, 1]


def test_a_class_has_the_verdict_of_most_of_its_members() -> None:
    assert class_verdicts([0, 1, 0, 0, None], [False, True, True, True, False]) == [True, True]
    assert class_verdicts([0, 0, 1, 1], [True, False, False, True]) == [True, False]
    assert class_verdicts([None, None], [False, False]) == []


def test_no_answer_never_wins_even_when_it_is_the_most_frequent() -> None:
    classes, correct = [None, None, None, 0, None], [True]
    assert majority_first_k(classes, correct, 5) is True
    assert majority_at_k(classes, correct, 5) == 1.0
    # Of the ten pairs four hold the one answer.
    assert majority_at_k(classes, correct, 2) == pytest.approx(4 / 10)
    assert majority_first_k(classes, correct, 3) is False
    assert majority_at_k([None, None], [], 2) == 0.0
    assert majority_first_k([None, None], [], 2) is False


def test_of_equal_votes_the_answer_that_appeared_first_wins() -> None:
    assert majority_first_k([0, 1, 1, 0], [True, False], 4) is True
    assert majority_first_k([0, 1, 1, 0], [False, True], 4) is False
    assert majority_first_k([None, 0, 1], [True, False], 3) is True


def test_over_all_orders_equal_votes_share_the_win() -> None:
    assert majority_at_k([0, 1, 1, 0], [True, False], 4) == 0.5
    assert majority_at_k([0, 1, 2], [False, True, False], 3) == pytest.approx(1 / 3)


def test_majority_at_one_is_the_share_of_correct_samples() -> None:
    classes = [0, 1, 0, None, 2] * 300
    assert majority_at_k(classes, [True, False, True], 1, resamples=10) == pytest.approx(3 / 5)


def test_a_clear_majority_by_hand() -> None:
    # 3 right, 2 wrong (alike): of the 10 triples, 1 has 3 right, 6 have 2 right, 3 have 1 right.
    assert majority_at_k([0, 0, 0, 1, 1], [True, False], 3) == pytest.approx(7 / 10)


@settings(max_examples=60, deadline=None)
@given(problems(6))
def test_majority_at_k_is_the_mean_over_all_subsets_and_orders(case: tuple[list[int | None], list[bool]]) -> None:
    classes, correct = case
    for k in range(1, len(classes) + 1):
        wins = [slow_majority(order, correct) for chosen in combinations(classes, k) for order in permutations(chosen)]
        assert majority_at_k(classes, correct, k) == pytest.approx(sum(wins) / len(wins))


@given(problems(20))
def test_first_k_agrees_with_counting_by_hand(case: tuple[list[int | None], list[bool]]) -> None:
    classes, correct = case
    for k in range(1, len(classes) + 1):
        assert majority_first_k(classes, correct, k) is slow_majority(classes[:k], correct)


@settings(max_examples=15, deadline=None)
@given(problems(12), st.integers(2, 10), st.integers(0, 2**32))
def test_resampling_comes_near_the_exact_value(case: tuple[list[int | None], list[bool]], k: int, seed: int) -> None:
    classes, correct = case
    exact = majority_at_k(classes, correct, k, resamples=1000)
    drawn = majority_at_k(classes, correct, k, resamples=400, seed=seed)
    if k > len(classes):
        assert exact is None
        assert drawn is None
    else:
        assert exact is not None
        assert drawn == pytest.approx(exact, abs=6 * 0.5 / 400**0.5)


def test_resampling_draws_without_replacement() -> None:
    # 12 right of 20 are a majority of any 19, whichever is left out, but not of 19 draws with replacement.
    classes = [0] * 12 + [1] * 8
    assert majority_at_k(classes * 2, [True, False], 37, resamples=50) == 1.0


def test_one_seed_gives_one_value_and_another_seed_another() -> None:
    classes, correct = [i % 7 for i in range(64)], [True] + [False] * 6
    values = [majority_at_k(classes, correct, 16, resamples=200, seed=seed) for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]


def test_more_votes_than_samples_have_no_value() -> None:
    assert majority_at_k([0, 0], [True], 3) is None
    assert majority_first_k([0, 0], [True], 3) is None


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        majority_at_k([0], [True], 0)
    with pytest.raises(ValueError, match="at least 1"):
        majority_first_k([0], [True], 0)
    with pytest.raises(ValueError, match="resamples is 0"):
        majority_at_k([0], [True], 1, resamples=0)
