"""Scores in long form: one record a number, from evaluations, from CSV files and from the paper."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.errors import InputError
from trimtab.evaluation.seeds import group_by_seed
from trimtab.files import replace_file

HERE = "here"
"""Source of what was measured with this package."""

PAPER = "arXiv 2508.03772v5, Table 1"
"""Source of the numbers of the GTPO paper."""

SHARES = ("pass", "first", "maj", "maj_first", "mean", "format", "truncated")
"""Metrics whose values lie from 0 to 1."""

_NEEDED = ("model", "training", "method", "data", "metric", "value")
_PAPER_FILE = "gtpo-paper-table-1.csv"


@dataclass(frozen=True)
class Score:
    """One number of one method.

    Attributes:
        model: the model without the training ("Qwen2.5-3B-Instruct").
        training: what it was trained on ("GSM8K"), or "".
        method: how it was trained ("GTPO"), or "".
        data: what it was evaluated on ("AIME 2024").
        metric: "pass", "first", "maj", "maj_first", "mean", "format", "entropy", "tokens" or "truncated".
        k: of the metric; None where it has none.
        value: a share from 0 to 1; nats for the entropy, a count for tokens.
        low, high: interval; None where there is none.
        seeds: how many training seeds the value is the mean of.
        interval: what the interval is over, how it was found, and its level.
        source: `HERE`, or where the number was published.
        note: what a reader must know, for example how the checkpoint was chosen.
    """

    model: str
    training: str
    method: str
    data: str
    metric: str
    k: int | None
    value: float
    low: float | None = None
    high: float | None = None
    seeds: int = 1
    interval: str = ""
    source: str = ""
    note: str = ""


def collect_scores(paths: Sequence[str | Path], *, paper: bool = False) -> list[Score]:
    """Scores of evaluation folders, seeds merged across them, then of CSV files, then of the paper.

    Args:
        paths: evaluation folders and CSV files of scores.
        paper: the paper's Table 1 too.

    Raises:
        InputError: see `load_scores` and `read_scores_csv`; or the paper's numbers do not ship.
    """
    files = [path for path in map(Path, paths) if path.is_file()]
    scores = load_scores(*(path for path in map(Path, paths) if path not in files))
    for file in files:
        scores += read_scores_csv(file)
    if paper:
        known = paper_scores()
        if not known:
            raise InputError(
                "--paper: the numbers of the paper's Table 1 do not ship with this version; type them into a copy of "
                f"{resources.files('trimtab') / 'data' / _PAPER_FILE} and name that file beside the evaluations"
            )
        scores += known
    return scores


def load_scores(*folders: str | Path) -> list[Score]:
    """Scores of evaluation folders.

    Subjects that differ by their seed alone become one: the mean over seeds with Student's t interval. Of several
    checkpoints or labels with the same model, training and method, the difference is added to the method's name.

    Args:
        folders: what `trimtab evaluate` wrote.

    Raises:
        InputError: a folder has no results.json or one that cannot be used, or one thing was evaluated twice.
    """
    subjects: dict[tuple[Any, ...], _Subject] = {}
    for folder in folders:
        path = Path(folder) / "results.json"
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            found = [_subject(record, float(results.get("level", 0.95))) for record in results["subjects"]]
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror}); name what `trimtab evaluate` wrote"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: not the results of an evaluation ({error!r}); evaluate again") from error
        for subject in found:
            known = subjects.setdefault(subject.identity, subject)
            if known is subject:
                continue
            twice = {score.data for score in known.scores} & {score.data for score in subject.scores}
            if twice:
                raise InputError(f"{path}: {subject.label!r} on {min(twice)} is in another folder too; leave one out")
            known.scores.extend(subject.scores)
    merged: list[Score] = []
    for apart, group in group_by_seed(list(subjects.values())):
        method = group[0].arm[2]
        merged += _merge(f"{method} ({apart})".strip() if apart else method, group)
    return merged


@dataclass(frozen=True)
class _Subject:
    """What one subject of results.json holds."""

    label: str
    arm: tuple[str, str, str]
    seed: int | None
    checkpoint: str
    level: float
    scores: list[Score] = field(default_factory=list)

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.label, self.arm, self.seed, self.checkpoint


def _subject(record: dict[str, Any], level: float) -> _Subject:
    arm = (record["model"], record["training"], record["method"])
    scores = [
        Score(
            *arm,
            data=data,
            metric=score["metric"],
            k=score["k"],
            value=float(score["value"]),
            low=score["low"],
            high=score["high"],
            interval=_with_level(score["interval"], level),
            source=HERE,
            note=record["checkpoint"],
        )
        for data, found in record["data"].items()
        for score in found["scores"]
    ]
    return _Subject(record["label"], arm, record["seed"], record["checkpoint"], level, scores)


def _with_level(interval: str, level: float) -> str:
    return f"{interval}, {100 * level:g} %" if interval else ""


def _merge(method: str, runs: Sequence[_Subject]) -> list[Score]:
    """The mean over seeds of each number; one run's numbers stay as they are."""
    if len(runs) == 1:
        return [replace(score, method=method) for score in runs[0].scores]
    from trimtab.evaluation.intervals import IdenticalSeedsWarning, seeds_interval

    places: dict[tuple[str, str, int | None], list[Score]] = {}
    for run in runs:
        for score in run.scores:
            places.setdefault((score.data, score.metric, score.k), []).append(score)
    merged: list[Score] = []
    for own in places.values():
        values = [score.value for score in own]
        # Equal values are no sign of equal outputs here (0 of 30 problems, whatever the seed); the evaluation compares
        # the outputs themselves and warns of them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IdenticalSeedsWarning)
            interval = seeds_interval(values, runs[0].level)
        merged.append(
            replace(
                own[0],
                method=method,
                value=statistics.fmean(values),
                low=interval.low if interval else None,
                high=interval.high if interval else None,
                seeds=len(own),
                interval=_with_level(interval.method, interval.level) if interval else "",
                note="; ".join(dict.fromkeys(score.note for score in own if score.note)),
            )
        )
    return merged


