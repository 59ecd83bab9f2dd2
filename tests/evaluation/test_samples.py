import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import InputError
from trimtab.evaluation.samples import check_about, file_name, fingerprint, finished_problems, judge
from trimtab.policy.completions import Completion


def line(problem: int, sample: int) -> dict[str, Any]:
    judged = {"completion": "x", "answer": None, "verdict": False, "format": False, "tokens": 1, "truncated": False}
    return {"problem": problem, "sample": sample, **judged, "entropy": None}


def write(path: Path, lines: list[dict[str, Any]], tail: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail, encoding="utf-8")


def test_a_problem_counts_as_finished_with_all_its_samples_and_anything_less_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    whole = [line(4, n) for n in (1, 0)]
    write(path, [*whole, line(2, 0)], tail='{"problem": 2, "sam')
    assert finished_problems(path, 2) == {4: [line(4, 0), line(4, 1)]}
    assert [json.loads(raw) for raw in path.read_text().splitlines()] == [line(4, 0), line(4, 1)]


def test_a_torn_line_alone_is_removed_so_that_the_next_one_does_not_join_it(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    write(path, [line(0, 0)], tail='{"pro')
    assert list(finished_problems(path, 1)) == [0]
    assert path.read_text() == json.dumps(line(0, 0)) + "\n"


def test_a_whole_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    write(path, [line(0, 0)])
    before = path.stat().st_mtime_ns
    assert list(finished_problems(path, 1)) == [0]
    assert path.stat().st_mtime_ns == before
    assert finished_problems(tmp_path / "none.jsonl", 1) == {}


def test_damage_in_the_middle_is_named_and_nothing_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"problem": 0}\n{oops}\n{"problem": 1}\n')
    with pytest.raises(InputError, match=r"s\.jsonl: line 2 is not valid JSON .*; remove the file to sample again"):
        finished_problems(path, 1)
    assert len(path.read_text().splitlines()) == 3


def test_samples_drawn_otherwise_are_not_added_to(tmp_path: Path) -> None:
    about = {"samples": 4, "seed": 0, "data": {"a": "1"}}
    check_about(tmp_path / "x", about)
    check_about(tmp_path / "x", {**about, "data": {"b": "2"}})
    check_about(tmp_path / "x", about)
    with pytest.raises(InputError, match=r"samples of another samples \(4, now 8\)"):
        check_about(tmp_path / "x", {**about, "samples": 8})
    with pytest.raises(InputError, match="samples of other problems called 'b'"):
        check_about(tmp_path / "x", {**about, "data": {"b": "3"}})


def test_problems_are_told_apart_by_prompts_and_golds() -> None:
    marks = {fingerprint(["a", "b"], ["1", "2"]), fingerprint(["a", "b"], ["1", "3"]), fingerprint(["ab"], ["12"])}
    assert len(marks) == 3
    assert fingerprint(["a"], [1]) == fingerprint(["a"], ["1"])


def test_a_line_holds_the_answer_and_the_verdict() -> None:
    texts = ["<reasoning>x</reasoning><answer>12</answer>", "no idea", "it is 13"]
    lines = judge(
        5, {"id": "q", "answer": 12}, [Completion(t, False, 3, [1, 2, 3], [-0.1, -0.2, -0.3], 0.5) for t in texts]
    )
    assert [line["verdict"] for line in lines] == [True, False, False]
    assert [line["answer"] for line in lines] == ["12", None, "13"]
    assert [line["format"] for line in lines] == [True, False, False]
    assert {(line["problem"], line["id"], line["tokens"]) for line in lines} == {(5, "q", 3)}


def test_labels_become_names_of_files() -> None:
    assert [file_name(label) for label in ("AIME 2024", "a/b: c", "..", "Qwen2.5-3B", "Ärger")] == [
        "AIME-2024",
        "a-b-c",
        "unnamed",
        "Qwen2.5-3B",
        "Ärger",
    ]


def test_a_long_label_fits_into_a_file_name_in_any_alphabet(tmp_path: Path) -> None:
    (tmp_path / f"{file_name('語' * 300)}.jsonl").touch()


def test_what_differs_inside_a_setting_is_named(tmp_path: Path) -> None:
    check_about(tmp_path, {"sampling": {"temperature": 1.0, "top_k": 0}, "data": {}})
    with pytest.raises(InputError, match=r"another sampling \(temperature 1.0, now 0.5\); name"):
        check_about(tmp_path, {"sampling": {"temperature": 0.5, "top_k": 0}, "data": {}})


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_an_unreadable_record_of_the_settings_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "about.json").write_text(text)
    with pytest.raises(InputError, match=r"about\.json: cannot be read .*; remove .* to sample again"):
        check_about(tmp_path, {"data": {}})


def test_a_line_without_its_problem_is_explained(tmp_path: Path) -> None:
    write(tmp_path / "s.jsonl", [{"sample": 0}])
    with pytest.raises(InputError, match="a line has no 'problem'; remove the file"):
        finished_problems(tmp_path / "s.jsonl", 1)
