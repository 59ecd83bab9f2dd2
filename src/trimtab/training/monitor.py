"""The collapse monitor: dated findings from a run's metrics, with a stated false-alarm rate.

After every observation a signal is asked: have these values one level, or did the level change after the k-th? The
answer is the Bayes factor of the two-sample t-test (Gönen et al. 2005, The American Statistician 59(3)) for each k,
averaged over k. Under independent Gaussian noise around one level, both unknown, that average is a non-negative
martingale of mean 1 (Pérez-Ortiz et al. 2022, arXiv 2208.07610), so by Ville's inequality it ever exceeds 1 / a with
probability at most a, however long the run. There is no warm-up, and the only threshold is a probability.

A change for the worse that is worth a word is a finding; a change for the better is progress, and sets the level anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

FALSE_ALARMS = 0.05
WINDOW = 256
"""A level is taken from a signal's last 256 to 511 values, which bounds the cost of a step."""
LEAST = 6
"""Observations before a signal may raise a finding: among fewer, noise that is not Gaussian looks extreme."""
LASTING = 3
"""Observations that a change must have lasted for."""
EFFECT = 3.0
"""Prior standard deviation of a change, in units of the noise: collapses are large."""
NOISE = 0.1
"""The noise is never taken to be less than this share of a change that is worth a word."""
PATIENCE = 10
"""Observations that a reward must have been down for to be lost."""
PATIENCE_EVALUATION = 2
"""The same for what is measured at evaluations only."""
LOST = 1 / 3
"""Share of its former level that a lost reward is short of."""
HOLD = 200
"""Steps after which a finding that led to nothing is no longer open."""

HARMONIC = sum(1 / k for k in range(1, 2 * WINDOW))

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Signal:
    """Which changes of a metric are for the worse, and how large they must be to be worth a word."""

    worse: tuple[str, ...] = ("down",)
    size: float = 0.1
    """Share of the largest level so far; with `ratio`, a factor."""
    ratio: bool = False
    """Watched as a logarithm."""
    least: float = 0.0
    """Smaller changes are not worth a word either, in the metric's own unit."""
    crash: float = 0.0
    """Below this share of the largest level a fall is for the worse where a smaller one is progress."""


SIGNALS: dict[str, Signal] = {
    "entropy": Signal(("up",), 1.15, ratio=True, crash=1 / 3),
    "completions/mean_length": Signal(("up", "down"), 2.0, ratio=True),
    "grad_norm": Signal(("up",), 2.0, ratio=True),
    "kl": Signal(("up",), 1.0, least=0.1),
    "reward": Signal(),
    "rewards/*format*/mean": Signal(size=0.05),
    "rewards/*/mean": Signal(),
    "eval/accuracy": Signal(),
    "eval/format": Signal(size=0.05),
}
"""Metrics (or patterns; the first that fits counts) that are watched; the names are TRL's where it has one."""


@dataclass(frozen=True)
class Finding:
    """One signal changed for the worse, or (`collapse`) a reward that fell stayed down."""

    step: int
    """When it was raised."""
    onset: int
    """Estimated first step of the change."""
    signal: str
    direction: str
    before: float
    after: float
    message: str
    collapse: bool = False

    def line(self) -> dict[str, Any]:
        """As a line of findings.jsonl."""
        return asdict(self)


@dataclass
class Series:
    """What is remembered of one signal."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    starts: int = 0
    """How often the values were begun anew."""
    scale: float = 0.0
    """The largest level so far."""
    open: Finding | None = None
    since: int = 0
    """Observations since the open finding's onset."""
    lost: bool = False


