"""The arithmetic under intervals.py: closed limits, the BCa bootstrap, the sign-flip test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from trimtab.errors import InputError

Array = npt.NDArray[np.float64]

# All patterns of signs are tried up to so many differences: 65536.
EXACT_SIGN_FLIPS = 16
_DRAWS_AT_ONCE = 2_000_000
_NORMAL = NormalDist()


def all_alike(values: Array) -> bool:
    """Whether the values are one number, but for rounding."""
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def sign_flip_p_value(differences: Sequence[float], *, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of "a problem's difference is as likely to be d as -d", by the size of the mean difference.

    Fisher's randomisation test: exact over all signs up to 16 differences other than 0; beyond, over `resamples` random
    signs, counting the observed ones with them (Phipson and Smyth, 2010), so that it is never 0. For verdicts of 0 and
    1 it is McNemar's exact test.
    """
    differences_D = finite_array(differences)
    differences_D = differences_D[differences_D != 0.0]
    count = len(differences_D)
    # Sums in another order differ in their last digits and still tie.
    reached = abs(differences_D.sum()) - 1e-9 * np.abs(differences_D).sum()
    if count <= EXACT_SIGN_FLIPS:
        signs_RD = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        return float(np.mean(np.abs((2 * signs_RD - 1) @ differences_D) >= reached))
    generator = np.random.default_rng(seed)
    hits = 0
    for rows in _blocks(resamples, count):
        signs_RD = generator.integers(2, size=(rows, count), dtype=np.int8)
        hits += int(np.sum(np.abs(2 * (signs_RD @ differences_D) - differences_D.sum()) >= reached))
    return (1 + hits) / (1 + resamples)


def limits_of_alike(value: float, n: int, level: float, lowest: float) -> tuple[float, float] | None:
    """Limits when n problems gave the same value from `lowest` to 1; None when it lies outside.

    Another problem gives another value with a probability below u = z^2 / (n + z^2), Wilson's upper limit for 0 of n,
    and then one between `lowest` and 1.
    """
    if not lowest <= value <= 1.0:
        return None
    _, other = wilson(0.0, n, level)
    return (1 - other) * value + other * lowest, (1 - other) * value + other


def wilson(share: float, n: int, level: float) -> tuple[float, float]:
    """Wilson's limits for a share of n."""
    z2 = _NORMAL.inv_cdf((1 + level) / 2) ** 2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * share * (1 - share) / n + z2**2 / (4 * n**2)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def bonett_price(differences_P: Array, level: float) -> tuple[float, float]:
    """Limits of a mean of differences of verdicts (-1, 0, 1): Wald's, with one more problem on which each side is the
    better one."""
    total = len(differences_P) + 2
    first = (np.sum(differences_P == 1.0) + 1) / total
    second = (np.sum(differences_P == -1.0) + 1) / total
    half = _NORMAL.inv_cdf((1 + level) / 2) * math.sqrt((first + second - (first - second) ** 2) / total)
    return max(-1.0, float(first - second - half)), min(1.0, float(first - second + half))


def bca(values_P: Array, level: float, resamples: int, seed: int) -> tuple[float, float]:
    """Limits of the mean by the BCa bootstrap; the values are not all equal."""
    n, mean = len(values_P), values_P.mean()
    generator = np.random.default_rng(seed)
    means_R = np.concatenate(
        [values_P[generator.integers(n, size=(rows, n))].mean(axis=1) for rows in _blocks(resamples, n)]
    )
    below = (np.mean(means_R < mean) + np.mean(means_R <= mean)) / 2
    bias = _NORMAL.inv_cdf(float(np.clip(below, 0.5 / resamples, 1 - 0.5 / resamples)))
    deviations_P = values_P - mean
    acceleration = np.sum(deviations_P**3) / (6 * np.sum(deviations_P**2) ** 1.5)
    z = _NORMAL.inv_cdf((1 + level) / 2)
    # The denominator reaches 0 only at levels that no number of resamples could resolve.
    shares = [_NORMAL.cdf(bias + (bias + s) / max(1 - acceleration * (bias + s), 1e-12)) for s in (-z, z)]
    low, high = np.quantile(means_R, shares)
    return float(low), float(high)


def finite_array(values: Sequence[float | None]) -> Array:
    """The values as an array. Raises InputError at one that is missing or not finite."""
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InputError(f"value {place} is {array[place]}: leave out what has no finite value before the statistics.")
    return array


def _blocks(resamples: int, width: int) -> list[int]:
    """Rows of each block of draws, so that memory stays bounded."""
    rows = max(1, _DRAWS_AT_ONCE // width)
    return [min(rows, resamples - start) for start in range(0, resamples, rows)]
