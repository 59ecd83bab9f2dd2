"""Which results are seeds of one method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Trained(Protocol):
    """Something that was trained with a seed.

    Attributes:
        arm: model, training and method, as in the tables.
        seed: of the training, if any.
        checkpoint: which one, in words.
        label: its own name.
    """

    @property
    def arm(self) -> tuple[str, str, str]: ...

    @property
    def seed(self) -> int | None: ...

    @property
    def checkpoint(self) -> str: ...

    @property
    def label(self) -> str: ...


TrainedT = TypeVar("TrainedT", bound=Trained)


def group_by_seed(subjects: Sequence[TrainedT]) -> list[tuple[str, list[TrainedT]]]:
    """Groups of subjects that differ by their seed alone; a run's checkpoints are kept apart.

    Returns:
        The groups, each with what tells it from the others of its arm: nothing, its checkpoint, or its label.
    """
    alike: dict[tuple[str, str, str], list[TrainedT]] = {}
    for subject in subjects:
        alike.setdefault(subject.arm, []).append(subject)
    groups: list[tuple[str, list[TrainedT]]] = []
    for group in alike.values():
        if _differ_by_seed(group):
            groups.append(("", group))
            continue
        # The final checkpoints of all seeds stay one group when a selected one of some seed stands beside them.
        checkpoints: dict[str, list[TrainedT]] = {}
        for subject in group:
            checkpoints.setdefault(subject.checkpoint, []).append(subject)
        for checkpoint, own in checkpoints.items():
            if checkpoint and _differ_by_seed(own):
                groups.append((checkpoint.partition(":")[0], own))
            else:
                groups += [(subject.label, [subject]) for subject in own]
    return groups


def _differ_by_seed(group: Sequence[Trained]) -> bool:
    seeds = {subject.seed for subject in group}
    return len(group) == 1 or (None not in seeds and len(seeds) == len(group))
