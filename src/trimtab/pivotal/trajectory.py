"""A completion under search: what its rollouts say about each of its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.pivotal.memo import Key, Outcome, digest
from trimtab.pivotal.statistics import NONE, Counts


@dataclass(frozen=True)
class Question:
    """A question to search.

    Attributes:
        id: name in the records.
        prompt: text or messages, for the oracle and the records.
        prompt_ids: its tokens.
        row: the columns that the oracle needs, such as `answer`.
    """

    id: str
    prompt: Any
    prompt_ids: tuple[int, ...]
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same for the same tokens and the same columns."""
        return digest([list(self.prompt_ids), self.row])


class Trajectory:
    """One completion of a question, T tokens, and the rollouts that start on it.

    A rollout from position i takes the trajectory's own next token with probability pi, so with the exact pi of a
    segment [i, j), their product P:

        p(i) = P p(j) + (1 - P) q(i, j)        and        p(j) - p(i) = (1 - P) (p(j) - q(i, j)),

    where q is the success rate of rollouts from i that leave the trajectory before j. Both rates are estimated from
    disjoint rollouts, and P is not estimated at all; |p(j) - p(i)| <= 1 - P needs no rollout.
    """

    def __init__(self, question: Question, token_ids: tuple[int, ...], success: bool, number: int) -> None:
        """`success`: the outcome of the whole completion; `number`: which screening rollout it was (-1: none)."""
        self.question, self.question_key = question, question.key
        self.token_ids, self.success, self.number = token_ids, success, number
        self.logps: list[float] = []
        self.taken: dict[Key, int] = {}
        self.starts, self.leaves, self.successes = [], [], []  # type: list[int], list[int], list[bool]
        self.others: dict[int, Counts] = {}

    def key(self, start: int, *, banned: bool = False, purpose: str = "search") -> Key:
        """What rollouts from a position continue."""
        return Key(
            self.question_key, self.token_ids[:start], self.token_ids[start] if banned else None, purpose=purpose
        )

    def take(self, key: Key, outcomes: list[Outcome]) -> None:
        """Count the rollouts of a key; `outcomes` begins with those counted before."""
        done = self.taken.get(key, 0)
        if len(outcomes) <= done:
            return
        self.taken[key] = len(outcomes)
        start = len(key.prefix_ids)
        new = outcomes[done:]
        if key.banned is not None:
            known = self.others.get(start, NONE)
            self.others[start] = known + Counts(sum(outcome.success for outcome in new), len(new))
            return
        for number, outcome in enumerate(new, done):
            if start == 0 and number == self.number:
                continue  # It was chosen because of how it went.
            same = 0
            for ours, theirs in zip(self.token_ids[start:], outcome.token_ids, strict=False):
                if ours != theirs:
                    break
                same += 1
            self.starts.append(start)
            self.leaves.append(start + same)
            self.successes.append(outcome.success)

    def stay(self, start: int, end: int) -> float:
        """Probability that a rollout from `start` follows the trajectory to `end`."""
        return math.exp(math.fsum(self.logps[start:end]))

    def rate(self, position: int) -> Counts:
        """Successes among rollouts that passed through a position; known once the completion is whole."""
        if position == len(self.token_ids):
            return Counts(int(self.success), 1, exact=True)
        starts, leaves, successes = self._arrays()
        through = (starts <= position) & (leaves >= position)
        return Counts(int(successes[through].sum()), int(through.sum()))

    def rate_apart(self, start: int, end: int) -> Counts:
        """Successes among rollouts through `start` that left the trajectory before `end`."""
        starts, leaves, successes = self._arrays()
        apart = (starts <= start) & (leaves >= start) & (leaves < end)
        counts = Counts(int(successes[apart].sum()), int(apart.sum()))
        return counts + self.others.get(start, NONE) if end == start + 1 else counts

    def _arrays(self) -> tuple[Any, Any, Any]:
        return np.array(self.starts, dtype=int), np.array(self.leaves, dtype=int), np.array(self.successes, dtype=bool)

    def split(self, start: int, end: int, how: str) -> int:
        """Where to cut a segment of at least two tokens: half of its surprisal (`logprob`), or its `middle`."""
        if how == "middle":
            return (start + end) // 2
        surprisal = np.cumsum([-logp for logp in self.logps[start:end]])
        place = int(np.searchsorted(surprisal, surprisal[-1] / 2)) + 1
        return start + min(max(place, 1), end - start - 1)
