"""The search from the outside: questions in, confirmed pivotal tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab.errors import InputError
from trimtab.pivotal.memo import Memo, digest
from trimtab.pivotal.oracle import Oracle, load_oracle
from trimtab.pivotal.policy import SearchPolicy
from trimtab.pivotal.records import PivotalToken, make_record
from trimtab.pivotal.rounds import OutOfBudget, Rounds, Usage
from trimtab.pivotal.settings import SearchSettings
from trimtab.pivotal.statistics import q_values
from trimtab.pivotal.tasks import Candidate, Search
from trimtab.pivotal.trajectory import Question, Trajectory


@dataclass
class SearchResult:
    """What a search found.

    Attributes:
        tokens: the confirmed pivotal tokens, by question and position.
        candidates: how many tokens went to confirmation; `unsettled` of them had no time to be settled.
        questions, kept, trajectories: given, with a success rate in the range, and searched.
        finished: False when the budget ended the search; the same call goes on with it.
        usage: what this call has cost.
    """

    tokens: list[PivotalToken]
    candidates: int
    unsettled: int
    questions: int
    kept: int
    trajectories: int
    finished: bool
    usage: Usage


def search(
    policy: SearchPolicy,
    questions: Sequence[Question],
    oracle: Oracle | str = "verify",
    *,
    settings: SearchSettings | None = None,
    folder: str | Path | None = None,
    trajectories: Sequence[Trajectory] | None = None,
    max_tokens: int | None = None,
    max_seconds: float | None = None,
    rows_at_once: int = 256,
    on_round: Callable[[Search, Usage], None] | None = None,
) -> SearchResult:
    """Find the pivotal tokens in completions of questions.

    Args:
        policy: what samples and scores.
        questions: with their token ids.
        oracle: `verify`, `module:function`, or a function (oracle.py).
        settings: how to search.
        folder: where rollouts are kept, so that an interrupted search goes on and a second one is free; None: nowhere.
        trajectories: search these completions; None: some of each question whose success rate is in the range.
        max_tokens, max_seconds: of decoding, of this call; what is found by then is returned.
        rows_at_once: rollouts sampled at once; changes no result.
        on_round: called after every batch of rollouts.

    Returns:
        The confirmed tokens and the cost. Equal inputs give equal tokens, however often it was interrupted.

    Raises:
        InputError: a setting, the oracle or the folder cannot be used.
        RunError: the oracle failed; every batch of rollouts before is kept.
    """
    settings = settings or SearchSettings()
    function = load_oracle(oracle) if isinstance(oracle, str) else oracle
    about = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
    identity = {"policy": policy.identity, "oracle": about, "seed": settings.seed}
    memo = Memo(None if folder is None else Path(folder), identity)
    state = Search(settings, memo)
    rounds = Rounds(
        policy,
        function,
        memo,
        seed=settings.seed,
        rows_at_once=rows_at_once,
        max_tokens=max_tokens,
        max_seconds=max_seconds,
        on_round=None if on_round is None else lambda usage: on_round(state, usage),
    )
    if trajectories is None:
        tasks = [state.screen(question) for question in unique(questions)]
    else:
        tasks = [state.explore(trajectory) for trajectory in trajectories]
    finished = True
    try:
        rounds.run(tasks)
    except OutOfBudget:
        finished = False
    return SearchResult(
        tokens=confirmed(state.candidates, settings, policy, digest(identity)),
        candidates=len(state.candidates),
        unsettled=sum(not candidate.settled for candidate in state.candidates),
        questions=len(questions),
        kept=state.kept,
        trajectories=state.trajectories,
        finished=finished,
        usage=rounds.usage,
    )


def unique(questions: Sequence[Question]) -> list[Question]:
    """Each question once.

    Raises:
        InputError: there is none, or one has no tokens.
    """
    if not questions:
        raise InputError("there are no questions to search")
    for question in questions:
        if not question.prompt_ids:
            raise InputError(f"question {question.id}: its prompt has no tokens")
    return list({question.key: question for question in questions}.values())


def confirmed(
    candidates: Sequence[Candidate], settings: SearchSettings, policy: SearchPolicy, search_key: str
) -> list[PivotalToken]:
    """The candidates that the fresh rollouts bear out: q-value within the level, and the estimate at least the gap."""
    ordered = sorted(candidates, key=lambda c: (c.trajectory.question.id, c.trajectory.token_ids, c.position))
    # A candidate without all its rollouts counts with p = 1, which makes no other one more significant.
    q_all = q_values([candidate.p_value for candidate in ordered]) if ordered else []
    found = []
    for candidate, q in zip(ordered, q_all, strict=True):
        if candidate.settled and q <= settings.level:
            t, k = candidate.trajectory, candidate.position
            record = make_record(
                t, k, candidate.after, candidate.instead, candidate.p_value, q, policy, asdict(settings), search_key
            )
            if abs(record.delta) >= settings.gap:
                found.append(record)
    return found
