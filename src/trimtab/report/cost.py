"""What runs and evaluations cost, and on what they ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.report.arms import Arm
from trimtab.report.page import Section, Table
from trimtab.report.runs import Evaluation, Run, values_of

UNKNOWN = "–"


def cost_sections(arms: Sequence[Arm], evaluations: Sequence[Evaluation]) -> list[Section]:
    """A row a run, a row an evaluated model, then versions and machine, a column for each different environment."""
    sections = []
    runs = [(arm, run) for arm in arms for run in arm.runs]
    if runs:
        columns = ["run", "seed", "steps", "wall time", "evaluation", "a step", "tokens", "peak memory", "machine"]
        rows = [(arm.label, *_training(run)) for arm, run in runs]
        caption = "Tokens: mean length times batch size. Evaluation: its part of the wall time. A step: the median."
        sections.append(Section("Training", table=Table(columns, rows, caption=caption)))
    if evaluations:
        sections.append(Section("Evaluation", table=_evaluation_costs(evaluations)))
    environments = [(run.name, run.environment) for _, run in runs]
    environments += [(evaluation.name, evaluation.environment) for evaluation in evaluations]
    if any(environment for _, environment in environments):
        sections.append(_environments(environments))
    return sections


def seconds_text(seconds: float) -> str:
    """A duration as people write it: 0.48 s, 58 s, 3 min 2 s, 1 h 5 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def count_text(count: float) -> str:
    """A large number in few digits: 812, 49.2 k, 3.1 M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return f"{count:.0f}"


def wall_seconds(run: Run) -> float | None:
    """Training and evaluation; None where no time was written down."""
    spent = [
        line[key]
        for line in run.timings
        for key in ("seconds", "evaluation_seconds")
        if isinstance(line.get(key), int | float)
    ]
    return float(sum(spent)) if spent else None


def _training(run: Run) -> tuple[str, ...]:
    steps = [line["seconds"] for line in run.timings if line.get("step") and "seconds" in line]
    # Step 0 is the evaluation of the untouched model.
    evaluation = sum(line.get("evaluation_seconds", 0.0) for line in run.timings)
    evaluation += sum(line.get("seconds", 0.0) for line in run.timings if line.get("step") == 0)
    memory = [line["peak_memory_mib"] for line in run.timings if line.get("peak_memory_mib") is not None]
    lengths = values_of(run, "completions/mean_length")[1]
    batch = (run.config.get("training") or {}).get("batch_size")
    total = wall_seconds(run)
    return (
        UNKNOWN if run.seed is None else str(run.seed),
        str(run.steps),
        UNKNOWN if total is None else seconds_text(total),
        seconds_text(evaluation) if run.timings else UNKNOWN,
        seconds_text(sorted(steps)[len(steps) // 2]) if steps else UNKNOWN,
        count_text(sum(lengths) * batch) if lengths and batch else UNKNOWN,
        f"{max(memory):.0f} MiB" if memory else UNKNOWN,
        machine_text(run.environment),
    )


def _evaluation_costs(evaluations: Sequence[Evaluation]) -> Table:
    rows = []
    for evaluation in evaluations:
        for subject in evaluation.subjects:
            for data, found in subject["data"].items():
                rows.append(
                    (
                        str(subject["label"]),
                        data,
                        str(found.get("problems", UNKNOWN)),
                        str(found.get("samples", UNKNOWN)),
                        str(found.get("unparsable_gold", 0)),
                        UNKNOWN if found.get("seconds") is None else seconds_text(found["seconds"]),
                        UNKNOWN if found.get("tokens") is None else count_text(found["tokens"]),
                        machine_text(evaluation.environment),
                    )
                )
    columns = ("model", "data", "problems", "samples", "unparsable", "wall time", "tokens", "machine")
    return Table(columns, rows, caption="Unparsable: problems whose reference answer cannot be read; left out.")


def machine_text(environment: dict[str, Any]) -> str:
    """A machine in a few words."""
    machine = environment.get("machine") or {}
    gpus = machine.get("gpus") or []
    if gpus:
        return f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else str(gpus[0])
    if not machine:
        return UNKNOWN
    threads = machine.get("torch_threads")
    words = [str(machine.get("processor") or ""), f"{machine.get('cores', '?')} cores"]
    words += [f"{threads} thread{'s' if threads != 1 else ''}"] if threads else []
    return ", ".join(word for word in words if word)


def _environments(environments: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    distinct: list[tuple[dict[str, str], list[str]]] = []
    for name, environment in environments:
        facts = _facts(environment)
        known = next((names for other, names in distinct if other == facts), None)
        if known is None:
            distinct.append((facts, [name]))
        else:
            known.append(name)
    keys = list(dict.fromkeys(key for facts, _ in distinct for key in facts))
    columns = ["", *("all of them" if len(distinct) == 1 else _names(names) for _, names in distinct)]
    rows = [[key, *(facts.get(key, UNKNOWN) for facts, _ in distinct)] for key in keys]
    return Section("Environment", table=Table(columns, rows, plain=True))


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _facts(environment: dict[str, Any]) -> dict[str, str]:
    machine = environment.get("machine") or {}
    facts = {"system": str(machine["system"])} if machine.get("system") else {}
    if machine:
        facts["machine"] = machine_text(environment)
    starts = environment.get("starts") or [environment]
    commits = dict.fromkeys(str(start["commit"])[:12] for start in starts if start.get("commit"))
    if commits:
        facts["commit"] = ", ".join(commits)
    versions = environment.get("versions") or {}
    return facts | {name: str(version) for name, version in versions.items() if version}
