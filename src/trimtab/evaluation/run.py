"""`trimtab evaluate`: sample, judge, count. What is sampled is on disk at once, so that the same command continues."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trimtab.config import PromptSection
from trimtab.environment import commit, describe_environment, peak_memory_mib
from trimtab.errors import InputError
from trimtab.evaluation.backend import Backend
from trimtab.evaluation.config import EvaluateConfig, EvaluationData
from trimtab.evaluation.intervals import warn_of_identical_seeds
from trimtab.evaluation.results import Problems, arms_of, compare_arms, judged_problems, scores_of
from trimtab.evaluation.samples import (
    Line,
    check_about,
    file_name,
    fingerprint,
    finished_problems,
    judge,
    left_out,
    write_left_out,
)
from trimtab.evaluation.subjects import Subject, find_subjects
from trimtab.files import append_lines, held_alone, read_lines, replace_file
from trimtab.policy.completions import Completion, stretches
from trimtab.policy.sampler import SamplingParams
from trimtab.progress import Progress
from trimtab.seeds import derive_seed
from trimtab.tasks.problems import load_task_rows
from trimtab.tasks.prompts import render_prompt

logger = logging.getLogger("trimtab")


@dataclass(frozen=True)
class Work:
    """One subject on one data set.

    Attributes:
        subject: what is asked.
        data: the data section.
        rows: its rows.
        prompt: how a row becomes a prompt.
        contents: each row's prompt, without system message and examples.
        path: file of the samples.
    """

    subject: Subject
    data: EvaluationData
    rows: list[dict[str, Any]]
    prompt: PromptSection
    contents: list[str | list[dict[str, str]]]
    path: Path


def run_evaluation(config: EvaluateConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Sample what is not there yet and write results.json.

    Args:
        config: the resolved configuration.
        quiet: no progress.

    Returns:
        What results.json holds.

    Raises:
        InputError: a model, a run, data or the output folder cannot be used; nothing was sampled.
        RunError: a backend failed; what it completed is kept, and the same command continues.
    """
    subjects, works = plan(config)
    output = Path(config.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output: {output} cannot be made ({error.strerror}); name another folder") from error
    with held_alone(output):
        return _evaluate(subjects, works, config, output, quiet)


def _evaluate(
    subjects: list[Subject], works: dict[str, list[Work]], config: EvaluateConfig, output: Path, quiet: bool
) -> dict[str, Any]:
    replace_file(output / "config.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False).encode())
    started = {"command": sys.argv, "commit": commit(), "seed": config.seed}
    replace_file(output / "environment.json", json.dumps({**describe_environment(), **started}, indent=1).encode())
    samples = {
        label: sample_missing(own, config, output, Progress(title=label, unit="problem", quiet=quiet))
        for label, own in works.items()
    }
    results = summarise(subjects, works, samples, config, output)
    replace_file(output / "results.json", json.dumps(results, indent=1).encode())
    return results


def check_evaluation(config: EvaluateConfig) -> str:
    """What there would be to do, in a sentence; nothing loads and nothing is written.

    Raises:
        InputError: see `run_evaluation`.
    """
    subjects, works = plan(config)
    problems = sum(len(work.rows) for work in works[subjects[0].label])
    return (
        f"{len(subjects)} models x {problems} problems x {config.samples} samples = "
        f"{len(subjects) * problems * config.samples} completions"
    )


def plan(config: EvaluateConfig) -> tuple[list[Subject], dict[str, list[Work]]]:
    """The subjects, and what there is to do for each; data is read, nothing loads and nothing is written.

    Raises:
        InputError: see `run_evaluation`.
    """
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise InputError(f"output: {output} is a file; name a folder")
    if (output / "metrics.jsonl").exists():
        raise InputError(f"output: {output} is the folder of a training run; name another")
    files: dict[str, str] = {}
    for section in config.data:
        name = file_name(section.title)
        if files.setdefault(name, section.title) != section.title:
            raise InputError(f"data: the labels {files[name]!r} and {section.title!r} need one file; change one")
    subjects = find_subjects(config)
    folders: dict[str, str] = {}
    works: dict[str, list[Work]] = {}
    # Subjects mostly share their prompt, and then the data is read and rendered once for all of them.
    data: dict[tuple[str, str], tuple[list[dict[str, Any]], list[Any]]] = {}
    for subject in subjects:
        name = file_name(subject.label)
        if folders.setdefault(name, subject.label) != subject.label:
            raise InputError(f"models: the labels {folders[name]!r} and {subject.label!r} need one folder; change one")
        prompt = config.prompt or subject.prompt or PromptSection()
        works[subject.label] = []
        for section in config.data:
            key = (section.title, prompt.model_dump_json())
            if key not in data:
                rows = load_task_rows(section, prompt, required=["answer"])
                data[key] = rows, [_content(row, number, section, prompt) for number, row in enumerate(rows, 1)]
            rows, contents = data[key]
            path = output / "samples" / name / f"{file_name(section.title)}.jsonl"
            works[subject.label].append(Work(subject, section, rows, prompt, contents, path))
    return subjects, works


def _content(row: dict[str, Any], number: int, data: EvaluationData, prompt: PromptSection) -> Any:
    """A row's prompt. Raises InputError, with the row's number, when the prompt or the answer is of the wrong kind."""
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise InputError(
            f"{data.source}, row {number}: the answer is a {type(answer).__name__}; it must be text or a number"
        )
    try:
        return render_prompt(row, template=prompt.template, system=None)
    except InputError as error:
        raise InputError(f"{data.source}, row {number}: {error}") from error


def sample_missing(works: list[Work], config: EvaluateConfig, output: Path, progress: Progress) -> dict[str, Problems]:
    """Sample one subject's problems that the output folder lacks; the model loads only if there are any.

    Returns:
        All its problems, by the data set's title.
    """
    subject, folder = works[0].subject, works[0].path.parent
    about = {
        "subject": subject.identity(),
        "prompt": works[0].prompt.model_dump(),
        "sampling": config.sampling.model_dump(),
        "samples": config.samples,
        "seed": config.seed,
        "data": {work.data.title: fingerprint(work.contents, [row["answer"] for row in work.rows]) for work in works},
    }
    check_about(folder, about)
    found = {work.data.title: finished_problems(work.path, config.samples) for work in works}
    done = {work.data.title: {*found[work.data.title], *left_out(work.path)} for work in works}
    if all(len(done[work.data.title]) >= len(work.rows) for work in works):
        progress.note("every sample is there already")
        return found
    backend = Backend(subject, config)
    try:
        for work in works:
            sample_work(work, backend, config, done[work.data.title], output, progress)
    finally:
        progress.close()
        backend.close()
    return {work.data.title: finished_problems(work.path, config.samples) for work in works}


def sample_work(
    work: Work, backend: Backend, config: EvaluateConfig, done: set[int], output: Path, progress: Progress
) -> None:
    """Sample one subject's missing problems of one data set, saving each problem as soon as it is complete."""
    prompts, numbers = backend.prompts(work.rows, work.data, work.prompt)
    if len(numbers) < len(work.rows):
        write_left_out(work.path, [number for number in range(len(work.rows)) if number not in set(numbers)])
    missing = [place for place, number in enumerate(numbers) if number not in done]
    params = SamplingParams(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        max_tokens=config.sampling.max_completion_tokens,
    )
    seed = derive_seed(config.seed, "evaluation")
    finished = len(numbers) - len(missing)
    last = time.perf_counter()
    for stretch in stretches(missing):

        def save(place: int, completions: list[Completion], stretch: range = stretch) -> None:
            nonlocal finished, last
            number = numbers[stretch[place]]
            lines = judge(number, work.rows[number], completions)
            work.path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(work.path, lines)
            now = time.perf_counter()
            names = {"label": work.subject.label, "data": work.data.title, "problem": number}
            append_lines(output / "timings.jsonl", [{**names, "seconds": now - last}])
            last, finished = now, finished + 1
            progress.count(finished, len(numbers), work.data.title)

        backend.completer.complete(
            [prompts[place] for place in stretch],
            config.samples,
            params,
            seed,
            first_row=stretch[0] * config.samples,
            on_done=save,
        )


def summarise(
    subjects: list[Subject],
    works: dict[str, list[Work]],
    samples: dict[str, dict[str, Problems]],
    config: EvaluateConfig,
    output: Path,
) -> dict[str, Any]:
    """What results.json holds."""
    seconds = _seconds(output / "timings.jsonl")
    for arm in arms_of(subjects).values():
        warn_of_identical_seeds({subject.label: _texts(samples[subject.label]) for subject in arm})
    described = []
    for subject in subjects:
        by_data = {}
        for work in works[subject.label]:
            title = work.data.title
            problems = samples[subject.label][title]
            lines = [line for own in problems.values() for line in own]
            judged = judged_problems(problems)
            if len(judged) < len(problems):
                logger.warning(
                    "%s, %s: %d of %d gold answers cannot be parsed; these problems count in no accuracy",
                    subject.label,
                    title,
                    len(problems) - len(judged),
                    len(problems),
                )
            by_data[title] = {
                "problems": len(judged),
                "samples": config.samples,
                "unparsable_gold": len(problems) - len(judged),
                "too_long_prompts": len(work.rows) - len(problems),
                "seconds": seconds.get((subject.label, title), 0.0),
                "tokens": _tokens(lines),
                "scores": scores_of(problems, config),
            }
        described.append({**subject.described(), "data": by_data})
    return {
        "subjects": described,
        "comparisons": compare_arms(subjects, samples, config),
        "sampling": {**config.sampling.model_dump(), "samples": config.samples, "seed": config.seed},
        "level": config.level,
        "peak_memory_mib": peak_memory_mib(),
    }


def _seconds(timings: Path) -> dict[tuple[str, str], float]:
    """Time of each subject on each data set, over all the calls that it took."""
    seconds: dict[tuple[str, str], float] = {}
    try:
        for line in read_lines(timings):
            key = (line["label"], line["data"])
            seconds[key] = seconds.get(key, 0.0) + line["seconds"]
    except (KeyError, ValueError) as error:
        raise InputError(f"{timings}: cannot be read ({error}); remove it, and only the times are lost") from error
    return seconds


def _texts(by_data: dict[str, Problems]) -> list[str]:
    return [line["completion"] for problems in by_data.values() for _, own in sorted(problems.items()) for line in own]


def _tokens(lines: list[Line]) -> int | None:
    counts = [line["tokens"] for line in lines]
    return None if None in counts else sum(counts)
