"""Intervals and comparisons: how far a number would move with other problems, or with other seeds.

docs/statistics.md says what each of them means and how well it covers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

import numpy as np

from trimtab.errors import InputError
from trimtab.evaluation._limits import (
    Array,
    all_alike,
    bca,
    bonett_price,
    finite_array,
    limits_of_alike,
    sign_flip_p_value,
    wilson,
)

Problem = TypeVar("Problem", bound=Hashable)
Seed = TypeVar("Seed", bound=Hashable)


class IdenticalSeedsWarning(UserWarning):
    """Runs with different seeds gave the same outputs, as if the seed had not been used."""


@dataclass(frozen=True)
class Interval:
    """Confidence interval of a mean; `level` is a share (0.95), `method` says what it is over and how it was found."""

    low: float
    high: float
    level: float
    method: str


@dataclass(frozen=True)
class Comparison:
    """Two runs, or two sets of runs, on the same problems.

    Attributes:
        difference: mean of the first minus mean of the second, over the problems that both have a value for.
        low, high: confidence interval of the difference; None where there is none to be had.
        level: of the interval, a share.
        p_value: two-sided, of no difference.
        problems: how many were compared.
        left_out: the problems without a value on one side or both.
        method: of interval and p-value.
    """

    difference: float
    low: float | None
    high: float | None
    level: float
    p_value: float
    problems: int
    left_out: tuple[Hashable, ...]
    method: str


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Interval of a run's mean over problems: what other problems of the same kind would have given.

    The bootstrap with bias correction and acceleration (BCa: Efron, JASA 82, 1987), since scores near 0 or 1 are
    skewed and the percentile interval then covers less. Two cases in which resampling cannot see the uncertainty:

    - all values are 0 or 1: Wilson's interval (JASA 22, 1927);
    - all values are the same number from 0 to 1: see `limits_of_alike`. 0 of 30 problems solved gives [0, 0.11].

    Args:
        values: one for each problem, finite.
        level: share of data sets whose interval should hold the true mean.
        resamples: bootstrap samples of the problems.
        seed: of the resampling.

    Returns:
        None for fewer than two problems, or equal values that are not shares.

    Raises:
        InputError: level outside (0, 1), no resamples, or a value that is not finite.
    """
    _check_settings(level, resamples)
    values_P = finite_array(values)
    n = len(values_P)
    if n < 2:
        return None
    if all_alike(values_P):
        limits = limits_of_alike(float(values_P[0]), n, level, lowest=0.0)
        return None if limits is None else Interval(*limits, level, "equal values, bound over problems")
    if np.isin(values_P, (0.0, 1.0)).all():
        return Interval(*wilson(float(values_P.mean()), n, level), level, "Wilson over problems")
    return Interval(*bca(values_P, level, resamples, seed), level, "bootstrap over problems")


def seeds_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Interval of the mean over seeds, problems given: Student's t with one degree of freedom less than seeds.

    Nothing keeps the limits of a share inside [0, 1]: with two or three seeds they can lie outside.

    Args:
        values: one run's mean for each seed, finite.
        level: a share.

    Returns:
        None for fewer than two seeds ("n/a"), and when all values are equal: then an `IdenticalSeedsWarning` says so.

    Raises:
        InputError: level outside (0, 1), or a value that is not finite.
    """
    from scipy import stats

    _check_settings(level)
    values_S = finite_array(values)
    if len(values_S) < 2:
        return None
    if all_alike(values_S):
        warnings.warn(
            f"{len(values_S)} seeds gave exactly the same value, {values_S[0]:g}: there is no interval over seeds",
            IdenticalSeedsWarning,
            stacklevel=2,
        )
        return None
    half = stats.t.ppf((1 + level) / 2, len(values_S) - 1) * values_S.std(ddof=1) / math.sqrt(len(values_S))
    mean = values_S.mean()
    return Interval(float(mean - half), float(mean + half), level, "Student t over seeds")


def warn_of_identical_seeds(outputs: Mapping[Seed, Sequence[Hashable]]) -> list[tuple[Seed, Seed]]:
    """Find seeds whose runs gave the same outputs, and warn of them (`IdenticalSeedsWarning`).

    Args:
        outputs: for each seed its completions, or their hashes, in the order of the problems.

    Returns:
        The pairs of seeds with equal outputs; seeds without outputs are equal to none.
    """
    fixed = {seed: tuple(own) for seed, own in outputs.items() if len(own)}
    pairs = [(a, b) for a, b in combinations(fixed, 2) if fixed[a] == fixed[b]]
    if pairs:
        named = ", ".join(f"{a} and {b}" for a, b in pairs)
        warnings.warn(
            f"identical outputs from seeds {named}: they count as one run, was the seed used?",
            IdenticalSeedsWarning,
            stacklevel=2,
        )
    return pairs


def paired_comparison(
    a: Mapping[Problem, float | None],
    b: Mapping[Problem, float | None],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare two runs problem by problem. Seeds are not part of it: it speaks of these two runs alone.

    The interval is the BCa bootstrap of the mean difference over problems; where all values are 0 or 1 it is that of
    Bonett and Price (JEBS 37, 2012), since few problems then differ; where all differences are the same number see
    `limits_of_alike`. The p-value is `sign_flip_p_value`.

    Args:
        a: problem -> value of the first run; None where it has none (too few samples, a gold that cannot be parsed).
        b: the same problems for the second run.
        level: of the interval, a share.
        resamples: of the bootstrap, and of the test where it is not exact.
        seed: of both.

    Raises:
        InputError: the runs have different problems or none in common with values; level outside (0, 1); a value that
            is not finite.
    """
    _check_settings(level, resamples)
    (values_AP, values_BP), left_out = _aligned([a], [b])
    differences_P = values_AP[0] - values_BP[0]
    n = len(differences_P)
    limits: tuple[float, float] | None
    if n < 2:
        limits, how = None, "no interval from one problem"
    elif np.isin([values_AP, values_BP], (0.0, 1.0)).all():
        limits, how = bonett_price(differences_P, level), "Bonett-Price over problems"
    elif all_alike(differences_P):
        limits, how = limits_of_alike(float(differences_P[0]), n, level, lowest=-1.0), "equal differences, bound"
    else:
        limits, how = bca(differences_P, level, resamples, seed), "bootstrap over problems"
    low, high = limits or (None, None)
    p_value = sign_flip_p_value(differences_P.tolist(), resamples=resamples, seed=seed)
    return Comparison(float(differences_P.mean()), low, high, level, p_value, n, left_out, f"{how}; sign-flip test")


