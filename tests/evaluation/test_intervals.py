import math
import warnings
from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from trimtab.errors import InputError
from trimtab.evaluation._limits import sign_flip_p_value
from trimtab.evaluation.intervals import (
    Comparison,
    IdenticalSeedsWarning,
    Interval,
    bootstrap_interval,
    holm,
    paired_comparison,
    paired_comparison_over_seeds,
    seeds_interval,
    warn_of_identical_seeds,
)

Array = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Array]


def by_problem(values: Array) -> dict[int, float | None]:
    return dict(enumerate(values.tolist()))


def sampled_shares(a: float, b: float) -> Draw:
    """Shares of 16 samples that are correct, of problems whose difficulty follows a beta distribution."""
    return lambda rng, n: rng.binomial(16, rng.beta(a, b, n)) / 16


def verdicts(share: float) -> Draw:
    return lambda rng, n: rng.binomial(1, share, n).astype(float)


@pytest.mark.parametrize(
    ("draw", "truth", "n", "covered"),
    [
        # The table of docs/statistics.md: how often 95% intervals held the truth, in 1000 data sets.
        (sampled_shares(0.3, 0.3), 1 / 2, 30, 0.953),
        (sampled_shares(0.3, 0.3), 1 / 2, 100, 0.970),
        (sampled_shares(2, 2), 1 / 2, 30, 0.928),
        (sampled_shares(2, 2), 1 / 2, 100, 0.945),
        (sampled_shares(0.1, 1), 1 / 11, 10, 0.804),
        (sampled_shares(0.1, 1), 1 / 11, 30, 0.902),
        (sampled_shares(0.1, 1), 1 / 11, 100, 0.942),
        (verdicts(0.02), 0.02, 30, 0.966),
        (verdicts(0.02), 0.02, 100, 0.935),
        (verdicts(0.3), 0.3, 30, 0.927),
        (verdicts(0.3), 0.3, 100, 0.931),
    ],
)
def test_intervals_over_problems_cover_the_truth_as_often_as_documented(
    draw: Draw, truth: float, n: int, covered: float
) -> None:
    hits = 0
    for seed in range(1000):
        interval = bootstrap_interval(draw(np.random.default_rng(seed), n).tolist(), resamples=1000, seed=seed)
        assert interval is not None
        hits += interval.low <= truth <= interval.high
    assert hits / 1000 == pytest.approx(covered, abs=0.01)


def test_the_bootstrap_agrees_with_scipys() -> None:
    values = np.random.default_rng(3).beta(0.4, 2, 80)
    ours = bootstrap_interval(values.tolist(), resamples=20_000)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="BCa", rng=1).confidence_interval
    assert ours is not None
    assert (ours.low, ours.high) == (pytest.approx(theirs.low, abs=2e-3), pytest.approx(theirs.high, abs=2e-3))
    assert (ours.level, ours.method) == (0.95, "bootstrap over problems")


def test_an_interval_is_repeatable_and_wider_at_a_higher_level() -> None:
    values = [0.0, 0.25, 0.5, 0.5, 1.0, 0.125]
    narrow, wide = bootstrap_interval(values, level=0.8), bootstrap_interval(values, level=0.99)
    assert narrow == bootstrap_interval(values, level=0.8)
    assert narrow is not None
    assert wide is not None
    assert wide.low < narrow.low < np.mean(values) < narrow.high < wide.high
    many = np.random.default_rng(0).random(40).tolist()
    assert bootstrap_interval(many, seed=1) != bootstrap_interval(many, seed=2)


def test_no_problem_solved_of_thirty_is_no_certainty() -> None:
    none, all_of_them = bootstrap_interval([0.0] * 30), bootstrap_interval([1.0] * 30)
    assert none is not None
    assert all_of_them is not None
    z2 = 1.959964**2
    assert (none.low, none.high) == (0.0, pytest.approx(z2 / (30 + z2), abs=1e-6))
    assert (all_of_them.low, all_of_them.high) == (pytest.approx(30 / (30 + z2), abs=1e-6), 1.0)
    assert none.method == "equal values, bound over problems"


