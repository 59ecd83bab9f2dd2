"""What is evaluated: models, checkpoints of runs and endpoints, found and named before anything loads."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.config import LoadedModelSection, PromptSection, RunConfig
from trimtab.config_file import load_config
from trimtab.errors import InputError
from trimtab.evaluation.config import EndpointSection, EvaluateConfig, SubjectSection, short_name
from trimtab.files import read_lines
from trimtab.objectives import METHODS
from trimtab.tasks.named import NAMED_DATA

SELECTED_BY = "eval/accuracy"
"""What `checkpoint: best` goes by."""


@dataclass(frozen=True)
class Subject:
    """One thing to evaluate.

    Attributes:
        label: its name, unlike every other's.
        base: the model's name without the training, a column of the tables.
        training: what it was trained on, or "".
        method: how, or "".
        seed: of its training, if any.
        checkpoint: which one, in words; "" for a model or an endpoint.
        model: what to load; None for an endpoint.
        endpoint: where to ask; None for a model.
        prompt: how its training made prompts; None without a run.
    """

    label: str
    base: str
    training: str
    method: str
    seed: int | None
    checkpoint: str
    model: LoadedModelSection | None
    endpoint: EndpointSection | None
    prompt: PromptSection | None

    @property
    def arm(self) -> tuple[str, str, str]:
        """What its tables' row is called: model, training, method."""
        return self.base, self.training, self.method

    def described(self) -> dict[str, Any]:
        """What results.json says of it."""
        names = {"label": self.label, "model": self.base, "training": self.training, "method": self.method}
        return {**names, "seed": self.seed, "checkpoint": self.checkpoint}

    def identity(self) -> dict[str, Any]:
        """What decides its samples. A server may come back at another address."""
        return {
            "checkpoint": self.checkpoint,
            "model": self.model.model_dump() if self.model else None,
            "endpoint": self.endpoint.model_dump(include={"model", "api"}) if self.endpoint else None,
        }


def find_subjects(config: EvaluateConfig) -> list[Subject]:
    """Every model, run's checkpoint and endpoint that the configuration names.

    Raises:
        InputError: a run or a checkpoint is not there, or two subjects have one label.
    """
    found: list[Subject] = []
    for number, section in enumerate(config.models):
        where = f"models.{number}"
        if section.run is not None:
            found += _from_runs(section, where)
        else:
            found.append(_from_name(section))
    counts = Counter(subject.label for subject in found)
    for label, count in counts.items():
        if count > 1:
            raise InputError(f"models: {count} of them are called {label!r}; give each a label of its own")
    if config.baseline is not None and config.baseline not in counts:
        raise InputError(f"baseline: {config.baseline!r} is none of the models ({', '.join(map(repr, counts))})")
    return found


def _from_name(section: SubjectSection) -> Subject:
    if section.endpoint is not None:
        base = section.endpoint.model
    else:
        assert section.model is not None
        base = section.model.name
    short = short_name(base)
    return Subject(
        label=section.label or short,
        base=short,
        training=section.training or "",
        method=section.method or "",
        seed=None,
        checkpoint="",
        model=section.model,
        endpoint=section.endpoint,
        prompt=None,
    )


def _from_runs(section: SubjectSection, where: str) -> Iterator[Subject]:
    assert section.run is not None
    folders = sorted(glob.glob(section.run)) if glob.has_magic(section.run) else [section.run]
    folders = [folder for folder in folders if Path(folder).is_dir()]
    if not folders:
        raise InputError(f"{where}.run: there is no folder {section.run!r}")
    for folder in folders:
        run = Path(folder)
        if not (run / "config.yaml").is_file():
            raise InputError(f"{where}.run: {run} is not the folder of a training run (it has no config.yaml)")
        subject = _describe_run(section, run, load_config(run / "config.yaml"))
        if section.label is not None and len(folders) > 1:
            subject = replace(subject, label=f"{section.label} {run.name}")
        chosen = list(_choose_checkpoints(section.checkpoint, run, where))
        for path, words in chosen:
            label = f"{subject.label} {path.name}" if len(chosen) > 1 else subject.label
            assert subject.model is not None
            # Adapters name their base model themselves, and a checkpoint is a plain folder whatever it began as.
            model = subject.model.model_copy(update={"name": str(path)})
            yield replace(subject, label=label, checkpoint=words, model=model)


def _describe_run(section: SubjectSection, run: Path, config: RunConfig) -> Subject:
    name = config.method["name"]
    known = METHODS.get(name)
    named = NAMED_DATA.get(config.data.source)
    return Subject(
        label=section.label or run.resolve().name,
        base=short_name(config.model.name),
        training=section.training or (named.title if named else short_name(config.data.source)),
        method=section.method or (known.title if known and known.title else name.upper()),
        seed=config.seed,
        checkpoint="",
        model=LoadedModelSection(
            name=config.model.name, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code
        ),
        endpoint=None,
        prompt=config.prompt,
    )


def _choose_checkpoints(wanted: int | str, run: Path, where: str) -> Iterator[tuple[Path, str]]:
    """The wanted checkpoints of a run, each with what a table should say of it."""
    steps = sorted(
        int(path.name.removeprefix("step_"))
        for path in (run / "checkpoints").glob("step_*")
        if path.name.removeprefix("step_").isdigit() and (path / "trainer_state.json").is_file()
    )
    if not steps:
        raise InputError(f"{where}.run: {run} has no checkpoint yet")

    def place(step: int) -> Path:
        return run / "checkpoints" / f"step_{step}"

    if wanted == "final":
        yield place(steps[-1]), f"final, step {steps[-1]}"
    elif wanted == "all":
        yield from ((place(step), f"step {step}") for step in steps)
    elif wanted == "best":
        scores = {line["step"]: line[SELECTED_BY] for line in _metrics(run) if line.get(SELECTED_BY) is not None}
        held = [step for step in steps if step in scores]
        if not held:
            raise InputError(f"{where}.checkpoint: {run} measured no {SELECTED_BY} at any checkpoint that it kept")
        best = max(held, key=lambda step: scores[step])
        yield place(best), f"selected, step {best}: best {SELECTED_BY} of {len(held)} on the run's held-out rows"
    elif wanted in steps:
        assert isinstance(wanted, int)
        yield place(wanted), f"step {wanted}"
    else:
        raise InputError(
            f"{where}.checkpoint: {run} has no checkpoint {wanted} (there are {', '.join(map(str, steps))})"
        )


def _metrics(run: Path) -> list[dict[str, Any]]:
    try:
        return read_lines(run / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise InputError(f"{run / 'metrics.jsonl'}: cannot be read ({error})") from error
