import math
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from trimtab.pivotal.records import difference_interval
from trimtab.pivotal.statistics import (
    Counts,
    difference_p_value,
    probability_above,
    probability_apart,
    probability_equal,
    probability_within,
    q_values,
)

trials = st.integers(0, 40)
counts = trials.flatmap(lambda n: st.integers(0, n).map(lambda s: Counts(s, n)))


def test_the_prior_probability_of_a_difference_is_the_area_of_two_triangles() -> None:
    none = Counts(0, 0)
    for margin in (0.1, 0.2, 0.5, 0.8):
        assert probability_apart(none, none, margin) == pytest.approx((1 - margin) ** 2, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(counts, counts, st.floats(0.01, 0.99))
def test_the_posterior_of_a_difference_equals_a_fine_riemann_sum(first: Counts, second: Counts, margin: float) -> None:
    y = (np.arange(20_000) + 0.5) / 20_000
    density = beta.pdf(y, second.successes + 1, second.trials - second.successes + 1)
    above = beta.sf(y + margin, first.successes + 1, first.trials - first.successes + 1)
    assert probability_above(first, second, margin) == pytest.approx(float((density * above).mean()), abs=1e-4)


@given(counts, counts, st.floats(0.0, 0.99))
def test_swapping_the_rates_mirrors_the_posterior(first: Counts, second: Counts, margin: float) -> None:
    mirrored = [Counts(count.trials - count.successes, count.trials) for count in (second, first)]
    assert probability_above(first, second, margin) == pytest.approx(probability_above(*mirrored, margin), abs=1e-9)


def test_a_known_rate_is_compared_with_the_posterior_of_the_other() -> None:
    known, other = Counts(1, 1, exact=True), Counts(2, 10)
    assert probability_above(known, other, 0.5) == pytest.approx(float(beta.cdf(0.5, 3, 9)))
    assert probability_above(other, Counts(0, 1, exact=True), 0.3) == pytest.approx(float(beta.sf(0.3, 3, 9)))
    assert probability_above(known, Counts(0, 1, exact=True), 0.9) == 1.0
    assert known + other == known


def test_equality_weighs_one_common_rate_against_two_by_their_marginal_likelihoods() -> None:
    # Probability of the very sequence of outcomes: the integral of p^s (1 - p)^f, a beta function.
    def marginal(successes: int, failures: int) -> float:
        return math.factorial(successes) * math.factorial(failures) / math.factorial(successes + failures + 1)

    one, two = marginal(5, 7), marginal(2, 4) * marginal(3, 3)
    expected = 0.7 * one / (0.7 * one + 0.3 * two)
    assert probability_equal(Counts(2, 6), Counts(3, 6), 0.7) == pytest.approx(expected)
    assert probability_equal(Counts(2, 6), Counts(1, 1, exact=True), 0.7) == 0.0


@pytest.mark.parametrize(("first", "second", "margin"), [(6, 8, 0.0), (8, 5, 0.2), (12, 12, 0.3)])
def test_the_exact_test_is_never_wrong_more_often_than_it_says(first: int, second: int, margin: float) -> None:
    outcomes = list(product(range(first + 1), range(second + 1)))
    p_values = np.array([difference_p_value(Counts(x, first), Counts(y, second), margin) for x, y in outcomes])
    for rate in np.linspace(0, 1 - margin, 21):
        for gap in (margin, margin / 2):
            chance = np.array([binom.pmf(x, first, rate + gap) * binom.pmf(y, second, rate) for x, y in outcomes])
            for level in (0.01, 0.05, 0.2):
                # The edge is searched on a grid, so a little may be missed between its points.
                assert chance[p_values <= level].sum() <= level * 1.02


def test_the_exact_test_against_a_known_rate_is_the_binomial_tail() -> None:
    known = Counts(1, 1, exact=True)
    assert difference_p_value(known, Counts(3, 10), 0.2) == pytest.approx(float(binom.cdf(3, 10, 0.8)))
    assert difference_p_value(Counts(7, 10), Counts(0, 1, exact=True), 0.2) == pytest.approx(
        float(binom.sf(6, 10, 0.2))
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.01, 0.5))
@example([0.01, 0.04, 0.03], 0.045)
def test_q_values_reject_what_the_step_up_procedure_rejects(p_values: list[float], level: float) -> None:
    ordered = sorted(p_values)
    passing = [rank for rank, p in enumerate(ordered, 1) if p <= level * rank / len(ordered)]
    limit = ordered[passing[-1] - 1] if passing else -1.0
    q = q_values(p_values)
    for p, own in zip(p_values, q, strict=True):
        if abs(own - level) > 1e-9:
            assert (own <= level) == (p <= limit)


def test_intervals_hold_their_share_of_the_posterior() -> None:
    low, high = Counts(3, 12).interval()
    assert probability_within(Counts(3, 12), low, high) == pytest.approx(0.95)
    low, high = difference_interval(Counts(3, 12), Counts(9, 12))
    assert low < -0.5 < high < 0
    assert probability_above(Counts(9, 12), Counts(3, 12), -high) == pytest.approx(0.975, abs=1e-3)


def test_an_interval_holds_its_own_estimate_even_where_all_rollouts_succeed() -> None:
    assert Counts(16, 16).interval()[1] == 1.0 and Counts(0, 16).interval()[0] == 0.0
    low, high = difference_interval(Counts(16, 16), Counts(0, 16))
    assert 0.6 < low < 0.9 and high == 1.0