def test_equal_shares_of_all_problems_allow_for_another_problem() -> None:
    interval = bootstrap_interval([0.5] * 30)
    assert interval is not None
    assert interval.low == pytest.approx(0.5 * (1 - 0.113513), abs=1e-5)
    assert interval.high == pytest.approx(0.5 * (1 + 0.113513), abs=1e-5)


def test_one_solved_of_thirty_is_more_than_none() -> None:
    limits = [bootstrap_interval([1.0] * solved + [0.0] * (30 - solved)) for solved in range(31)]
    assert all(limit is not None for limit in limits)
    assert [limit.high for limit in limits if limit] == sorted(limit.high for limit in limits if limit)
    assert [limit.low for limit in limits if limit] == sorted(limit.low for limit in limits if limit)


@given(st.integers(2, 60).flatmap(lambda n: st.tuples(st.integers(1, n - 1), st.just(n))))
def test_verdicts_get_wilsons_interval(case: tuple[int, int]) -> None:
    solved, n = case
    ours = bootstrap_interval([1.0] * solved + [0.0] * (n - solved))
    theirs = stats.binomtest(solved, n).proportion_ci(method="wilson")
    assert ours == Interval(
        pytest.approx(theirs.low, abs=1e-12), pytest.approx(theirs.high, abs=1e-12), 0.95, "Wilson over problems"
    )


def test_where_nothing_can_be_said_there_is_no_interval() -> None:
    assert bootstrap_interval([]) is None
    assert bootstrap_interval([0.7]) is None
    assert bootstrap_interval([250.0] * 30) is None


def test_values_without_bounds_have_an_interval_too() -> None:
    lengths = np.random.default_rng(0).normal(250, 40, 200)
    interval = bootstrap_interval(lengths.tolist())
    assert interval is not None
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * lengths.std() / 200**0.5, rel=0.05)


def test_the_interval_over_seeds_by_hand() -> None:
    # Mean 0.5, standard deviation 0.1, t(0.975, 2) = 4.302653.
    interval = seeds_interval([0.4, 0.5, 0.6])
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert interval == Interval(
        pytest.approx(0.5 - half, abs=1e-6), pytest.approx(0.5 + half, abs=1e-6), 0.95, "Student t over seeds"
    )


def test_one_seed_has_no_interval_and_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seeds_interval([0.4]) is None
        assert seeds_interval([]) is None


