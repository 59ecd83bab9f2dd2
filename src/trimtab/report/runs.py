"""Folders of training runs and of evaluations, read as they are: finished, still being written, or of older origin."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import InputError
from trimtab.files import read_lines

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        folder: where it is.
        config: the resolved configuration; empty where there is none.
        metrics: the lines of metrics.jsonl, each with a step.
        timings, samples: lines of the other files; empty where there are none.
        findings: of the collapse monitor; None where nobody watched.
        environment: versions and machine; empty where nobody wrote them down.
        notes: what a reader must know about the files, in sentences.
    """

    folder: Path
    config: dict[str, Any]
    metrics: Lines
    timings: Lines
    findings: Lines | None
    samples: Lines
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def seed(self) -> int | None:
        """Of the training."""
        return self.config.get("seed")

    @property
    def steps(self) -> int:
        """The last step that was measured."""
        return int(self.metrics[-1]["step"])


@dataclass(frozen=True)
class Evaluation:
    """What `trimtab evaluate` wrote: the content of results.json, and the environment."""

    folder: Path
    subjects: Lines
    comparisons: Lines
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name


@dataclass(frozen=True)
class Material:
    """What a report is made of; `tables` are CSV files of scores."""

    runs: list[Run]
    evaluations: list[Evaluation]
    tables: list[Path]


def read_material(paths: Iterable[str | Path]) -> Material:
    """Folders of training runs and evaluations, and CSV files of scores; what is named twice counts once.

    Raises:
        InputError: a path is none of these, or a file in a folder is damaged.
    """
    material = Material([], [], [])
    for path in dict.fromkeys(Path(path).resolve() for path in paths):
        path = _shortest(path)
        if path.is_file() and path.suffix == ".csv":
            material.tables.append(path)
            continue
        _check_folder(path)
        if (path / "results.json").is_file():
            material.evaluations.append(read_evaluation(path))
        else:
            material.runs.append(read_run(path))
    return material


def read_run(folder: Path) -> Run:
    """One training run, up to the last whole line of each file.

    Raises:
        InputError: metrics.jsonl holds no whole line, or a file is damaged.
    """
    notes: list[str] = []
    metrics, torn = _lines(folder / "metrics.jsonl")
    if not metrics:
        raise InputError(f"{folder / 'metrics.jsonl'}: no step has been measured yet; wait for the run's first lines.")
    for number, line in enumerate(metrics):
        if not isinstance(line.setdefault("step", number), int | float):
            raise InputError(f"{folder / 'metrics.jsonl'}: line {number + 1}: step is {line['step']!r}, not a number.")
    if torn:
        notes.append(
            f"The last line of metrics.jsonl is not whole: the run is being written or was cut off. Shown up to step "
            f"{metrics[-1]['step']}."
        )
    optional = {name: _lines(folder / f"{name}.jsonl")[0] for name in ("timings", "findings", "samples")}
    if not optional["timings"]:
        notes.append("There is no timings.jsonl, so its time and memory are not known.")
    config = _yaml(folder / "config.yaml")
    if not config:
        notes.append("There is no config.yaml: the run stands for itself, under the name of its folder.")
    return Run(
        folder,
        config,
        metrics,
        optional["timings"],
        optional["findings"] if optional["findings"] or _is_watched(config) else None,
        optional["samples"],
        _json(folder / "environment.json"),
        tuple(notes),
    )


def read_evaluation(folder: Path) -> Evaluation:
    """One evaluation. Raises InputError when results.json is damaged or holds no score."""
    results = _json(folder / "results.json")
    subjects = results.get("subjects")
    if not isinstance(subjects, list) or not any(subject.get("data") for subject in subjects):
        raise InputError(
            f"{folder / 'results.json'}: holds no scores; run the evaluation again, its samples are not drawn twice."
        )
    return Evaluation(folder, subjects, results.get("comparisons") or [], _json(folder / "environment.json"))


def _is_watched(config: dict[str, Any]) -> bool:
    """Whether a collapse monitor was at work; without findings it writes no file."""
    return (config.get("monitor") or {}).get("on_collapse", "off") != "off"


def _check_folder(folder: Path) -> None:
    """Raise InputError with what to do instead, unless this is the folder of a run or of an evaluation."""
    if not folder.exists():
        raise InputError(f"{folder}: there is no such folder.")
    if not folder.is_dir():
        raise InputError(f"{folder}: this is a file; name a run's or an evaluation's folder, or a .csv of scores.")
    if any((folder / name).is_file() for name in ("metrics.jsonl", "results.json")):
        return
    inside = sorted(folder.iterdir())
    if not inside:
        raise InputError(f"{folder}: this folder is empty; name one that `trimtab train` or `trimtab evaluate` wrote.")
    runs = [path for path in inside if (path / "metrics.jsonl").is_file() or (path / "results.json").is_file()]
    if runs:
        raise InputError(f"{folder}: this folder holds {len(runs)} runs; name them themselves, as in {folder}/*/")
    if (folder / "config.yaml").is_file():
        raise InputError(f"{folder}: nothing has been measured yet (no metrics.jsonl, no results.json); wait for it.")
    raise InputError(
        f"{folder}: not the folder of a run or of an evaluation (it has neither metrics.jsonl nor results.json)."
    )


def _lines(path: Path) -> tuple[Lines, bool]:
    """Whole lines, and whether the file ends in the middle of one. A file that is not there has none."""
    if not path.is_file():
        return [], False
    try:
        lines = read_lines(path)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1))
            return lines, file.read(1) not in (b"\n", b"")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}; mend or remove that line.") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a JSON object.")
    return content


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: not valid YAML ({str(error).splitlines()[0]}).") from error
    return content if isinstance(content, dict) else {}


def _shortest(path: Path) -> Path:
    """Relative to where the user is, when it lies below: people are shown what they typed."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def values_of(run: Run, key: str) -> tuple[Sequence[float], Sequence[float]]:
    """Steps and values of one metric, where it is a finite number."""
    points = [
        (line["step"], line[key])
        for line in run.metrics
        if isinstance(line.get(key), int | float) and abs(line[key]) < float("inf")
    ]
    return [step for step, _ in points], [value for _, value in points]
