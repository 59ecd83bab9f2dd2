"""Data sets that people name by one word, with the columns they come with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NamedData:
    """Where a data set is on the hub.

    Attributes:
        title: as people write it, in tables.
        source: id on the hub, with its configuration after a colon.
        columns: our names of its columns.
        split: the only split there is; None where the choice is the user's.
    """

    title: str
    source: str
    columns: Mapping[str, str] = field(default_factory=dict)
    split: str | None = None


# The answers of gsm8k follow "####" and those of math stand in the solution's last box; verification takes both.
NAMED_DATA: dict[str, NamedData] = {
    "gsm8k": NamedData("GSM8K", "openai/gsm8k:main", {"prompt": "question"}),
    "math": NamedData("MATH", "DigitalLearningGmbH/MATH-lighteval", {"prompt": "problem", "answer": "solution"}),
    "math500": NamedData("MATH-500", "HuggingFaceH4/MATH-500", {"prompt": "problem"}, "test"),
    "aime24": NamedData("AIME 2024", "HuggingFaceH4/aime_2024", {"prompt": "problem"}, "train"),
    "aime25": NamedData("AIME 2025", "math-ai/aime25", {"prompt": "problem"}, "test"),
    "amc23": NamedData("AMC 2023", "math-ai/amc23", {"prompt": "question"}, "test"),
}
