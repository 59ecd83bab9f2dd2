"""Differences of two scores, with the interval that the data allows: paired over problems, or from two intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.evaluation.scores import HERE, Score
from trimtab.report.runs import Evaluation

UNPAIRED = "from the two intervals, as if independent"
NO_INTERVAL = "one of the two has no interval"
MIXED = "one interval is over seeds, the other over problems"


@dataclass(frozen=True)
class Pair:
    """A comparison that the evaluation made on the same problems: first minus second, by what tells two rows apart."""

    first: tuple[str, str, str]
    second: tuple[str, str, str]
    data: str
    metric: str
    value: float
    low: float | None
    high: float | None
    how: str


@dataclass(frozen=True)
class Difference:
    """Of two scores, in their unit: shares, nats or tokens. `how` says where the interval comes from."""

    value: float
    low: float | None
    high: float | None
    how: str


def difference(score: Score, other: Score, pairs: Sequence[Pair]) -> Difference:
    """Score minus other.

    A comparison that the evaluation made is used where there is one. Else the interval follows from those of the two
    scores (the square-and-add rule: Newcombe, Statistics in Medicine 17, 1998), which takes them for independent and so
    is wider than a paired one where the same problems are hard for both. There is none when one score has none, or
    when one interval is over seeds and the other over problems: the two speak of different things.
    """
    names = (_name(score), _name(other))
    for pair in pairs:
        if (pair.data, pair.metric) == (score.data, score.metric) and score.source == other.source == HERE:
            if (pair.first, pair.second) == names:
                return Difference(pair.value, pair.low, pair.high, pair.how)
            if (pair.second, pair.first) == names:
                low, high = (None if limit is None else -limit for limit in (pair.high, pair.low))
                return Difference(-pair.value, low, high, pair.how)
    value = score.value - other.value
    if score.low is None or score.high is None or other.low is None or other.high is None:
        return Difference(value, None, None, NO_INTERVAL)
    if ("over seeds" in score.interval) != ("over seeds" in other.interval):
        return Difference(value, None, None, MIXED)
    below = math.hypot(score.value - score.low, other.high - other.value)
    above = math.hypot(score.high - score.value, other.value - other.low)
    return Difference(value, value - below, value + above, UNPAIRED)


def paired_differences(evaluation: Evaluation, scores: Sequence[Score]) -> list[Pair]:
    """The comparisons in results.json, between rows of the tables; one that cannot be placed is left out."""
    known = {_name(score) for score in scores}
    names = {subject["label"]: _row_of(subject, known) for subject in evaluation.subjects}
    pairs = []
    for record in evaluation.comparisons:
        first, second = names.get(record.get("label")), names.get(record.get("baseline"))
        if first is not None and second is not None and record.get("difference") is not None:
            limits = (record.get("low"), record.get("high"))
            how = str(record.get("method") or "paired over problems")
            pairs.append(Pair(first, second, record["data"], record["metric"], record["difference"], *limits, how))
    return pairs


def _row_of(subject: dict[str, Any], known: set[tuple[str, str, str]]) -> tuple[str, str, str] | None:
    """A subject's row: by its method, or by the method with what tells several subjects of that method apart."""
    model, training, method = (str(subject.get(key) or "") for key in ("model", "training", "method"))
    apart = (str(subject["label"]), str(subject.get("checkpoint") or "").partition(":")[0])
    for name in (method, *(f"{method} ({word})".strip() for word in apart)):
        if (model, training, name) in known:
            return model, training, name
    return None


def _name(score: Score) -> tuple[str, str, str]:
    return score.model, score.training, score.method
