"""How to search."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import InputError


@dataclass(frozen=True)
class SearchSettings:
    """How to search.

    Attributes:
        gap: a token is pivotal when it changes the success probability by at least this.
        split: segments are cut at half their surprisal (`logprob`) or in the `middle`.
        start, step, cap: rollouts of a rate at first, more at a time, and at most.
        close, open: a segment is dropped when the posterior probability that it changes at least `gap` falls to
            `close`, and cut when it reaches `open`.
        unchanged: probability, before any rollout, that a segment changes nothing at all.
        confirm: fresh rollouts of each rate of a candidate, after each of which it may be settled.
        level: false discovery rate of the confirmed tokens, false being a change of at most half the gap.
        lowest_rate, highest_rate: questions with a success rate outside are left out.
        screen: at most this many rollouts of a question to find its rate.
        trajectories: completions of a question that are searched, successes and failures by turns.
        seed: of all draws.
    """

    gap: float = 0.2
    split: str = "logprob"
    start: int = 8
    step: int = 4
    cap: int = 64
    close: float = 0.04
    open: float = 0.6
    unchanged: float = 0.7
    confirm: tuple[int, ...] = (16, 32, 64)
    level: float = 0.05
    lowest_rate: float = 0.2
    highest_rate: float = 0.8
    screen: int = 64
    trajectories: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.gap < 1:
            raise InputError(f"gap is {self.gap}: it must lie between 0 and 1")
        if self.split not in ("logprob", "middle"):
            raise InputError(f"split is {self.split!r}: use logprob or middle")
        if not 1 <= self.start <= self.cap or self.step < 1 or self.screen < 1 or self.trajectories < 1:
            raise InputError("start, step, cap, screen and trajectories must be at least 1, and start at most cap")
        if not self.confirm or list(self.confirm) != sorted(set(self.confirm)) or self.confirm[0] < 1:
            raise InputError(f"confirm is {self.confirm}: give ascending numbers of rollouts, such as 16, 32, 64")
        if not 0 < self.close <= self.open < 1 or not (0 < self.level < 1 and 0 <= self.unchanged < 1):
            raise InputError("close, open, unchanged and level must lie between 0 and 1, and close at most at open")
        if not 0 <= self.lowest_rate < self.highest_rate <= 1:
            raise InputError("lowest_rate must lie below highest_rate, both from 0 to 1")
