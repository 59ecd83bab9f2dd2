import json
import logging
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import DataSection, PromptSection
from trimtab.errors import InputError
from trimtab.policy.loading import load_tokenizer
from trimtab.tasks.problems import encode_rows, load_task_rows, prompt_limit


def test_prompts_that_are_too_long_are_left_out_and_counted(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "abc", "n": 1}, {"prompt": "abcdefgh", "n": 2}, {"prompt": "a", "n": 3}]
    with caplog.at_level(logging.WARNING, "trimtab"):
        kept = encode_rows(rows, load_tokenizer(str(tiny_model)), PromptSection(), source="f", limit=4)
    assert [row["n"] for row in kept.rows] == [1, 3]
    assert kept.prompts == ["abc", "a"]
    assert [len(ids) for ids in kept.ids] == [4, 2]
    assert "f: 1 of 3 rows left out: prompts longer than 4 tokens" in caplog.text


def test_every_prompt_starts_with_one_beginning_of_sequence(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    rows = [{"prompt": "abc"}, {"prompt": "<s>abc"}]
    kept = encode_rows(rows, tokenizer, PromptSection(), source="f", limit=None)
    assert kept.ids[0] == kept.ids[1] == tokenizer("abc").input_ids
    assert kept.ids[0].count(tokenizer.bos_token_id) == 1


def test_when_no_prompt_fits_the_count_and_the_longest_are_named(tiny_model: Path) -> None:
    rows = [{"prompt": "abc"}, {"prompt": "abcd"}, {"prompt": "abcde"}]
    expected = (
        r"^f: 0 of 3 rows left: every prompt is longer than 3 tokens \(the longest has 6\); raise data.max_prompt"
    )
    with pytest.raises(InputError, match=expected):
        encode_rows(rows, load_tokenizer(str(tiny_model)), PromptSection(), source="f", limit=3)


@pytest.mark.parametrize("row", [{"prompt": []}, {"prompt": None}, {"prompt": [{"role": "user"}]}])
def test_a_prompt_of_the_wrong_kind_is_refused_with_source_and_row(row: dict[str, Any], tiny_model: Path) -> None:
    with pytest.raises(InputError, match=r"^f, row 2: "):
        encode_rows([{"prompt": "a"}, row], load_tokenizer(str(tiny_model)), PromptSection(), source="f", limit=None)


def test_messages_become_text_when_the_tokenizer_has_no_chat_template(tiny_model: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "b"}]}]
    kept = encode_rows(rows, load_tokenizer(str(tiny_model)), PromptSection(system="a"), source="f", limit=None)
    assert kept.prompts == ["a\n\nb"]


def test_the_columns_are_those_of_any_row(tiny_model: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "hint": "x"}]
    kept = encode_rows(rows, load_tokenizer(str(tiny_model)), PromptSection(), source="f", limit=None)
    assert kept.columns == ["prompt", "hint"]


def test_the_fields_of_a_template_are_required_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "a"}) + "\n", encoding="utf-8")
    template = PromptSection(template="{question}")
    assert load_task_rows(DataSection(source=str(path)), template) == [{"question": "a"}]
    with pytest.raises(InputError, match=r"the column 'prompt' is missing \(columns there are: 'question'\)"):
        load_task_rows(DataSection(source=str(path)), PromptSection())
    with pytest.raises(InputError, match="the column 'answer' is missing"):
        load_task_rows(DataSection(source=str(path)), template, required=["answer"])
    with pytest.raises(InputError, match=r"prompt\.template: single '}' encountered in format string; double"):
        load_task_rows(DataSection(source=str(path)), PromptSection(template="}"))


def test_the_built_in_task_has_prompts_answers_and_completions_and_obeys_the_limit() -> None:
    rows = load_task_rows(DataSection(source="builtin:arithmetic", limit=3), PromptSection())
    assert len(rows) == 3
    assert all({"prompt", "answer", "completion"} <= row.keys() for row in rows)


def test_the_longest_prompt_is_what_the_limit_and_the_positions_of_the_model_leave() -> None:
    data = DataSection(source="x", max_prompt_tokens=50)
    assert prompt_limit(data, None, 10) == 50
    assert prompt_limit(data, 40, 10) == 30
    assert prompt_limit(DataSection(source="x"), None, 10) is None
    with pytest.raises(InputError, match=r"sampling\.max_completion_tokens: 40 leaves no room for a prompt"):
        prompt_limit(data, 40, 40)


def test_a_data_set_by_its_short_name_is_looked_for_on_the_hub_with_its_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def load_rows(source: str, **settings: Any) -> list[dict[str, Any]]:
        asked.update(settings, source=source)
        return [{"prompt": "q", "answer": "1"}]

    monkeypatch.setattr("trimtab.tasks.problems.load_rows", load_rows)
    load_task_rows(DataSection(source="aime24", split="test"), PromptSection(), required=["answer"])
    assert (asked["source"], asked["split"]) == ("HuggingFaceH4/aime_2024", "train")
    assert (asked["columns"], asked["required"]) == ({"prompt": "problem"}, ["prompt", "answer"])
    load_task_rows(DataSection(source="gsm8k", split="train", columns={"answer": "solution"}), PromptSection())
    assert (asked["source"], asked["split"]) == ("openai/gsm8k:main", "train")
    assert asked["columns"] == {"prompt": "question", "answer": "solution"}


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("math500").mkdir()
    with pytest.raises(InputError, match="the data set 'math500'"):
        load_task_rows(DataSection(source="math500"), PromptSection())


def test_without_a_network_a_named_data_set_says_that_a_local_file_is_enough() -> None:
    with pytest.raises(InputError, match="a local JSONL or Parquet file with the same columns is enough"):
        load_task_rows(DataSection(source="amc23"), PromptSection())
