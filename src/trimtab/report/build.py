"""`trimtab report`: from folders of runs and evaluations to one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import InputError
from trimtab.report.arms import Arm, arms_of, method_title
from trimtab.report.cost import cost_sections, seconds_text, wall_seconds
from trimtab.report.curves import curve_sections
from trimtab.report.group_weights import weigh_group
from trimtab.report.inspector import inspector_fragment
from trimtab.report.page import EMPTY, Cell, Section, Tab, Table, write_page
from trimtab.report.results import result_sections
from trimtab.report.runs import Evaluation, Material, Run, read_material, values_of
from trimtab.report.sampled_groups import SampledGroup, read_groups


def write_report(paths: Sequence[str | Path], output: str | Path) -> None:
    """Read folders of training runs and evaluations and CSV files of scores, in any mix, and write one HTML page.

    Raises:
        InputError: a folder or file cannot be used (the sentence says why), or the page cannot be written.
    """
    material = read_material(paths)
    tabs = report_tabs(arms_of(material.runs), material.evaluations, material.tables)
    kinds = (("training run", material.runs), ("evaluation", material.evaluations), ("table", material.tables))
    counts = [f"{len(found)} {name}{'s' if len(found) > 1 else ''}" for name, found in kinds if found]
    write_page(output, title=_title(material), intro=f"From {', '.join(counts)}.", tabs=tabs)


def report_tabs(
    arms: Sequence[Arm],
    evaluations: Sequence[Evaluation] = (),
    tables: Sequence[Path] = (),
    *,
    first: Sequence[Section] = (),
) -> list[Tab]:
    """The tabs of a report, those alone that have something to show.

    Args:
        arms: training runs.
        evaluations: any.
        tables: CSV files of scores.
        first: sections that open the overview, in place of the table of runs.
    """
    tabs = []
    if arms or first:
        tabs.append(Tab("Overview", [*(first or [runs_section(arms)]), *note_sections(arms)]))
    if evaluations or tables:
        tabs.append(Tab("Evaluation", result_sections(evaluations, tables)))
    if arms:
        tabs.append(Tab("Curves", curve_sections(arms)))
    groups, notes = sampled_groups(arms)
    if groups or notes:
        html = inspector_fragment(groups) if groups else ""
        tabs.append(Tab("Groups", [Section("Sampled groups", notes, html=html)]))
    if arms or evaluations:
        tabs.append(Tab("Cost", cost_sections(arms, evaluations)))
    return tabs


def runs_section(arms: Sequence[Arm]) -> Section:
    """A row an arm: where it started and where it came."""
    columns = ("run", "seeds", "steps", "held-out accuracy", "reward", "findings", "wall time")
    rows = [(Cell(arm.label, _folders(arm)), *_outcome(arm)) for arm in arms]
    caption = (
        "First and last value, mean over seeds; below it the lowest and the highest seed at the end. Reward: means of "
        "the first and the last tenth of the steps."
    )
    return Section("Training runs", table=Table(columns, rows, caption=caption))


def note_sections(arms: Sequence[Arm]) -> list[Section]:
    """What a reader must know about the files; no section when that is nothing."""
    notes = [f"{run.folder}: {note}" for arm in arms for run in arm.runs for note in run.notes]
    steps = {run.steps for arm in arms for run in arm.runs}
    if len(steps) > 1:
        notes.insert(0, f"The runs have different numbers of steps, from {min(steps)} to {max(steps)}.")
    return [Section("Notes", paragraphs=notes)] if notes else []


def sampled_groups(arms: Sequence[Arm]) -> tuple[list[SampledGroup], list[str]]:
    """The groups of every run that kept some, under the run's name; and why others cannot be shown."""
    groups: list[SampledGroup] = []
    notes = []
    for arm in arms:
        for run in arm.runs:
            # Supervised runs keep examples, not groups: they have no reward.
            if not any("reward" in line for line in run.samples):
                continue
            try:
                own = read_groups(run.folder, label=_run_label(arm, run))
                weigh_group(own[0])  # what the inspector will do, while one run can still be left out
                groups += own
            except InputError as error:
                notes.append(f"Not shown: {error}")
    return groups, notes


def _run_label(arm: Arm, run: Run) -> str:
    return f"{arm.label}, seed {run.seed}" if len(arm.runs) > 1 and run.seed is not None else arm.label


def _folders(arm: Arm) -> str:
    return arm.runs[0].name if len(arm.runs) == 1 else f"{arm.runs[0].name} and {len(arm.runs) - 1} more"


def _outcome(arm: Arm) -> tuple[Cell | str, ...]:
    steps = sorted({run.steps for run in arm.runs})
    watched = [run for run in arm.runs if run.findings is not None]
    findings = sum(len(run.findings or ()) for run in watched)
    collapsed = sum(any(finding.get("collapse") for finding in run.findings or ()) for run in watched)
    seconds = [spent for run in arm.runs if (spent := wall_seconds(run)) is not None]
    return (
        str(len(arm.runs)),
        str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}",
        _change(arm, "eval/accuracy", part=0.0),
        _change(arm, "reward", part=0.1),
        EMPTY if not watched else Cell(str(findings), f"{collapsed} collapsed" if collapsed else ""),
        seconds_text(sum(seconds)) if seconds else EMPTY,
    )


def _change(arm: Arm, key: str, *, part: float) -> Cell | str:
    """From the first to the last value (or the means of such a part of the steps), over the runs that have two."""
    ends = []
    for run in arm.runs:
        values = values_of(run, key)[1]
        if values:
            few = max(1, round(part * len(values)))
            ends.append((sum(values[:few]) / few, sum(values[-few:]) / few))
    if not ends:
        return EMPTY
    first, last = (sum(end[i] for end in ends) / len(ends) for i in (0, 1))
    lasts = [end[1] for end in ends]
    digits = 3 if abs(first) < 2 and abs(last) < 2 else 2
    spread = f"{min(lasts):.{digits}f} – {max(lasts):.{digits}f}" if len(ends) > 1 else ""
    return Cell(f"{first:.{digits}f} → {last:.{digits}f}", spread)


def _title(material: Material) -> str:
    """The methods at hand, as long as they fit on a line."""
    methods = dict.fromkeys(method_title(run.config) for run in material.runs if run.config)
    for evaluation in material.evaluations:
        methods |= dict.fromkeys(str(subject.get("method") or "") for subject in evaluation.subjects)
    named = [name for name in methods if name]
    if not 1 <= len(named) <= 4:
        return "Report"
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
