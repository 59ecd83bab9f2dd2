"""The built-in reward functions; `trimtab.tasks.rewards` offers them under its own name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.tasks.verify import verify_all

Completion = str | Sequence[Mapping[str, Any]]
"""A completion as text, or chat-shaped: a list of messages, usually one of the assistant's."""

FULL_REWARD = 10.0
PARTIAL_BLOCK = 1.0
PARTIAL_BLOCK_AND_TAG = 1.5

_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_WHOLE = re.compile(r"<reasoning>.*</reasoning>\s*<answer>.*</answer>", re.DOTALL)


def completion_text(completion: Completion) -> str:
    """The text of a completion: a string as it is, or the assistant's contents of a chat-shaped one, joined.

    Raises:
        TypeError: The completion has neither form.
    """
    if isinstance(completion, str):
        return completion
    texts = []
    for message in completion:
        if not isinstance(message, Mapping):
            raise TypeError(
                f"a completion must be a string or a list of messages, not a list of {type(message).__name__}"
            )
        if message.get("role", "assistant") != "assistant":
            continue
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text") or "" for part in content)
        texts.append(content)
    return "".join(texts)


def has_full_format(text: str) -> bool:
    """Whether the whole stripped text is one reasoning block and then one answer block, with each tag exactly once."""
    return all(text.count(tag) == 1 for tag in _TAGS) and _WHOLE.fullmatch(text.strip()) is not None


def format_reward(completions: Sequence[Completion], **_: Any) -> list[float | None]:
    """The paper's format reward, 0 to 10 (GTPO, arXiv 2508.03772, reward settings).

    10 for the full format (`has_full_format`). Else partial credit: 1.0 for a complete reasoning block, or for a
    complete answer block at the end; 1.5 when there is any tag of the other kind as well. 0 otherwise.
    """
    return [_format_score(completion_text(completion)) for completion in completions]


def _format_score(text: str) -> float:
    if has_full_format(text):
        return FULL_REWARD
    reasoning_block = _has_block(text, "reasoning")
    answer_block_at_end = _has_block(text, "answer") and text.rstrip().endswith("</answer>")
    if reasoning_block:
        return PARTIAL_BLOCK_AND_TAG if "<answer>" in text or "</answer>" in text else PARTIAL_BLOCK
    if answer_block_at_end:
        return PARTIAL_BLOCK_AND_TAG if "<reasoning>" in text or "</reasoning>" in text else PARTIAL_BLOCK
    return 0.0


def _has_block(text: str, tag: str) -> bool:
    start = text.find(f"<{tag}>")
    return start >= 0 and text.find(f"</{tag}>", start) >= 0


def accuracy_reward(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """The paper's accuracy reward: 10 when the answer is right and the format holds fully, else 0.

    None when the gold in the column `answer` cannot be parsed, whatever the completion looks like.
    """
    texts = [completion_text(completion) for completion in completions]
    verdicts = verify_all(golds=answer, predictions=[text if has_full_format(text) else "" for text in texts])
    return [None if verdict is None else FULL_REWARD * verdict for verdict in verdicts]


def binary_format_reward(completions: Sequence[Completion], **_: Any) -> list[float | None]:
    """1 for the full format, else 0."""
    return [float(has_full_format(completion_text(completion))) for completion in completions]


def binary_accuracy_reward(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 when the extracted answer (`trimtab.tasks.verify.extract_answer`) is right, else 0; None when the gold cannot
    be parsed."""
    verdicts = verify_all(golds=answer, predictions=[completion_text(completion) for completion in completions])
    return [None if verdict is None else float(verdict) for verdict in verdicts]
