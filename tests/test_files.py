import json
import os
from pathlib import Path

import pytest

from trimtab.errors import InputError
from trimtab.files import append_lines, held_alone, read_lines, replace_file


def test_lines_come_back_as_they_were_added(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_lines(path, [{"a": 1}, {"b": "ü\u2028"}])
    append_lines(path, [{"c": None}])
    assert read_lines(path) == [{"a": 1}, {"b": "ü\u2028"}, {"c": None}]
    assert read_lines(tmp_path / "absent.jsonl") == []


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}')
    assert read_lines(path) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"b"')
    assert read_lines(path) == [{"a": 1}]


@pytest.mark.parametrize(("line", "message"), [("{oops}", "line 2 is not valid JSON"), ("[1]", "line 2 is not a JSON")])
def test_damage_before_the_end_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"c": 3}}\n')
    with pytest.raises(ValueError, match=message):
        read_lines(path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    replace_file(path, json.dumps({"old": 1}).encode())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_half_a_character_does_not_lose_the_line(tmp_path: Path) -> None:
    append_lines(tmp_path / "log.jsonl", [{"a": "x\ud800y"}])
    assert read_lines(tmp_path / "log.jsonl") == [{"a": "x?y"}]


def test_a_folder_is_held_by_one_at_a_time_and_free_afterwards(tmp_path: Path) -> None:
    with held_alone(tmp_path), pytest.raises(InputError, match="another process writes to it"), held_alone(tmp_path):
        pass
    with held_alone(tmp_path):
        pass
    with pytest.raises(InputError, match="absent: cannot be written"), held_alone(tmp_path / "absent"):
        pass