class Monitor:
    """Watches one run. What it finds depends on the metrics that it was shown and on nothing else.

    Args:
        false_alarms: probability of any finding in a healthy run of any length: independent Gaussian noise around
            levels that stay.
    """

    def __init__(self, false_alarms: float = FALSE_ALARMS) -> None:
        self.false_alarms = false_alarms
        self.series: dict[str, Series] = {}

    @property
    def onset(self) -> int | None:
        """The earliest onset of the open findings: before it the run was healthy."""
        return min((series.open.onset for series in self.series.values() if series.open), default=None)

    @property
    def collapse(self) -> Finding | None:
        """The finding of a reward that is lost, while it is."""
        return next((series.open for series in self.series.values() if series.lost), None)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Take in one step's metrics; what is missing, None or not finite is passed over.

        Returns:
            What is found at this step, in the metrics' order, collapse last.
        """
        watched = {name: signal for name in metrics if (signal := find_signal(name))}
        parts = sum(name.startswith("rewards/") for name in watched)
        found: list[Finding] = []
        for name, signal in watched.items():
            value = metrics[name]
            # A step without an update has a gradient norm of 0, which says nothing and has no logarithm.
            if value is None or not math.isfinite(value) or (signal.ratio and value <= 0):
                continue
            # However many parts the reward has, they get what two signals get.
            share = 2 / parts if name.startswith("rewards/") else 1.0
            series = self.series.setdefault(name, Series())
            remember(series, step, float(value), signal)
            finding = self._judge(series, step, name, signal, self.false_alarms * share / len(SIGNALS))
            found += [finding] if finding else []
        return found + self._losses(step)

    def _judge(self, series: Series, step: int, name: str, signal: Signal, probability: float) -> Finding | None:
        """The finding that a signal's newest value gives rise to."""
        # Each new start has a smaller part of the probability; all that may come add up to it.
        bound = math.log((series.starts + 1) * (series.starts + 2) / probability)
        change = find_change(np.array(series.values), bound, signal, series.scale)
        if change is None:
            return None
        place, before, after = change
        onset, since = series.steps[place], len(series.values) - place
        series.starts += 1
        direction = "up" if after > before else "down"
        series.scale = max(series.scale, abs(before), abs(after))
        crashed = direction == "down" and after < signal.crash * series.scale
        if direction not in signal.worse and not crashed:
            # Progress: what has been reached is the level that may be lost.
            del series.steps[:place], series.values[:place]
            return None
        # What showed the change has had its say; what follows is judged by itself.
        series.steps, series.values = [], []
        verb = "left its band" if name == "entropy" else {"up": "rose", "down": "fell"}[direction]
        message = f"{name} {verb} at step {onset} ({before:.3g} -> {after:.3g})"
        finding = Finding(step, onset, name, direction, before, after, message)
        if series.open is None:
            series.open, series.since = finding, since
        return finding

    def _losses(self, step: int) -> list[Finding]:
        """Close findings that are over; declare collapse when a first reward is lost."""
        found = []
        total = self.series.get("reward")
        for name, series in self.series.items():
            opened, patience = series.open, PATIENCE_EVALUATION if name.startswith("eval/") else PATIENCE
            if opened is None or series.since < patience:
                continue
            level = sum(series.recent[-patience:]) / patience
            # Half of the way back is over; so is what led to nothing for long.
            if abs(level - opened.before) < abs(opened.after - opened.before) / 2 or (
                step - opened.step > HOLD and not series.lost
            ):
                series.open, series.lost = None, False
                continue
            outcome = name.startswith(("reward", "eval/"))
            # A part of the reward may be given up for a better whole.
            whole = not name.startswith("rewards/") or total is None or total.open is not None
            if outcome and whole and not self.collapse and level <= opened.before - LOST * abs(opened.before):
                series.lost = True
                message = (
                    f"collapse: {name} fell at step {opened.onset} and stayed down ({opened.before:.3g} -> {level:.3g})"
                )
                found.append(Finding(step, opened.onset, name, "down", opened.before, level, message, collapse=True))
        return found


def find_signal(name: str) -> Signal | None:
    """What to look for in a metric; None: it is not watched."""
    return next((signal for pattern, signal in SIGNALS.items() if fnmatchcase(name, pattern)), None)


def remember(series: Series, step: int, value: float, signal: Signal) -> None:
    """Add an observation; the oldest half leaves a full window, at lengths that no value decides."""
    series.steps.append(step)
    series.values.append(math.log(value) if signal.ratio else value)
    series.recent = [*series.recent, value][-PATIENCE:]
    series.since += 1
    if len(series.values) == 2 * WINDOW:
        del series.steps[:WINDOW], series.values[:WINDOW]
        series.starts += 1


