"""From samples to numbers: every metric with its interval, every subject against the baseline."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from trimtab.evaluation.config import EvaluateConfig
from trimtab.evaluation.intervals import (
    Comparison,
    bootstrap_interval,
    holm,
    paired_comparison,
    paired_comparison_over_seeds,
)
from trimtab.evaluation.majority import class_verdicts, majority_at_k, majority_first_k, vote_classes
from trimtab.evaluation.metrics import first_k, pass_at_k
from trimtab.evaluation.samples import Line
from trimtab.evaluation.seeds import group_by_seed
from trimtab.evaluation.subjects import Subject
from trimtab.seeds import derive_seed

logger = logging.getLogger("trimtab")

Problems = dict[int, list[Line]]


def judged_problems(problems: Problems) -> Problems:
    """Those whose gold answer can be parsed, in their order; the others count in no mean."""
    return {
        number: problems[number]
        for number in sorted(problems)
        if all(line["verdict"] is not None for line in problems[number])
    }


def scores_of(problems: Problems, config: EvaluateConfig) -> list[dict[str, Any]]:
    """Every metric of one subject on one data set: value and bootstrap interval over problems.

    Args:
        problems: every problem's samples.
        config: which k, which level.

    Returns:
        Records as in results.json; a k that some problem has too few samples for is left out with a warning.
    """
    judged = judged_problems(problems)
    verdicts = [[bool(line["verdict"]) for line in lines] for lines in judged.values()]
    classes = [vote_classes([line["answer"] for line in lines]) for lines in judged.values()]
    correct = [class_verdicts(own, v) for own, v in zip(classes, verdicts, strict=True)]
    seeds = [derive_seed(config.seed, "majority", number) for number in judged]
    fewest = min(map(len, verdicts), default=0)
    records: list[dict[str, Any]] = []

    def add(metric: str, k: int | None, values: Sequence[float | None]) -> None:
        known = [float(value) for value in values if value is not None]
        if not known:
            return
        interval = bootstrap_interval(known, level=config.level, seed=derive_seed(config.seed, "bootstrap"))
        low, high, over = (interval.low, interval.high, interval.method) if interval else (None, None, "")
        value = sum(known) / len(known)
        records.append({"metric": metric, "k": k, "value": value, "low": low, "high": high, "interval": over})

    add("mean", None, [sum(v) / len(v) for v in verdicts])
    for name, sizes in (("pass@k", config.k), ("maj@k", config.majority_k)):
        short = [k for k in sizes if verdicts and k > fewest]
        if short:
            logger.warning("%s left out for k = %s: %d samples", name, ", ".join(map(str, short)), fewest)
    for k in (k for k in dict.fromkeys(config.k) if k <= fewest):
        add("pass", k, [pass_at_k(len(v), sum(v), k) for v in verdicts])
        add("first", k, [first_k(v, k) for v in verdicts])
    for k in (k for k in dict.fromkeys(config.majority_k) if k <= fewest):
        votes = list(zip(classes, correct, seeds, strict=True))
        add("maj", k, [majority_at_k(own, right, k, seed=seed) for own, right, seed in votes])
        add("maj_first", k, [majority_first_k(own, right, k) for own, right, _ in votes])
    for metric, key in (("format", "format"), ("tokens", "tokens"), ("truncated", "truncated"), ("entropy", "entropy")):
        add(metric, None, [_mean(lines, key) for lines in problems.values()])
    return records


def _mean(lines: Sequence[Line], key: str) -> float | None:
    known = [float(line[key]) for line in lines if line[key] is not None]
    return sum(known) / len(known) if known else None


def arms_of(subjects: Sequence[Subject]) -> dict[str, list[Subject]]:
    """Subjects that differ by their seed alone, under the label of the first; a run's checkpoints are kept apart."""
    return {group[0].label: group for _, group in group_by_seed(subjects)}


def compare_arms(
    subjects: Sequence[Subject], samples: dict[str, dict[str, Problems]], config: EvaluateConfig
) -> list[dict[str, Any]]:
    """Every two arms on the same problems: difference in sampled accuracy, interval and p-value.

    Args:
        subjects: all of them; the baseline is the configured one, else the first.
        samples: a subject's label, then a data set's title, to its problems.
        config: level and seed.

    Returns:
        Records as in results.json, `label` minus `baseline`. Those with the evaluation's baseline have `p_holm`,
        adjusted over all of them; the others are there to be looked up one at a time, and have None.
    """
    arms = arms_of(subjects)
    wanted = config.baseline or subjects[0].label
    baseline = next(label for label, arm in arms.items() if any(subject.label == wanted for subject in arm))
    labels = [baseline, *(label for label in arms if label != baseline)]
    records: list[dict[str, Any]] = []
    for second, first in itertools.combinations(labels, 2):
        for title in samples[first]:
            ours, theirs = _on_shared_problems(
                [_accuracy(samples[subject.label][title]) for subject in arms[first]],
                [_accuracy(samples[subject.label][title]) for subject in arms[second]],
            )
            if all(value is None for value in ours[0].values()):
                continue
            found, note = _compare(ours, theirs, config)
            records.append(
                {
                    "data": title,
                    "label": first,
                    "baseline": second,
                    "metric": "mean",
                    "seeds": [len(ours), len(theirs)],
                    "problems": found.problems,
                    "difference": found.difference,
                    "low": found.low,
                    "high": found.high,
                    "p": found.p_value,
                    "p_holm": None,
                    "method": found.method + note,
                }
            )
    family = [record for record in records if record["baseline"] == baseline]
    for record, adjusted in zip(family, holm([record["p"] for record in family]), strict=True):
        record["p_holm"] = adjusted
    return records


Values = dict[int, float | None]


def _on_shared_problems(ours: list[Values], theirs: list[Values]) -> tuple[list[Values], list[Values]]:
    """Both sides without the problems that a model had no room for."""
    shared = set.intersection(*(set(own) for own in (*ours, *theirs)))
    first, second = ([{n: own[n] for n in sorted(shared)} for own in side] for side in (ours, theirs))
    return first, second


def _compare(ours: list[Values], theirs: list[Values], config: EvaluateConfig) -> tuple[Comparison, str]:
    """One arm against another, and what the comparison does not hold."""
    if len(ours) > 1 and len(theirs) > 1:
        return paired_comparison_over_seeds(ours, theirs, level=config.level), ""
    seed = derive_seed(config.seed, "comparison")
    found = paired_comparison(_average(ours), _average(theirs), level=config.level, seed=seed)
    several = len(ours) + len(theirs) > 2
    return found, "; seeds averaged, their spread is not in the interval" if several else ""


def _average(runs: list[Values]) -> Values:
    """Mean over seeds of each problem; None where a run has no value."""
    means: Values = {}
    for number in runs[0]:
        known = [value for run in runs if (value := run[number]) is not None]
        means[number] = sum(known) / len(known) if len(known) == len(runs) else None
    return means


def _accuracy(problems: Problems) -> dict[int, float | None]:
    """Share of correct samples of each problem; None where the gold cannot be parsed."""
    judged = judged_problems(problems)
    return {
        number: sum(line["verdict"] for line in lines) / len(lines) if number in judged else None
        for number, lines in problems.items()
    }
