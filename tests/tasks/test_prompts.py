from typing import Any

import pytest

from trimtab.errors import InputError
from trimtab.tasks.prompts import messages_to_text, render_prompt

MESSAGES = [{"role": "user", "content": "2+2?"}]


def test_without_template_and_system_the_prompt_column_is_the_prompt() -> None:
    assert render_prompt({"prompt": "a {b}"}, template=None, system=None) == "a {b}"
    rendered = render_prompt({"prompt": MESSAGES}, template=None, system=None)
    assert rendered == MESSAGES
    assert rendered is not MESSAGES


def test_a_template_fills_columns_and_keeps_their_braces() -> None:
    row = {"question": "{x} of $5", "n": 3}
    assert render_prompt(row, template="{n}: {question} {{boxed}}", system=None) == "3: {x} of $5 {boxed}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{qestion}", r"'qestion' is not a column \(columns there are: 'question', 'none', 'list'\)"),
        ("{}", "'' is not a column"),
        ("{question.real}", "'question.real' is not a column"),
        ("{question[0]}", "is not a column"),
        ("{question!r}", "has a format or conversion"),
        ("{question:>9}", "has a format or conversion"),
        ("{question", "malformed.*double a literal brace: {{ or }}"),
        ("{none}", "'none' is null"),
        ("{list}", "'list' is a list or an object"),
    ],
)
def test_an_unusable_template_field_is_refused(template: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        render_prompt({"question": "q", "none": None, "list": ["a"]}, template=template, system=None)


def test_a_system_message_comes_first() -> None:
    system = {"role": "system", "content": "s"}
    assert render_prompt({"prompt": "2+2?"}, template=None, system="s") == [system, *MESSAGES]
    assert render_prompt({"prompt": MESSAGES}, template=None, system="s") == [system, *MESSAGES]
    assert render_prompt({"q": "2+2?"}, template="{q}", system="s") == [system, *MESSAGES]


def test_a_second_system_message_is_refused_and_the_row_is_not_changed() -> None:
    row = {"prompt": [{"role": "system", "content": "old"}, *MESSAGES]}
    with pytest.raises(InputError, match="two system messages"):
        render_prompt(row, template=None, system="new")
    assert len(row["prompt"]) == 2


@pytest.mark.parametrize("prompt", [3, None, [], [{"role": "user"}], ["text"], [{"role": "user", "content": None}]])
def test_a_prompt_column_of_another_form_is_refused(prompt: Any) -> None:
    with pytest.raises(InputError, match="'prompt'"):
        render_prompt({"prompt": prompt}, template=None, system=None)


def test_a_row_without_a_prompt_column_is_refused_and_the_columns_are_named() -> None:
    with pytest.raises(InputError, match=r"no column 'prompt' .*'question'"):
        render_prompt({"question": "q"}, template=None, system=None)


def test_messages_become_text_with_blank_lines_between() -> None:
    assert messages_to_text([{"role": "system", "content": "s"}, *MESSAGES]) == "s\n\n2+2?"


def test_examples_become_turns_between_the_system_message_and_the_prompt() -> None:
    prompt = render_prompt({"prompt": "2+2?"}, template=None, system="Add.", examples=[("1+1?", "2"), ("1+2?", "3")])
    assert [(message["role"], message["content"]) for message in prompt if isinstance(message, dict)] == [
        ("system", "Add."),
        ("user", "1+1?"),
        ("assistant", "2"),
        ("user", "1+2?"),
        ("assistant", "3"),
        ("user", "2+2?"),
    ]


def test_examples_and_a_prompt_of_messages_are_refused() -> None:
    with pytest.raises(InputError, match="leave out `examples`"):
        render_prompt({"prompt": [{"role": "user", "content": "x"}]}, template=None, system=None, examples=[("a", "b")])