def find_change(values_N: Values, bound: float, signal: Signal, scale: float) -> tuple[int, float, float] | None:
    """Whether and where a signal's level changed.

    Args:
        values_N: observations in order; logarithms when the signal is a ratio.
        bound: least logarithm of the evidence.
        signal: which changes are worth a word.
        scale: the signal's largest level so far.

    Returns:
        Index of the first value after the change, and the levels before and after it in the metric's own unit.
    """
    count = len(values_N)
    if count < LEAST:
        return None
    if signal.ratio:
        size = math.log(signal.size)
    else:
        size = max(signal.size * max(scale, abs(float(values_N.mean()))), signal.least)
    noise = NOISE * size
    evidence_K, shift_K = log_evidence(values_N, noise)
    if evidence_K.max() + math.log(count) < bound:
        return None
    for sign in (1.0, -1.0):
        this_way_K = shift_K * sign > 0
        # One step out of line is no change of level.
        lasting_K = this_way_K & (np.arange(count - 1) < count - LASTING)
        damped_K = evidence_K
        if ("up" if sign > 0 else "down") in signal.worse and log_sum(evidence_K, lasting_K) >= bound:
            # Values that follow their neighbours prove less than as many independent ones.
            damped_K, _ = log_evidence(values_N, noise, independent_share(values_N, likeliest(evidence_K, lasting_K)))
        place = likeliest(damped_K, this_way_K)
        if log_sum(damped_K, lasting_K) < bound or abs(shift_K[place - 1]) < size:
            continue
        levels = float(values_N[:place].mean()), float(values_N[place:].mean())
        before, after = (math.exp(level) for level in levels) if signal.ratio else levels
        return place, before, after
    return None


def likeliest(evidence_K: Values, allowed_K: npt.NDArray[np.bool_]) -> int:
    """Index of the first value after the change for which the evidence is largest, among what is allowed."""
    return int(np.where(allowed_K, evidence_K, -np.inf).argmax()) + 1


def log_sum(evidence_K: Values, allowed_K: npt.NDArray[np.bool_]) -> float:
    """Logarithm of the sum of the factors that are allowed."""
    return float(np.logaddexp.reduce(np.where(allowed_K, evidence_K, -np.inf)))


def log_evidence(values_N: Values, noise: float, damping: float = 1.0) -> tuple[Values, Values]:
    """Weighted Bayes factors of a change after the k-th value against none, for k = 1 .. N - 1.

    The change has a normal prior of standard deviation `EFFECT` noises (Gönen et al. 2005, equation 3); the weights
    fall as 1 / k and add up to less than 1. `noise` and `damping` can only lower the factors.

    Returns:
        Logarithms, and the mean after k less the mean before: each (N - 1,).
    """
    count = len(values_N)
    k_K = np.arange(1, count)
    centred_N = values_N - values_N.mean()
    sums_K = np.cumsum(centred_N)[:-1]
    shift_K = -sums_K / (count - k_K) - sums_K / k_K
    pairs_K = k_K * (count - k_K) / count
    between_K = pairs_K * shift_K**2
    # A noise that is too small to be believed is made larger, which can only lower the evidence.
    within_K = np.maximum((centred_N**2).sum() - between_K, 0.0) + count * max(noise**2, 1e-300)
    ratio_K = damping * between_K / within_K
    spread_K = 1 + pairs_K * EFFECT**2
    factor_K = (count - 1) / 2 * (np.log1p(ratio_K) - np.log1p(ratio_K / spread_K)) - np.log(spread_K) / 2
    return factor_K - np.log(k_K * HARMONIC), shift_K


def independent_share(values_N: Values, place: int) -> float:
    """(1 - r) / (1 + r) for the lag-one autocorrelation r >= 0 of what two levels and a common slope leave.

    The slope is taken out because a steady trend is not noise that follows itself.
    """
    count = len(values_N)
    steps_N = np.arange(count, dtype=float)
    known_N3 = np.stack([np.ones(count), steps_N, steps_N >= place], axis=1)
    rest_N = values_N - known_N3 @ np.linalg.lstsq(known_N3, values_N, rcond=None)[0]
    power = float((rest_N**2).sum())
    r = max(0.0, float((rest_N[1:] * rest_N[:-1]).sum()) / power) if power else 0.0
    # Neighbours look less alike than they are once something is fitted: by (1 + 3 r) / N with a level (Marriott and
    # Pope 1954, Biometrika 41), so by about this much with two levels and a slope.
    r = min(r + (3 + 5 * r) / count, 0.99)
    return (1 - r) / (1 + r)


def replay(lines: Iterable[Mapping[str, Any]], false_alarms: float = FALSE_ALARMS) -> list[Finding]:
    """The findings of a run's metrics after the fact: lines of metrics.jsonl or of another trainer's log."""
    monitor = Monitor(false_alarms)
    return [finding for line in lines if "step" in line for finding in monitor.observe(int(line["step"]), line)]
