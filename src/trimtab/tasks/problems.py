"""Rows to prompts: loaded, rendered, encoded once, and the unusable ones counted."""

from __future__ import annotations

import logging
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trimtab.config import DataSection, PromptSection
from trimtab.errors import InputError
from trimtab.policy.loading import encode_prompt, uses_chat_template
from trimtab.tasks.named import NAMED_DATA
from trimtab.tasks.prompts import messages_to_text, render_prompt
from trimtab.tasks.rows import load_rows

logger = logging.getLogger("trimtab")

BUILTIN = "builtin:arithmetic"


@dataclass(frozen=True)
class Prompts:
    """Rows that can be used, with their prompts.

    Attributes:
        rows: every column of each row.
        prompts: what each row's prompt says, a string or messages.
        ids: its token ids.
        numbers: its place in the source, from 1.
    """

    rows: list[dict[str, Any]]
    prompts: list[str | list[dict[str, str]]]
    ids: list[list[int]]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, places: Sequence[int]) -> Prompts:
        """Those at the given places."""
        parts = (self.rows, self.prompts, self.ids, self.numbers)
        return Prompts(*([part[place] for place in places] for part in parts))  # type: ignore[arg-type]

    @cached_property
    def columns(self) -> list[str]:
        """Every column that any row has, so that reward functions get the same arguments at every step."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


def load_task_rows(data: DataSection, prompt: PromptSection, *, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of a data section, with every required column.

    Args:
        data: where they are.
        prompt: a template's fields are required columns; without one, `prompt` is.
        required: further columns.

    Raises:
        InputError: see `tasks.rows.load_rows`.
    """
    fields = ["prompt"]
    if prompt.template is not None:
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(prompt.template) if name]
        except ValueError as error:
            raise InputError(f"prompt.template: {str(error).lower()}; double a literal brace: {{{{ or }}}}") from error
    if data.source == BUILTIN:
        from trimtab.tasks.arithmetic import make_rows

        task = data.arithmetic
        return make_rows(
            min(task.rows, data.limit or task.rows),
            seed=task.seed,
            split=data.split,
            mode=task.mode,
            operations=(task.operations[0], task.operations[1]),
            max_operand=task.max_operand,
            max_result=task.max_result,
        )
    source, split, columns = data.source, data.split, data.columns
    named = NAMED_DATA.get(source)
    if named is not None and not Path(source).exists():
        source, split, columns = named.source, named.split or split, {**named.columns, **columns}
    needed = [*dict.fromkeys([*fields, *required])]
    return load_rows(source, split=split, columns=columns, required=needed, limit=data.limit)


def encode_rows(
    rows: list[dict[str, Any]],
    tokenizer: Any,
    prompt: PromptSection,
    *,
    source: str,
    limit: int | None,
) -> Prompts:
    """Render and encode the prompts; those longer than `limit` tokens are left out and counted.

    Raises:
        InputError: no row is left.
    """
    kept = Prompts([], [], [], [])
    examples = [(example.prompt, example.completion) for example in prompt.examples]
    longest = 0
    for number, row in enumerate(rows, 1):
        try:
            text = render_prompt(row, template=prompt.template, system=prompt.system, examples=examples)
            if not isinstance(text, str) and not uses_chat_template(tokenizer, prompt.chat_template):
                text = messages_to_text(text)
            ids = encode_prompt(tokenizer, text, chat_template=prompt.chat_template)
        except InputError as error:
            raise InputError(f"{source}, row {number}: {error}") from error
        longest = max(longest, len(ids))
        if limit is None or len(ids) <= limit:
            kept.rows.append(row)
            kept.prompts.append(text)
            kept.ids.append(ids)
            kept.numbers.append(number)
    dropped = len(rows) - len(kept)
    if not kept.rows:
        raise InputError(
            f"{source}: 0 of {len(rows)} rows left: every prompt is longer than {limit} tokens (the longest has "
            f"{longest}); raise data.max_prompt_tokens or shorten the prompts"
        )
    if dropped:
        logger.warning("%s: %d of %d rows left out: prompts longer than %d tokens", source, dropped, len(rows), limit)
    return kept


def prompt_limit(data: DataSection, positions: int | None, completion_tokens: int) -> int | None:
    """Longest usable prompt: the configured limit and what the model's positions leave beside a completion.

    Raises:
        InputError: completions alone fill the model's positions.
    """
    limits = [data.max_prompt_tokens] if data.max_prompt_tokens else []
    if positions is not None:
        if positions <= completion_tokens:
            raise InputError(
                f"sampling.max_completion_tokens: {completion_tokens} leaves no room for a prompt in the model's "
                f"{positions} positions; lower it"
            )
        limits.append(positions - completion_tokens)
    return min(limits) if limits else None
