"""Success rates from few samples: Beta posteriors, an exact test of a difference, the false discovery rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NODES = 128
"""Quadrature nodes: exact for posteriors of up to 250 trials together, whose densities are polynomials."""
GRID = 64
"""Points of the null hypothesis at which the exact test looks for its largest probability."""


class Counts(NamedTuple):
    """Successes among trials; `exact` rates are known, not estimated (a finished completion's outcome)."""

    successes: int
    trials: int
    exact: bool = False

    def __add__(self, other: object) -> Counts:
        assert isinstance(other, Counts)
        if self.exact or other.exact:
            return self if self.exact else other
        return Counts(self.successes + other.successes, self.trials + other.trials)

    @property
    def mean(self) -> float:
        """Posterior mean under a uniform prior, the rate itself where it is exact."""
        return self.successes / self.trials if self.exact else (self.successes + 1) / (self.trials + 2)

    @property
    def variance(self) -> float:
        """Posterior variance under a uniform prior."""
        return 0.0 if self.exact else self.mean * (1 - self.mean) / (self.trials + 3)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Equal-tailed posterior interval under a uniform prior, widened to hold the share of successes."""
        if self.exact:
            return self.mean, self.mean
        from scipy.special import betaincinv

        a, b, tail = self.successes + 1, self.trials - self.successes + 1, (1 - level) / 2
        share = self.successes / self.trials if self.trials else 0.5
        return min(share, float(betaincinv(a, b, tail))), max(share, float(betaincinv(a, b, 1 - tail)))


NONE = Counts(0, 0)
"""Nothing sampled yet."""


@lru_cache
def _legendre() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return (nodes + 1) / 2, weights / 2


@lru_cache(maxsize=1 << 16)
def probability_above(first: Counts, second: Counts, margin: float) -> float:
    """Posterior probability that the first rate exceeds the second by at least `margin` (0 to 1), uniform priors."""
    from scipy.special import betainc, betaincc, betaln

    if margin >= 1:
        return float(margin == 1 and first.exact and second.exact and first.mean - second.mean == 1)
    a, b = first.successes + 1, first.trials - first.successes + 1
    c, d = second.successes + 1, second.trials - second.successes + 1
    if first.exact and second.exact:
        return float(first.mean - second.mean >= margin)
    if first.exact:
        return float(betainc(c, d, max(0.0, first.mean - margin)))
    if second.exact:
        return float(betaincc(a, b, min(1.0, second.mean + margin)))
    nodes, weights = _legendre()
    y = nodes * (1 - margin)
    density = np.exp((c - 1) * np.log(y) + (d - 1) * np.log1p(-y) - betaln(c, d))
    return float(np.clip((1 - margin) * np.sum(weights * density * betaincc(a, b, y + margin)), 0.0, 1.0))


def probability_apart(first: Counts, second: Counts, margin: float) -> float:
    """Posterior probability that two rates differ by at least `margin`, either way."""
    if margin <= 0:
        return 1.0
    return probability_above(first, second, margin) + probability_above(second, first, margin)


@lru_cache(maxsize=1 << 16)
def probability_equal(first: Counts, second: Counts, prior: float) -> float:
    """Posterior probability that two rates are the same one.

    `prior` is the probability before any rollout that nothing changes between two places, the rest goes to rates that
    have nothing to do with each other; uniform priors on all of them.
    """
    if first.exact or second.exact or prior <= 0:
        return 0.0
    from scipy.special import betaln

    a, b = first.successes + 1, first.trials - first.successes + 1
    c, d = second.successes + 1, second.trials - second.successes + 1
    log_factor = betaln(a + c - 1, b + d - 1) - betaln(a, b) - betaln(c, d)
    return float(1 / (1 + (1 - prior) / prior * np.exp(-log_factor)))


def probability_within(counts: Counts, low: float, high: float) -> float:
    """Posterior probability that a rate lies in [low, high]."""
    from scipy.special import betainc

    a, b = counts.successes + 1, counts.trials - counts.successes + 1
    return float(betainc(a, b, high) - betainc(a, b, low))


@lru_cache(maxsize=1 << 14)
def difference_p_value(first: Counts, second: Counts, margin: float) -> float:
    """Exact p-value of "the first rate exceeds the second by at most `margin`" (0 <= margin < 1), one-sided.

    The unconditional test (Barnard, Biometrika 34, 1947) with a margin: the largest probability, over the edge of the
    hypothesis, of an outcome at least as far from it as the one seen. The outcomes are ordered by the difference over
    its standard error, with half a success and half a failure added to each side.
    """
    from scipy.stats import binom

    if first.exact and second.exact:
        return float(first.mean - second.mean <= margin)
    if first.exact:
        return float(binom.cdf(second.successes, second.trials, max(0.0, first.mean - margin)))
    if second.exact:
        return float(binom.sf(first.successes - 1, first.trials, min(1.0, second.mean + margin)))
    x, y = np.arange(first.trials + 1), np.arange(second.trials + 1)
    p, q = (x + 0.5) / (first.trials + 1), (y + 0.5) / (second.trials + 1)
    error = (p * (1 - p) / (first.trials + 1))[:, None] + (q * (1 - q) / (second.trials + 1))[None, :]
    distance_XY = (p[:, None] - q[None, :] - margin) / np.sqrt(error)
    extreme_XY = distance_XY >= distance_XY[first.successes, second.successes] - 1e-12
    edge_G = np.linspace(0, 1 - margin, GRID)[:, None]
    p_GX, q_GY = binom.pmf(x, first.trials, edge_G + margin), binom.pmf(y, second.trials, edge_G)
    return float(min(1.0, ((p_GX @ extreme_XY) * q_GY).sum(axis=1).max()))


def q_values(p_values: Sequence[float]) -> list[float]:
    """The smallest false discovery rate at which each would be rejected (Benjamini and Hochberg, JRSS B 57, 1995)."""
    p_N = np.asarray(p_values, dtype=np.float64)
    order_N = np.argsort(p_N, kind="stable")
    scaled_N = p_N[order_N] * len(p_N) / np.arange(1, len(p_N) + 1)
    result_N = np.empty_like(p_N)
    result_N[order_N] = np.minimum(1.0, np.minimum.accumulate(scaled_N[::-1])[::-1])
    return [float(value) for value in result_N]
