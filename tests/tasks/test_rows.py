import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.errors import InputError
from trimtab.tasks.rows import load_rows


def write(path: Path, content: bytes | str) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_jsonl_accepts_a_bom_crlf_blank_lines_and_a_line_separator_inside_a_string(tmp_path: Path) -> None:
    source = write(
        tmp_path / "rows.jsonl",
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b", "answer": 1}\r\n\r\n  \n{"prompt": "c\\u0085", "answer": 2}',
    )
    assert load_rows(source) == [{"prompt": "a\u2028b", "answer": 1}, {"prompt": "c\x85", "answer": 2}]


def test_a_mapped_column_gets_the_new_name_and_the_others_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", '{"question": "q", "answer": 1, "prompt": "old"}\n')
    assert load_rows(source, columns={"prompt": "question"}) == [{"prompt": "q", "answer": 1}]


def test_two_columns_can_swap_names(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", '{"prompt": 1, "answer": 2}\n')
    assert load_rows(source, columns={"prompt": "answer", "answer": "prompt"}) == [{"prompt": 2, "answer": 1}]


def test_limit_stops_reading_before_a_bad_line(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\nnot json\n')
    assert [row["prompt"] for row in load_rows(source, limit=2)] == ["a", "b"]
    with pytest.raises(InputError, match="line 3"):
        load_rows(source, limit=3)
    with pytest.raises(InputError, match="at least 1"):
        load_rows(source, limit=0)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (b'{"prompt": ', "line 2: not valid JSON"),
        (b'["prompt"]', "line 2: a row must be a JSON object, but this line is an array"),
        (b'{"prompt": "\xff"}', "line 2: invalid UTF-8 at byte 13"),
        (b'{"prompt": "\\ud800"}', "line 2: .* half of a surrogate pair"),
        (b'{"prompt": ' + b"[" * 200_000, "line 2: not usable JSON"),
        (b'{"prompt": null}', "line 2: the column 'prompt' is null"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line_number(tmp_path: Path, bad: bytes, expected: str) -> None:
    source = write(tmp_path / "rows.jsonl", b'{"prompt": "a"}\n' + bad + b"\n")
    with pytest.raises(InputError, match=expected) as raised:
        load_rows(source)
    assert source in str(raised.value)


def test_a_missing_column_is_named_with_the_columns_there_are_and_the_nearest(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", '{"promt": "a", "answer": 1}\n')
    with pytest.raises(InputError, match=r"'prompt' is missing .*'promt', 'answer'.*did you mean 'promt'\?") as raised:
        load_rows(source)
    assert source in str(raised.value)
    assert "line" not in str(raised.value)
    with pytest.raises(InputError, match="'question' is missing"):
        load_rows(source, columns={"prompt": "question"})


def test_a_row_without_the_column_is_refused_with_its_line(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", '{"prompt": "a"}\n\n{"answer": 1}\n')
    with pytest.raises(InputError, match=r"line 3: the column 'prompt' is missing \(columns there are: 'answer'\)"):
        load_rows(source)


def test_an_empty_and_a_missing_and_an_unknown_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows"):
        load_rows(write(tmp_path / "empty.jsonl", "\n \n"))
    with pytest.raises(InputError, match="no such file"):
        load_rows(str(tmp_path / "missing.jsonl"))
    with pytest.raises(InputError, match="no such file"):
        load_rows(str(tmp_path / "missing"))
    with pytest.raises(InputError, match=r"not supported; use one of \.jsonl"):
        load_rows(write(tmp_path / "rows.csv", "prompt\na\n"))


def test_a_json_file_may_hold_an_array_or_lines(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    assert load_rows(write(tmp_path / "array.json", json.dumps(rows, indent=1))) == rows
    assert load_rows(write(tmp_path / "array.json", json.dumps(rows)), limit=1) == rows[:1]
    assert load_rows(write(tmp_path / "lines.json", "\n".join(map(json.dumps, rows)))) == rows
    with pytest.raises(InputError, match="row 2: a row must be a JSON object, but this one is a number"):
        load_rows(write(tmp_path / "bad.json", '[{"prompt": "a"}, 3]'))


def test_parquet_rows_equal_what_was_written(tmp_path: Path) -> None:
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": 1.5}, {"prompt": [], "answer": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load_rows(str(path)) == rows
    assert load_rows(str(path), limit=1) == rows[:1]
    with pytest.raises(InputError, match="row 2: the column 'answer' is null"):
        load_rows(str(path), required=("prompt", "answer"))
    with pytest.raises(InputError, match="not a readable Parquet file"):
        load_rows(write(tmp_path / "bad.parquet", "text"))


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_a_named_data_set_is_loaded_with_its_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, configuration: str | None, *, split: str) -> list[dict[str, str]]:
        calls.append((name, configuration, split))
        return [{"question": "a"}, {"question": "b"}]

    fake_datasets(monkeypatch, load_dataset)
    assert load_rows("org/name:main", split="test", columns={"prompt": "question"}, limit=1) == [{"prompt": "a"}]
    assert load_rows("org/name", columns={"prompt": "question"}) == [{"prompt": "a"}, {"prompt": "b"}]
    assert calls == [("org/name", "main", "test"), ("org/name", None, "train")]


def test_a_named_data_set_that_cannot_be_reached_points_to_a_local_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("cannot reach the hub\nlong details")

    fake_datasets(monkeypatch, load_dataset)
    with pytest.raises(InputError, match="local JSONL or Parquet file with the same columns is enough") as raised:
        load_rows("org/name")
    assert "cannot reach the hub" in str(raised.value)
    assert "\n" not in str(raised.value)
