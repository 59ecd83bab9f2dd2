"""One record a pivotal token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trimtab.files import replace_file
from trimtab.pivotal.policy import SearchPolicy
from trimtab.pivotal.statistics import Counts, probability_above
from trimtab.pivotal.trajectory import Trajectory


@dataclass(frozen=True)
class Rate:
    """A success rate: `successes` of `trials` fresh rollouts, and the 95 % interval; `exact`: known, not estimated."""

    rate: float
    successes: int
    trials: int
    low: float
    high: float
    exact: bool


@dataclass(frozen=True)
class PivotalToken:
    """A token that changes the probability of success.

    Attributes:
        question_id, prompt, prompt_ids: the question.
        prefix_ids, prefix: the completion before the token, as ids and as text.
        token_id, token: the token.
        probability: of the token there, under the sampler.
        position: how many tokens of the completion come before it.
        before: success rate before it, probability * after + (1 - probability) * instead.
        after: success rate with the token behind the prefix.
        instead: success rate with any other token in its place, as the sampler draws it.
        delta: after - before, with its 95 % interval.
        p_value, q_value: of "it changes the rate by at most half the gap"; the latter over all candidates.
        success, trajectory_ids: how the completion that was searched ended, and its tokens.
        policy, settings, search_key: the sampler's and the search's settings; the name of the rollouts on disk.
    """

    question_id: str
    prompt: Any
    prompt_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    prefix: str
    token_id: int
    token: str
    probability: float
    position: int
    before: float
    after: Rate
    instead: Rate
    delta: float
    delta_low: float
    delta_high: float
    p_value: float
    q_value: float
    success: bool
    trajectory_ids: tuple[int, ...]
    policy: dict[str, Any]
    settings: dict[str, Any]
    search_key: str

    def as_line(self) -> dict[str, Any]:
        """For a JSONL file."""
        return asdict(self)


def write_records(path: Path, tokens: Sequence[PivotalToken]) -> None:
    """One JSON line a token, each with the time of writing (UTC); an older file is replaced whole."""
    written = datetime.now(UTC).isoformat(timespec="seconds")
    lines = [json.dumps({**token.as_line(), "written": written}, ensure_ascii=False) + "\n" for token in tokens]
    replace_file(path, "".join(lines).encode("utf-8", "surrogatepass"))


def make_record(
    trajectory: Trajectory,
    position: int,
    after: Counts,
    instead: Counts,
    p_value: float,
    q_value: float,
    policy: SearchPolicy,
    settings: dict[str, Any],
    search_key: str,
) -> PivotalToken:
    """The record of a confirmed token; its rates come from fresh rollouts alone."""
    prefix_ids, token_id = trajectory.token_ids[:position], trajectory.token_ids[position]
    probability = trajectory.stay(position, position + 1)
    rates = [_rate(after), _rate(instead)]
    before = probability * rates[0].rate + (1 - probability) * rates[1].rate
    low, high = difference_interval(after, instead)
    return PivotalToken(
        question_id=trajectory.question.id,
        prompt=trajectory.question.prompt,
        prompt_ids=trajectory.question.prompt_ids,
        prefix_ids=prefix_ids,
        prefix=policy.decode(prefix_ids),
        token_id=token_id,
        token=policy.decode([token_id]),
        probability=probability,
        position=position,
        before=before,
        after=rates[0],
        instead=rates[1],
        delta=rates[0].rate - before,
        delta_low=(1 - probability) * low,
        delta_high=(1 - probability) * high,
        p_value=p_value,
        q_value=q_value,
        success=trajectory.success,
        trajectory_ids=trajectory.token_ids,
        policy=policy.identity,
        settings=settings,
        search_key=search_key,
    )


def _rate(counts: Counts) -> Rate:
    low, high = counts.interval()
    return Rate(counts.successes / counts.trials, counts.successes, counts.trials, low, high, counts.exact)


def difference_interval(first: Counts, second: Counts, level: float = 0.95) -> tuple[float, float]:
    """Equal-tailed posterior interval of the first rate minus the second, uniform priors, by bisection to 1e-4.

    Widened, as that of a rate, to hold the difference of the two shares.
    """

    def above(margin: float) -> float:
        if margin >= 0:
            return probability_above(first, second, margin)
        return 1 - probability_above(second, first, -margin)

    def quantile(tail: float) -> float:
        low, high = -1.0, 1.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if above(middle) > tail else (low, middle)
        return (low + high) / 2

    share = first.successes / first.trials - second.successes / second.trials
    return min(share, quantile((1 + level) / 2)), max(share, quantile((1 - level) / 2))