def test_seeds_with_one_value_warn_and_have_no_interval() -> None:
    with pytest.warns(IdenticalSeedsWarning, match=r"3 seeds gave exactly the same value, 0\.4"):
        assert seeds_interval([0.4, 0.4, 0.4]) is None


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_over_seeds_cover_the_truth(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    intervals = [seeds_interval(rng.normal(0.5, 0.03, seeds).tolist()) for _ in range(1000)]
    assert 0.93 <= np.mean([i is not None and i.low <= 0.5 <= i.high for i in intervals]) <= 0.97


def test_identical_outputs_of_two_seeds_are_named() -> None:
    with pytest.warns(IdenticalSeedsWarning, match="seeds 0 and 7"):
        assert warn_of_identical_seeds({0: ["4", "5"], 3: ["4", "6"], 7: ["4", "5"]}) == [(0, 7)]


def test_different_outputs_and_no_outputs_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_of_identical_seeds({0: ["4", "5"], 1: ["5", "4"], 2: [], 3: []}) == []


def test_a_comparison_by_hand() -> None:
    found = paired_comparison({"p": 1.0, "q": 0.5, "r": 0.75}, {"r": 0.5, "p": 0.25, "q": 0.25})
    # Differences 3/4, 1/4, 1/4: two of the eight patterns of signs reach their sum.
    assert found.difference == pytest.approx(5 / 12)
    assert found.p_value == 2 / 8
    assert found.low is not None
    assert found.high is not None
    assert 0.25 <= found.low < 5 / 12 < found.high <= 0.75
    assert (found.problems, found.left_out, found.method) == (3, (), "bootstrap over problems; sign-flip test")


def test_exchanged_runs_give_the_mirrored_comparison() -> None:
    rng = np.random.default_rng(5)
    a, b = by_problem(rng.binomial(8, 0.5, 12) / 8), by_problem(rng.binomial(8, 0.4, 12) / 8)
    forth, back = paired_comparison(a, b), paired_comparison(b, a)
    assert forth.difference == -back.difference
    assert forth.p_value == back.p_value
    assert forth.low == pytest.approx(-(back.high or 0), abs=0.02)


def test_a_problem_without_a_value_in_one_run_is_left_out_and_named() -> None:
    found = paired_comparison({1: 1.0, 2: None, 3: 0.5, 4: 0.25}, {1: 0.5, 2: 0.5, 3: None, 4: 0.0})
    assert (found.problems, found.left_out, found.difference) == (2, (2, 3), 0.375)


def test_runs_on_different_problems_are_refused_and_the_problems_named() -> None:
    with pytest.raises(InputError, match=r"2 in one run only \('q', 'r'\)"):
        paired_comparison({"p": 1.0, "q": 1.0}, {"p": 1.0, "r": 0.0})


def test_runs_without_a_common_value_are_refused() -> None:
    with pytest.raises(InputError, match="no problem has a value in every run, of 2"):
        paired_comparison({1: None, 2: 0.5}, {1: 0.5, 2: None})


def test_two_runs_that_solve_nothing_do_not_prove_that_they_are_equal() -> None:
    nothing = by_problem(np.zeros(30))
    found = paired_comparison(nothing, nothing)
    assert found.low is not None
    assert found.high is not None
    assert found.p_value == 1.0
    assert found.high == -found.low > 0.05


def test_equal_differences_of_all_problems_allow_for_another_problem() -> None:
    found = paired_comparison(by_problem(np.full(10, 0.7)), by_problem(np.full(10, 0.4)))
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0 < 0.3 < found.high
    assert found.p_value == 2 / 2**10


def test_one_problem_has_no_interval_and_no_significance() -> None:
    found = paired_comparison({1: 1.0}, {1: 0.0})
    assert (found.low, found.high, found.p_value, found.problems) == (None, None, 1.0, 1)


def test_verdicts_are_compared_as_bonett_and_price_do_by_hand() -> None:
    # 6 of 30 problems for the first run, none for the second: shares 7/32 and 1/32.
    found = paired_comparison(by_problem(np.repeat([1.0, 0.0], [6, 24])), by_problem(np.zeros(30)))
    half = 1.959964 * math.sqrt((8 / 32 - (6 / 32) ** 2) / 32)
    assert found.low == pytest.approx(6 / 32 - half, abs=1e-6)
    assert found.high == pytest.approx(6 / 32 + half, abs=1e-6)
    assert found.difference == pytest.approx(0.2)


@settings(deadline=None)
@given(st.integers(0, 8), st.integers(0, 8))
def test_for_verdicts_the_test_is_mcnemars(better: int, worse: int) -> None:
    exact = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert sign_flip_p_value([1.0] * better + [-1.0] * worse + [0.0] * 5) == pytest.approx(exact)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-8, 8), max_size=8))
def test_the_exact_test_counts_all_patterns_of_signs(eighths: list[int]) -> None:
    sums = [
        abs(sum(s * d for s, d in zip(signs, eighths, strict=True))) for signs in product((1, -1), repeat=len(eighths))
    ]
    expected = sum(total >= abs(sum(eighths)) for total in sums) / len(sums)
    # Thirds of eighths are no binary fractions: ties must survive the rounding.
    assert sign_flip_p_value([d / 24 for d in eighths]) == pytest.approx(expected)


