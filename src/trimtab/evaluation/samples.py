"""The samples of an evaluation on disk: a file for each subject and data set, a line a completion, whole problems."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import InputError
from trimtab.files import read_lines, replace_file
from trimtab.policy.completions import Completion
from trimtab.tasks.rewards import has_full_format
from trimtab.tasks.verify import extract_answer, verify_all

Line = dict[str, Any]

LONGEST_NAME = 60
KEYS = ("problem", "sample", "completion", "answer", "verdict", "format", "tokens", "truncated", "entropy")
"""What every line needs to be counted."""


def file_name(label: str) -> str:
    """A label as a name of files and folders, cut so that it fits in 255 bytes of any alphabet."""
    return re.sub(r"[^\w.-]+", "-", label).strip("-.")[:LONGEST_NAME] or "unnamed"


def fingerprint(prompts: Sequence[Any], golds: Sequence[Any]) -> str:
    """What tells one set of problems from another."""
    text = json.dumps([list(prompts), [str(gold) for gold in golds]], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_about(folder: Path, about: dict[str, Any]) -> None:
    """Write down what decides a subject's samples; refuse to add to samples that were drawn otherwise.

    Raises:
        InputError: names what differs; or the file of before cannot be read.
    """
    path = folder / "about.json"
    now = json.loads(json.dumps(about))
    if path.exists():
        try:
            before = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); remove {folder} to sample again") from error
        # Another data set may join; one that is there already must be the same.
        before, known = {**before, "data": {}}, before.get("data", {})
        for title, mark in now["data"].items():
            if known.get(title, mark) != mark:
                raise InputError(f"{folder} holds samples of other problems called {title!r}; name another output")
        for key, value in now.items():
            if key != "data" and before.get(key) != value:
                shown = _difference(before.get(key), value)
                raise InputError(
                    f"{folder} holds samples of another {key}{shown}; name another output, or give the model another "
                    "label"
                )
        now["data"] = {**known, **now["data"]}
    elif any(folder.glob("*.jsonl")):
        raise InputError(
            f"{path} is missing, so nobody knows how the samples beside it were drawn; name another output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(now, indent=1).encode())


def _difference(before: Any, now: Any) -> str:
    """What differs, to be read behind the name of the setting."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return f" ({before!r}, now {now!r})"
    odd = [key for key in now if before.get(key) != now[key]]
    return f" ({', '.join(f'{key} {before.get(key)!r}, now {now[key]!r}' for key in odd)})" if odd else ""


def finished_problems(path: Path, samples: int) -> dict[int, list[Line]]:
    """Problems with all their samples, by number; anything less is removed from the file.

    Raises:
        InputError: the file is damaged elsewhere than at its end.
    """
    if not path.exists():
        return {}
    problems: dict[int, list[Line]] = defaultdict(list)
    try:
        for line in read_lines(path):
            absent = [key for key in KEYS if key not in line]
            if absent:
                raise ValueError(f"a line has no {absent[0]!r}")
            problems[line["problem"]].append(line)
    except ValueError as error:
        raise InputError(f"{path}: {error}; remove the file to sample again") from error
    whole = {n: sorted(lines, key=_place) for n, lines in problems.items() if len(lines) == samples}
    text = path.read_bytes()
    if len(whole) < len(problems) or not text.endswith(b"\n"):
        kept = "".join(json.dumps(line, ensure_ascii=False) + "\n" for lines in whole.values() for line in lines)
        replace_file(path, kept.encode("utf-8", "surrogatepass"))
    return whole


def left_out(path: Path) -> set[int]:
    """The problems of a samples file that its model has no room for, as far as that is known already."""
    beside = path.with_suffix(".left_out.json")
    return set(json.loads(beside.read_text(encoding="utf-8"))) if beside.exists() else set()


def write_left_out(path: Path, numbers: Sequence[int]) -> None:
    """Remember them, so that a finished evaluation need not load the model to find out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path.with_suffix(".left_out.json"), json.dumps(sorted(numbers)).encode())


def _place(line: Line) -> int:
    return int(line["sample"])


def judge(number: int, row: dict[str, Any], completions: Sequence[Completion]) -> list[Line]:
    """A problem's lines: what was said, the answer in it, and whether it is right (None: the gold cannot be parsed)."""
    verdicts = verify_all(golds=[row["answer"]] * len(completions), predictions=[c.text for c in completions])
    return [
        {
            "problem": number,
            "id": row.get("id"),
            "sample": place,
            "completion": completion.text,
            "token_ids": completion.token_ids,
            "logps": None if completion.logps is None else [round(value, 5) for value in completion.logps],
            "entropy": completion.entropy,
            "tokens": completion.tokens,
            "truncated": completion.truncated,
            "answer": extract_answer(completion.text),
            "verdict": verdict,
            "format": has_full_format(completion.text),
        }
        for place, (completion, verdict) in enumerate(zip(completions, verdicts, strict=True))
    ]
