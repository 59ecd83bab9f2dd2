"""Reward functions for the tests, good and bad; runs name them as `toy_rewards:NAME`."""

import math
from pathlib import Path
from typing import Any

from trimtab.tasks.steps import Step, StepScorer


def low_bytes(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """0 to 10: the share of a completion's tokens in the lower half of the vocabulary."""
    return [10 * sum(i < 130 for i in ids) / len(ids) for ids in completion_ids]


def constant(completions: list[str], **_: Any) -> list[float | None]:
    """The same for everyone: no group can learn from it."""
    return [1.0] * len(completions)


def ladder(completions: list[str], **_: Any) -> list[float | None]:
    """0, 10, 5, 5 in every group of four: two rows teach nothing."""
    return [(0.0, 10.0, 5.0, 5.0)[place % 4] for place in range(len(completions))]


def raises_on_every_fourth(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Raises when a batch holds a completion that starts with a token divisible by 4."""
    if any(ids[0] % 4 == 0 for ids in completion_ids):
        raise LookupError("a row that cannot be judged")
    return low_bytes(completion_ids)


def none_on_every_fourth(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Does not apply to a completion that starts with a token divisible by 4."""
    return [None if ids[0] % 4 == 0 else v for ids, v in zip(completion_ids, low_bytes(completion_ids), strict=True)]


def nan_on_every_fourth(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """NaN on a completion that starts with a token divisible by 4."""
    return [
        math.nan if ids[0] % 4 == 0 else v for ids, v in zip(completion_ids, low_bytes(completion_ids), strict=True)
    ]


def broken(completions: list[str], **_: Any) -> list[float | None]:
    """Never works."""
    raise ZeroDivisionError("no reward today")


def needs_hint(completions: list[str], hint: list[str | None], **_: Any) -> list[float | None]:
    """Reads a column that only some rows have."""
    return [float(len(text)) + len(h or "") for text, h in zip(completions, hint, strict=True)]


def falls_on_cue(completion_ids: list[list[int]], folder: list[str], cue: list[str], **_: Any) -> list[float | None]:
    """`low_bytes`, of which a tenth is left from the step on that the column `cue` names.

    `folder` is the run's folder, whose log says which step it is. Cue "20": always; "20 once": until the run went back.
    """
    run, (first, *once) = Path(folder[0]), cue[0].split()
    discarded = run / "discarded.jsonl"
    cured = once and discarded.exists() and discarded.stat().st_size > 0
    fallen = not cured and (run / "metrics.jsonl").read_bytes().count(b"\n") >= int(first)
    return [(0.1 if fallen else 1.0) * value for value in low_bytes(completion_ids)]


Steps = list[list[float | None]]


def steps_without_z(steps: list[list[str]], **_: Any) -> Steps:
    """A step scorer: 1 for a step without the letter z, weighed by its length, else 0."""
    return [[0.0 if "z" in step else float(len(step)) for step in own] for own in steps]


def no_steps(steps: list[list[str]], **_: Any) -> Steps:
    """A step scorer that has nothing to say about any step."""
    return [[None for _ in own] for own in steps]


def steps_that_fail_on_the_first(steps: list[list[str]], **_: Any) -> Steps:
    """A step scorer that returns a word for the first completion of the batch."""
    return [["oops"] if row == 0 else [1.0] * len(own) for row, own in enumerate(steps)]  # type: ignore[list-item]


def steps_with_a_hint(steps: list[list[str]], hint: list[str], **_: Any) -> Steps:
    """A step scorer that needs a column."""
    return [[1.0] * len(own) for own in steps]


def _raises_on_even(text: str) -> list[Step]:
    if len(text) % 2 == 0:
        raise RuntimeError("no step here")
    return [Step(text, 0, len(text))]


cut_that_raises = StepScorer("cut_that_raises", steps_without_z, _raises_on_even)
cut_past_the_end = StepScorer(
    "cut_past_the_end", steps_without_z, lambda text: [Step(text, 0, len(text) + (len(text) + 1) % 2)] if text else []
)