def test_random_signs_come_near_the_exact_value_and_never_give_zero() -> None:
    differences = np.random.default_rng(4).normal(0.2, 1, 20)
    signs = 2 * ((np.arange(2**20)[:, None] >> np.arange(20)) & 1).astype(np.int8) - 1
    exact = np.mean(np.abs(signs @ differences) >= abs(differences.sum()))
    assert sign_flip_p_value(differences.tolist()) == pytest.approx(exact, abs=0.02)
    assert sign_flip_p_value([1.0] * 100, resamples=999) == 1 / 1000


def compare_at_random(seed: int, effect: float, problems: int = 60) -> Comparison:
    rng = np.random.default_rng(seed)
    # Continuous values: shares of few samples can tie, and then p-values are a little larger than uniform.
    difficulty, own = rng.uniform(0.2, 0.8, problems), rng.uniform(-0.1, 0.1, problems)
    a, b = (difficulty + shift + rng.normal(0, 0.1, problems) for shift in (effect + own, 0.0))
    return paired_comparison(by_problem(a), by_problem(b), resamples=999, seed=seed)


def test_p_values_are_uniform_where_nothing_differs() -> None:
    p_values = [compare_at_random(seed, 0.0).p_value for seed in range(500)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.05


def test_p_values_are_small_and_intervals_hold_the_effect_where_one_exists() -> None:
    found = [compare_at_random(seed, 0.07) for seed in range(500)]
    assert np.mean([c.p_value <= 0.05 for c in found]) > 0.8
    assert 0.92 <= np.mean([c.low is not None and c.low <= 0.07 <= (c.high or 0) for c in found]) <= 0.98


@pytest.mark.parametrize(("n", "share", "other"), [(30, 0.05, 0.05), (30, 0.15, 0.05), (100, 0.02, 0.02)])
def test_comparisons_of_verdicts_cover_the_truth_when_few_problems_differ(n: int, share: float, other: float) -> None:
    hits = 0
    for seed in range(500):
        place = np.random.default_rng([seed, n]).random(n)
        a, b = (place < share).astype(float), ((place >= share) & (place < share + other)).astype(float)
        found = paired_comparison(by_problem(a), by_problem(b), resamples=1)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= share - other <= found.high
    assert hits / 500 >= 0.94


def trained(rng: np.random.Generator, base: Array, seeds: int, spread: float) -> list[dict[int, float | None]]:
    """Runs of one method: a shift of each seed, noise of each problem, 16 samples a problem."""
    shares = base + rng.normal(0, spread, (seeds, 1)) + rng.normal(0, 0.05, (seeds, len(base)))
    return [by_problem(row) for row in rng.binomial(16, np.clip(shares, 0, 1)) / 16]


@pytest.mark.parametrize(
    ("seeds", "n", "spread", "lowest", "highest"),
    [(2, 30, 0.1, 0.92, 0.98), (3, 30, 0.1, 0.92, 0.98), (3, 200, 0.02, 0.92, 0.98), (3, 30, 0.0, 0.96, 1.0)],
)
def test_comparisons_over_seeds_cover_the_truth(
    seeds: int, n: int, spread: float, lowest: float, highest: float
) -> None:
    found = []
    for draw in range(500):
        rng = np.random.default_rng([draw, n, seeds])
        base, own = rng.uniform(0.2, 0.8, n), rng.normal(0, 0.05, n)
        a, b = trained(rng, base + own / 2, seeds, spread), trained(rng, base - own / 2, seeds, spread)
        found.append(paired_comparison_over_seeds(a, b))
    covered = np.mean([c.low is not None and c.low <= 0 <= (c.high or -1) for c in found])
    assert lowest <= covered <= highest
    # Interval and p-value are one statement.
    assert covered == np.mean([c.p_value >= 0.05 for c in found])


def test_a_comparison_over_seeds_by_hand() -> None:
    a = [{"p": 0.5, "q": 0.7}, {"p": 0.7, "q": 0.9}]
    b = [{"p": 0.2, "q": 0.3}, {"p": 0.4, "q": 0.5}]
    found = paired_comparison_over_seeds(a, b)
    # Means over problems 0.6, 0.8 and 0.25, 0.45: variances 0.02 / 2 each. Differences of problems 0.3, 0.4: 0.005 / 2.
    error = math.sqrt(0.01 + 0.01 + 0.0025)
    freedom = 0.0225**2 / (0.01**2 + 0.01**2 + 0.0025**2)
    assert found.difference == pytest.approx(0.35)
    assert found.p_value == pytest.approx(2 * stats.t.sf(0.35 / error, freedom))
    assert found.low == pytest.approx(0.35 - stats.t.ppf(0.975, freedom) * error)
    assert (found.problems, found.method) == (2, "Student t over problems and seeds (2 and 2)")


def test_seeds_may_be_more_on_one_side_and_missing_problems_are_named() -> None:
    a = [{1: 0.5, 2: 0.75, 3: None}, {1: 0.25, 2: 0.5, 3: 1.0}]
    b = [{1: 0.5, 2: 0.25, 3: 0.5}, {1: 0.0, 2: 0.5, 3: 0.25}, {1: 0.25, 2: 0.0, 3: 0.0}]
    found = paired_comparison_over_seeds(a, b)
    assert (found.problems, found.left_out) == (2, (3,))
    assert found.difference == pytest.approx(0.5 - 0.25)


def test_a_single_seed_on_a_side_is_refused() -> None:
    with pytest.raises(InputError, match="got 1 and 2 runs: give at least two on each side"):
        paired_comparison_over_seeds([{1: 0.5}], [{1: 0.5}, {1: 0.25}])


def test_seeds_on_different_problems_are_refused() -> None:
    with pytest.raises(InputError, match="not evaluated on the same problems"):
        paired_comparison_over_seeds([{1: 0.5}, {1: 0.5}], [{1: 0.5}, {2: 0.25}])


def test_seeds_that_agree_everywhere_warn_and_count_as_one_run() -> None:
    a, b = {1: 0.5, 2: 0.75, 3: None}, {1: 0.25, 2: 0.5, 3: 1.0}
    with pytest.warns(IdenticalSeedsWarning, match="agree in every problem"):
        found = paired_comparison_over_seeds([a, a], [b, b])
    assert found == paired_comparison(a, b)


def test_holms_adjustment_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == [pytest.approx(p) for p in (0.03, 0.06, 0.06, 0.02)]
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holms_adjustment_rejects_what_the_steps_reject(p_values: list[float]) -> None:
    rejected = set()
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if (len(p_values) - rank) * p_values[place] > 0.05:
            break
        rejected.add(place)
    assert {i for i, p in enumerate(holm(p_values)) if p <= 0.05} == rejected


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0, math.nan])
def test_a_level_that_is_no_share_is_refused(level: float) -> None:
    for call in (
        lambda: bootstrap_interval([0.0, 1.0], level=level),
        lambda: seeds_interval([0.0, 1.0], level),
        lambda: paired_comparison({1: 1.0}, {1: 0.0}, level=level),
    ):
        with pytest.raises(InputError, match="share between 0 and 1"):
            call()


def test_values_that_are_not_finite_and_no_resamples_are_refused() -> None:
    with pytest.raises(InputError, match="value 1 is nan"):
        bootstrap_interval([0.5, math.nan])
    with pytest.raises(InputError, match="value 0 is inf"):
        seeds_interval([math.inf, 0.5])
    with pytest.raises(InputError, match="resamples is 0"):
        bootstrap_interval([0.5, 1.0], resamples=0)
