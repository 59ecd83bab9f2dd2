"""Pivotal token search: which tokens of a completion change the probability that it ends in success.

Phi-4 technical report (arXiv 2412.08905), section 4.3, with the rollouts counted as trajectory.py says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trimtab.pivotal.memo import Key, Memo, Outcome
from trimtab.pivotal.rounds import Task, Want, WantLogps
from trimtab.pivotal.settings import SearchSettings
from trimtab.pivotal.statistics import (
    NONE,
    Counts,
    difference_p_value,
    probability_above,
    probability_apart,
    probability_equal,
    probability_within,
)
from trimtab.pivotal.trajectory import Question, Trajectory

FEWEST = 4
"""Rollouts on either side, below which a change inside a segment is not looked for."""


@dataclass
class Candidate:
    """A token that the search holds for pivotal.

    Attributes:
        trajectory, position: where it is.
        sign: +1 when it seems to raise the success probability, else -1.
        after, instead: fresh rollouts behind the token, and with any other token in its place.
        p_value: of "it changes the rate by at most half the gap"; 1 until it is settled.
    """

    trajectory: Trajectory
    position: int
    sign: int
    after: Counts = NONE
    instead: Counts = NONE
    p_value: float = 1.0
    settled: bool = False


@dataclass
class Search:
    """The tasks of one search and what they have found so far."""

    settings: SearchSettings
    memo: Memo
    candidates: list[Candidate] = field(default_factory=list)
    kept: int = 0
    trajectories: int = 0
    resolved: int = 0
    total: int = 0

    def screen(self, question: Question) -> Task:
        """Find a question's success rate; search some of its completions if it lies in the range."""
        s, key, count = self.settings, Key(question.key, ()), min(self.settings.start, self.settings.screen)
        while True:
            yield [Want(question, key, count)]
            outcomes = self.memo.outcomes[key][:count]
            counts = Counts(sum(outcome.success for outcome in outcomes), count)
            inside = probability_within(counts, s.lowest_rate, s.highest_rate)
            if inside >= 0.9 or count >= s.screen:
                break
            if inside <= 0.1:
                return []
            count = min(s.screen, count + s.step)
        if inside < 0.5:
            return []
        self.kept += 1
        return [self.explore(t) for t in self.pick(question, outcomes)]

    def pick(self, question: Question, outcomes: Sequence[Outcome]) -> Iterator[Trajectory]:
        """Different completions, successes and failures by turns, in the order in which they were sampled."""
        ranked: dict[bool, list[int]] = {True: [], False: []}
        seen = set()
        for number, outcome in enumerate(outcomes):
            if outcome.token_ids not in seen:
                seen.add(outcome.token_ids)
                ranked[outcome.success].append(number)
        places = [(turn, not success, n) for success in ranked for turn, n in enumerate(ranked[success])]
        for _, _, number in sorted(places)[: self.settings.trajectories]:
            trajectory = Trajectory(question, outcomes[number].token_ids, outcomes[number].success, number)
            trajectory.take(trajectory.key(0), list(outcomes))
            yield trajectory

    def explore(self, trajectory: Trajectory) -> Task:
        """Search a whole trajectory."""
        yield WantLogps(trajectory)
        self.trajectories += 1
        self.total += len(trajectory.token_ids)
        return [self.segment(trajectory, 0, len(trajectory.token_ids))]

    def segment(self, t: Trajectory, start: int, end: int) -> Task:
        """Drop a segment, or cut it in two, or name its only token a candidate."""
        s = self.settings
        leave = 1 - t.stay(start, end)
        while leave >= s.gap:  # The free bound: below it, no rollout is needed.
            after, apart = t.rate(end), t.rate_apart(start, end)
            enough = (after.exact or after.trials >= s.start) and apart.trials >= leave * s.start
            likely = self.likely(after, apart, leave)
            if enough and likely >= s.open:
                if end == start + 1:
                    candidate = Candidate(t, start, 1 if after.mean > apart.mean else -1)
                    self.candidates.append(candidate)
                    return [self.confirm(candidate)]
                return self.halves(t, start, t.split(start, end, s.split), end)
            if enough and likely <= s.close:
                cut = self.hidden_cut(t, start, end)
                if cut is None:
                    break
                return self.halves(t, start, cut, end)
            wants = self.next_wants(t, start, end, after, apart)
            if not wants:
                break
            yield wants
        self.resolved += end - start
        return []

    def halves(self, t: Trajectory, start: int, cut: int, end: int) -> list[Task]:
        """Both parts of a segment."""
        return [self.segment(t, start, cut), self.segment(t, cut, end)]

    def likely(self, after: Counts, apart: Counts, leave: float) -> float:
        """Posterior probability that a segment that is left with probability `leave` changes at least the gap."""
        equal = probability_equal(after, apart, self.settings.unchanged)
        return (1 - equal) * probability_apart(after, apart, self.settings.gap / leave)

    def hidden_cut(self, t: Trajectory, start: int, end: int) -> int | None:
        """Where, in a segment that as a whole changes nothing, the rollouts at hand show a change and its undoing."""
        best, place = self.settings.open, None
        for cut in range(start + 1, end):
            leave = 1 - t.stay(start, cut)
            after, apart = t.rate(cut), t.rate_apart(start, cut)
            if leave >= self.settings.gap and min(after.trials, apart.trials) >= FEWEST:
                likely = self.likely(after, apart, leave)
                if likely > best:
                    best, place = likely, cut
        return place

    def next_wants(self, t: Trajectory, start: int, end: int, after: Counts, apart: Counts) -> list[Want]:
        """More rollouts of the rate where they tell most; none when both are at the cap."""
        s, single, length = self.settings, end == start + 1, len(t.token_ids)
        leave = 1.0 if single else 1 - t.stay(start, end)
        after_wants = [self.more(t, t.key(end), s.start if after.trials == 0 else s.step)]
        apart_wants = [self.more(t, t.key(start, banned=single), s.step)]
        if not after.exact and after.trials < s.start:
            return after_wants + (apart_wants if apart.trials < s.start else [])
        if apart.trials < s.start:
            return apart_wants
        # What a rollout takes off the variance of the difference, a token that it costs.
        after_gain = after.variance / (after.trials + 3) / (length - end + 1) if after.trials < s.cap else 0.0
        apart_gain = leave * apart.variance / (apart.trials + 3) / (length - start) if apart.trials < s.cap else 0.0
        if after_gain == apart_gain == 0:
            return []
        return after_wants if after_gain >= apart_gain else apart_wants

    def more(self, t: Trajectory, key: Key, count: int) -> Want:
        """`count` rollouts more than the trajectory has counted."""
        return Want(t.question, key, t.taken.get(key, 0) + count, t)

    def confirm(self, candidate: Candidate) -> Task:
        """Judge a candidate by rollouts that the search has not seen."""
        s, t, k = self.settings, candidate.trajectory, candidate.position
        leave = 1 - t.stay(k, k + 1)
        after_key, instead_key = t.key(k + 1, purpose="confirm"), t.key(k, banned=True, purpose="confirm")
        known_end = k + 1 == len(t.token_ids)
        smallest = 1.0
        for count in s.confirm:
            wants = [Want(t.question, instead_key, count)]
            if not known_end:
                wants.append(Want(t.question, after_key, count))
            yield wants
            candidate.instead = self.count(instead_key, count)
            candidate.after = t.rate(k + 1) if known_end else self.count(after_key, count)
            higher, lower = candidate.after, candidate.instead
            if candidate.sign < 0:
                higher, lower = lower, higher
            smallest = min(smallest, difference_p_value(higher, lower, s.gap / 2 / leave))
            likely = probability_above(higher, lower, s.gap / leave)
            if likely <= s.close or (likely >= 1 - s.close and smallest * len(s.confirm) <= s.level / 10):
                break
        # Looking several times costs a factor (Bonferroni).
        candidate.p_value = min(1.0, smallest * len(s.confirm))
        candidate.settled = True
        self.resolved += 1
        return []

    def count(self, key: Key, count: int) -> Counts:
        """The first rollouts of a key."""
        outcomes = self.memo.outcomes[key][:count]
        return Counts(sum(outcome.success for outcome in outcomes), len(outcomes))