def paper_scores() -> list[Score]:
    """Table 1 of the GTPO paper, as far as its numbers ship: see gtpo-paper-table-1.md beside the file."""
    return _parse((resources.files("trimtab") / "data" / _PAPER_FILE).read_text(encoding="utf-8"), _PAPER_FILE)


def read_scores_csv(path: str | Path) -> list[Score]:
    """Scores of a CSV file with the fields of `Score` as columns, in any order.

    A line without a value is left out: its number is not known. Lines above the columns that begin with # are comments.

    Raises:
        InputError: the file cannot be read, lacks a column, or a field is not what it must be; with its line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); name a CSV file of scores") from error
    return _parse(text, str(path))


def scores_csv(scores: Iterable[Score]) -> str:
    """The CSV text that `read_scores_csv` reads back."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [column.name for column in fields(Score)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in asdict(score).items()} for score in scores)
    return file.getvalue()


def write_scores_csv(path: str | Path, scores: Iterable[Score]) -> None:
    """Write scores so that `read_scores_csv` gives the same back.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        replace_file(Path(path), scores_csv(scores).encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name a file in an existing folder") from error


def _parse(text: str, name: str) -> list[Score]:
    lines = list(io.StringIO(text, newline=""))
    comments = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    reader = csv.DictReader(lines[comments:])
    missing = [column for column in _NEEDED if column not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"{name}: the columns {', '.join(missing)} are missing; it must have {', '.join(_NEEDED)}")
    return [_score(row, f"{name}, line {comments + reader.line_num}") for row in reader if (row["value"] or "").strip()]


def _score(row: dict[str | None, Any], where: str) -> Score:
    if None in row:
        raise InputError(f"{where}: more fields than columns; put quotes around a field that has a comma")
    cells = {str(key): (value or "").strip() for key, value in row.items()}

    def number(key: str) -> float | None:
        text = cells.get(key, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InputError(f"{where}: {key} is {text!r}; write a number, such as 0.533")
        return value

    def whole(key: str) -> int | None:
        value = number(key)
        if value is not None and (value < 1 or value != int(value)):
            raise InputError(f"{where}: {key} is {cells[key]!r}; write a whole number from 1")
        return None if value is None else int(value)

    value = number("value")
    assert value is not None
    if cells["metric"] in SHARES and not 0 <= value <= 1:
        raise InputError(f"{where}: value is {cells['value']!r}; write a share from 0 to 1, 0.533 for 53.3 %")
    return Score(
        model=cells["model"],
        training=cells["training"],
        method=cells["method"],
        data=cells["data"],
        metric=cells["metric"],
        k=whole("k"),
        value=value,
        low=number("low"),
        high=number("high"),
        seeds=whole("seeds") or 1,
        interval=cells.get("interval", ""),
        source=cells.get("source", ""),
        note=cells.get("note", ""),
    )
