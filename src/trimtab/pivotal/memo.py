"""Every rollout that was ever paid for, on disk: a search that was stopped replays from here and goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.errors import InputError
from trimtab.files import append_lines, read_lines


class Key(NamedTuple):
    """What a rollout continues.

    Attributes:
        question: `question_key`.
        prefix_ids: the start of the completion.
        banned: the token that the first sampled one must not be.
        purpose: rollouts of another purpose are drawn anew.
    """

    question: str
    prefix_ids: tuple[int, ...]
    banned: int | None = None
    purpose: str = "search"


class Outcome(NamedTuple):
    """A judged rollout: its tokens without the prefix, whether it succeeded, whether the cap cut it off."""

    token_ids: tuple[int, ...]
    success: bool
    truncated: bool


def digest(value: Any) -> str:
    """A short name for any JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Memo:
    """Outcomes by key and log-probabilities by trajectory, for one policy, oracle and seed.

    Without a folder they live in memory alone.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any]) -> None:
        """Read what is there; a last line that a kill tore is cut off.

        Raises:
            InputError: the file is damaged elsewhere than at its end.
        """
        self.outcomes: dict[Key, list[Outcome]] = {}
        self.logps: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        self.path: Path | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rollouts-{digest(identity)}.jsonl"
        try:
            cut_torn_end(self.path)
            for line in read_lines(self.path):
                self._read(line)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.path}: {error}; remove the file to sample again") from error
        if not self.path.exists():
            append_lines(self.path, [{"identity": json.loads(json.dumps(identity, default=str))}])

    def _read(self, line: dict[str, Any]) -> None:
        if "logps" in line:
            self.logps[line["question"], tuple(line["token_ids"])] = line["logps"]
        elif "rollouts" in line:
            key = Key(line["question"], tuple(line["prefix_ids"]), line["banned"], line["purpose"])
            known = self.outcomes.setdefault(key, [])
            if line["first"] != len(known):
                raise ValueError(f"rollout {len(known)} of a prefix is missing")
            known += [Outcome(tuple(ids), success, truncated) for ids, success, truncated in line["rollouts"]]

    def add_outcomes(self, added: Iterable[tuple[Key, list[Outcome]]]) -> None:
        """Keep rollouts that follow those known, in one write."""
        lines = []
        for key, outcomes in added:
            known = self.outcomes.setdefault(key, [])
            lines.append({**key._asdict(), "first": len(known), "rollouts": outcomes})
            known += outcomes
        self._write(lines)

    def add_logps(self, question: str, token_ids: tuple[int, ...], logps: list[float]) -> None:
        """Keep a trajectory's log-probabilities."""
        self.logps[question, token_ids] = logps
        self._write([{"question": question, "token_ids": token_ids, "logps": logps}])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self.path is not None:
            append_lines(self.path, lines)


def cut_torn_end(path: Path) -> None:
    """Remove a last line without its end, onto which the next one would be written."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        content_end, block = size, 1 << 16
        while content_end > 0:
            begin = max(0, content_end - block)
            file.seek(begin)
            place = file.read(content_end - begin).rfind(b"\n")
            if place >= 0:
                content_end = begin + place + 1
                break
            content_end = begin
        if content_end < size:
            file.truncate(content_end)
