"""Rounds of rollouts: what all open pieces of work ask for is sampled in one batch, judged, and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

from trimtab.pivotal.memo import Key, Memo, Outcome
from trimtab.pivotal.oracle import Oracle, judge
from trimtab.pivotal.policy import Continuation, Request, SearchPolicy
from trimtab.pivotal.trajectory import Question, Trajectory
from trimtab.seeds import derive_seed


@dataclass(frozen=True)
class Want:
    """At least `count` rollouts of a key, counted on a trajectory if there is one."""

    question: Question
    key: Key
    count: int
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class WantLogps:
    """The log-probabilities of a trajectory's own tokens."""

    trajectory: Trajectory


Task = Generator[list[Want] | WantLogps, None, "list[Task]"]
"""Yields what it needs, is resumed when it is there, and returns the tasks that follow from it."""


class OutOfBudget(Exception):
    """The tokens or the seconds are spent."""


@dataclass
class Usage:
    """What this call has cost; rollouts from the memo cost nothing."""

    rollouts: int = 0
    truncated: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0


@dataclass
class Rounds:
    """Runs tasks breadth-first.

    Attributes:
        policy, oracle, memo: what samples, what judges, what remembers.
        seed: of all draws.
        rows_at_once: rollouts between two looks at the budget and two writes of the memo; changes no result.
        max_tokens, max_seconds: the budget of this call, decoded tokens and seconds; None is none.
        on_round: called after every batch of rollouts.
    """

    policy: SearchPolicy
    oracle: Oracle
    memo: Memo
    seed: int = 0
    rows_at_once: int = 256
    max_tokens: int | None = None
    max_seconds: float | None = None
    on_round: Callable[[Usage], None] | None = None
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._prefilled = self.policy.prefilled_tokens

    def run(self, tasks: Iterable[Task]) -> None:
        """Run tasks, and those that follow from them, to their end.

        No task is resumed before the whole round is sampled, so that what one of them sees does not depend on its
        place among the others.

        Raises:
            OutOfBudget: what is finished by then is kept, in the memo and in the tasks' own results.
        """
        ready = list(tasks)
        while ready:
            waiting: list[tuple[Task, list[Want] | WantLogps]] = []
            while ready:
                task = ready.pop()
                try:
                    waiting.append((task, next(task)))
                except StopIteration as end:
                    ready += end.value
            waiting.reverse()
            self._score([want.trajectory for _, want in waiting if isinstance(want, WantLogps)])
            wants = [want for _, group in waiting if not isinstance(group, WantLogps) for want in group]
            self.fetch(wants)
            for want in wants:
                if want.trajectory is not None:
                    want.trajectory.take(want.key, self.memo.outcomes[want.key][: want.count])
            ready = [task for task, _ in reversed(waiting)]
            self.usage.rounds += 1

    def fetch(self, wants: Sequence[Want]) -> None:
        """Sample what the memo lacks.

        Raises:
            OutOfBudget: before a batch that the budget does not allow.
            InputError, RunError: from the oracle; the batches before are kept.
        """
        missing: dict[Key, Want] = {}
        for want in wants:
            known = missing.get(want.key)
            if want.count > len(self.memo.outcomes.get(want.key, [])) and (known is None or known.count < want.count):
                missing[want.key] = want
        for chunk in self._chunks(list(missing.values())):
            self.check_budget()
            continuations = self.policy.sample([request for _, request in chunk])
            self._keep([want for want, _ in chunk], continuations)
            if self.on_round:
                self.on_round(self.usage)

    def _chunks(self, wants: list[Want]) -> Iterable[list[tuple[Want, Request]]]:
        chunk: list[tuple[Want, Request]] = []
        room = self.rows_at_once
        # Neighbouring prefixes of one question in one chunk share most of their keys and values.
        for want in sorted(wants, key=lambda want: want.key.question):
            key = want.key
            seed = derive_seed(self.seed, key.question, key.purpose, str(key.banned), *key.prefix_ids)
            first = len(self.memo.outcomes.get(key, []))
            while first < want.count:
                count = min(room, want.count - first)
                chunk.append((want, Request(want.question.prompt_ids, key.prefix_ids, key.banned, first, count, seed)))
                first, room = first + count, room - count
                if room == 0:
                    yield chunk
                    chunk, room = [], self.rows_at_once
        if chunk:
            yield chunk

    def _keep(self, wants: Sequence[Want], continuations: Sequence[list[Continuation]]) -> None:
        pairs = [(want, row) for want, rows in zip(wants, continuations, strict=True) for row in rows]
        ids = [want.key.prefix_ids + row.token_ids for want, row in pairs]
        successes = judge(
            self.oracle,
            [want.question.prompt for want, _ in pairs],
            [self.policy.decode(row) for row in ids],
            ids,
            [want.question.row for want, _ in pairs],
        )
        outcomes = [
            Outcome(row.token_ids, success and not row.truncated, row.truncated)
            for (_, row), success in zip(pairs, successes, strict=True)
        ]
        place = 0
        added = []
        for want, rows in zip(wants, continuations, strict=True):
            added.append((want.key, outcomes[place : place + len(rows)]))
            place += len(rows)
        self.memo.add_outcomes(added)
        self.usage.rollouts += len(outcomes)
        self.usage.truncated += sum(outcome.truncated for outcome in outcomes)
        self.usage.decoded_tokens += sum(len(outcome.token_ids) for outcome in outcomes)
        self._clock()

    def _score(self, trajectories: Sequence[Trajectory]) -> None:
        missing = [t for t in trajectories if (t.question_key, t.token_ids) not in self.memo.logps]
        for start in range(0, len(missing), self.rows_at_once):
            self.check_budget()
            chunk = missing[start : start + self.rows_at_once]
            rows = self.policy.score([(t.question.prompt_ids, t.token_ids) for t in chunk])
            for trajectory, logps in zip(chunk, rows, strict=True):
                self.memo.add_logps(trajectory.question_key, trajectory.token_ids, logps)
            self._clock()
        for trajectory in trajectories:
            trajectory.logps = self.memo.logps[trajectory.question_key, trajectory.token_ids]

    def check_budget(self) -> None:
        """Look at the clock and at the tokens.

        Raises:
            OutOfBudget: one of them is used up.
        """
        self._clock()
        if self.max_tokens is not None and self.usage.decoded_tokens >= self.max_tokens:
            raise OutOfBudget
        if self.max_seconds is not None and self.usage.seconds >= self.max_seconds:
            raise OutOfBudget

    def _clock(self) -> None:
        self.usage.seconds = time.monotonic() - self._started
        self.usage.prefilled_tokens = self.policy.prefilled_tokens - self._prefilled
