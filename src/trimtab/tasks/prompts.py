"""Make the prompt of a row: plain text, or messages for a chat template."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.errors import InputError

ROLES = ("user", "assistant")


def render_prompt(
    row: Mapping[str, Any],
    *,
    template: str | None,
    system: str | None,
    examples: Sequence[tuple[str, str]] = (),
) -> str | list[dict[str, str]]:
    """Make the prompt of one row.

    Args:
        row: The row. Without a template its ``prompt`` column, a string or a list of messages, is the prompt.
        template: Text with ``{column}`` fields, each replaced by the row's value as it is; literal braces are doubled.
            Only plain column names are fields: no attributes, indices, conversions or format specifications.
        system: A system message to put first; the result is then a list of messages.
        examples: Worked examples (prompt, completion), put as turns of user and assistant before a prompt that is text;
            the result is then a list of messages.

    Returns:
        A string, or a list of messages with the keys ``role`` and ``content``. The row is not changed.

    Raises:
        InputError: A field or the prompt column is missing or unusable, or there are two system messages.
    """
    prompt = _prompt_column(row) if template is None else _fill(template, row)
    if examples:
        if not isinstance(prompt, str):
            raise InputError("the row's prompt is a list of messages already: leave out `examples`, or put them there.")
        turns = [{"role": role, "content": t} for pair in examples for role, t in zip(ROLES, pair, strict=True)]
        prompt = [*turns, {"role": "user", "content": prompt}]
    if system is None:
        return prompt
    first = {"role": "system", "content": system}
    if isinstance(prompt, str):
        return [first, {"role": "user", "content": prompt}]
    if any(message["role"] == "system" for message in prompt):
        raise InputError("there are two system messages: the row's prompt has one already, so leave out `system`.")
    return [first, *prompt]


def messages_to_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Join messages for a model without a chat template: the contents in order, with a blank line between two.

    Roles are not written, because a model that has never seen role names continues plain text best.

    Args:
        messages: Messages with the keys ``role`` and ``content``.

    Returns:
        The text, without anything after the last content.
    """
    return "\n\n".join(message["content"] for message in messages)


def _prompt_column(row: Mapping[str, Any]) -> str | list[dict[str, str]]:
    if "prompt" not in row:
        raise InputError(f"the row has no column 'prompt' ({_columns(row)}); map one to it or give a template.")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list | tuple) or not prompt:
        raise InputError("the column 'prompt' must be a string or a list of at least one message.")
    for number, message in enumerate(prompt, start=1):
        keys = ("role", "content")
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in keys):
            raise InputError(
                f"message {number} of the column 'prompt' must be an object with the strings 'role' and 'content'."
            )
    return [dict(message) for message in prompt]


def _fill(template: str, row: Mapping[str, Any]) -> str:
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InputError(
            f"the prompt template is malformed ({error}); double a literal brace: {{{{ or }}}}."
        ) from error
    text = []
    for literal, field, specification, conversion in pieces:
        text.append(literal)
        if field is None:
            continue
        if specification or conversion:
            raise InputError(
                f"the prompt template's field {field!r} has a format or conversion; only {{column}} is allowed."
            )
        if field not in row:
            raise InputError(
                f"the prompt template's field {field!r} is not a column ({_columns(row)}); "
                "double a literal brace: {{ or }}."
            )
        value = row[field]
        if value is None or isinstance(value, list | tuple | Mapping):
            kind = "null" if value is None else "a list or an object"
            raise InputError(
                f"the prompt template's field {field!r} is {kind} in this row; a template needs text or a number."
            )
        text.append(str(value))
    return "".join(text)


def _columns(row: Mapping[str, Any]) -> str:
    return "columns there are: " + (", ".join(repr(name) for name in row) or "none")