def paired_comparison_over_seeds(
    a: Sequence[Mapping[Problem, float | None]],
    b: Sequence[Mapping[Problem, float | None]],
    *,
    level: float = 0.95,
) -> Comparison:
    """Compare two methods, each trained with several seeds, on the same problems.

    The variance of the difference is the sum of three: over the seeds of a, over the seeds of b, and over problems (of
    the difference of the means over seeds). Interval and p-value are Student's t with the degrees of freedom of Welch
    and Satterthwaite (Biometrics Bulletin 2, 1946). Resampling seeds instead would claim too much: two or three of
    them show a bootstrap too little of their spread. Where nothing varies, and for a single problem, the result is that
    of `paired_comparison` on the means over seeds. Seeds that agree in every problem raise an `IdenticalSeedsWarning`.

    Args:
        a: for each seed of the first method problem -> value, None where there is none. A problem that lacks a value
            in any run is left out.
        b: the same problems for the second method; another number of seeds is fine.
        level: of the interval, a share.

    Raises:
        InputError: fewer than two seeds on a side, and what `paired_comparison` refuses.
    """
    from scipy import stats

    _check_settings(level)
    if len(a) < 2 or len(b) < 2:
        raise InputError(
            f"a comparison over seeds got {len(a)} and {len(b)} runs: give at least two on each side, "
            "or compare one run with one run (paired_comparison)."
        )
    (values_AP, values_BP), left_out = _aligned(a, b)
    if any(np.ptp(runs_SP, axis=0).max() == 0.0 for runs_SP in (values_AP, values_BP)):
        warnings.warn("the seeds of one side agree in every problem", IdenticalSeedsWarning, stacklevel=2)
    means_P = [runs_SP.mean(axis=0) for runs_SP in (values_AP, values_BP)]
    differences_P = means_P[0] - means_P[1]
    difference, n = float(differences_P.mean()), len(differences_P)
    parts = [(runs_SP.mean(axis=1).var(ddof=1) / len(runs_SP), len(runs_SP) - 1) for runs_SP in (values_AP, values_BP)]
    if n > 1:
        parts.append((differences_P.var(ddof=1) / n, n - 1))
    variance = sum(part for part, _ in parts)
    error = math.sqrt(variance)
    if n < 2 or error < 1e-12:
        alone = paired_comparison(*(dict(enumerate(side_P.tolist())) for side_P in means_P), level=level)
        return replace(alone, left_out=left_out)
    freedom = variance**2 / sum(part**2 / own for part, own in parts)
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * error
    p_value = float(2 * stats.t.sf(abs(difference) / error, freedom))
    method = f"Student t over problems and seeds ({len(a)} and {len(b)})"
    return Comparison(difference, difference - half, difference + half, level, p_value, n, left_out, method)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of comparisons that are shown together (Holm, Scandinavian Journal of Statistics 6, 1979).

    Returns:
        Adjusted values in the order given; those up to 0.05 are found with at most a 5% chance of any false finding.
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def _aligned(
    a: Sequence[Mapping[Problem, float | None]], b: Sequence[Mapping[Problem, float | None]]
) -> tuple[tuple[Array, Array], tuple[Hashable, ...]]:
    """Values of both sides, shapes (seeds, problems), in the first run's order, and the problems left out."""
    problems = list(a[0])
    for run in (*a, *b):
        odd = [*(p for p in problems if p not in run), *(p for p in run if p not in a[0])]
        if odd:
            named = ", ".join(map(repr, odd[:3])) + (", ..." if len(odd) > 3 else "")
            raise InputError(
                f"the runs were not evaluated on the same problems: {len(odd)} in one run only ({named}); "
                "compare runs on one data set, or restrict both to the problems they share."
            )
    kept = [p for p in problems if all(run[p] is not None for run in (*a, *b))]
    if not kept:
        raise InputError(f"no problem has a value in every run, of {len(problems)}: there is nothing to compare.")
    sides = [np.stack([finite_array([run[p] for p in kept]) for run in side]) for side in (a, b)]
    return (sides[0], sides[1]), tuple(p for p in problems if p not in set(kept))


def _check_settings(level: float, resamples: int = 1) -> None:
    if not 0 < level < 1:
        raise InputError(f"level is {level}: the level of an interval is a share between 0 and 1, such as 0.95.")
    if resamples < 1:
        raise InputError(f"resamples is {resamples}: it must be at least 1.")
