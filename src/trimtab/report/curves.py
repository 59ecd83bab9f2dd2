"""Which metrics of a run are worth a curve, in which order, and what the collapse monitor found on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trimtab.report.arms import Arm
from trimtab.report.charts import Mark, Series, curve_chart
from trimtab.report.page import Cell, LegendEntry, Section, Table
from trimtab.report.runs import Run, values_of

MOST_POINTS = 300
"""A longer line is shown as means of stretches of steps, so that a page of long runs still opens at once."""


@dataclass(frozen=True)
class Curve:
    """A metric of metrics.jsonl, and how a person calls it."""

    key: str
    title: str
    unit: str


# A star stands for a name that a run chooses, such as that of a reward.
GROUPS: dict[str, tuple[Curve, ...]] = {
    "Held-out problems": (
        Curve("eval/accuracy", "Held-out accuracy", "share of completions"),
        Curve("eval/pass@*", "Held-out pass@{}", "share of problems"),
        Curve("eval/format", "Held-out format", "share of completions"),
        Curve("eval/entropy", "Held-out entropy", "nats a token"),
        Curve("eval/mean_length", "Held-out length", "tokens"),
    ),
    "Rewards": (
        Curve("reward", "Reward", "mean, weighted sum of the parts"),
        Curve("rewards/*/mean", "Reward: {}", "mean"),
        Curve("excluded_rows", "Rows without a reward", "share of completions"),
    ),
    "Policy": (
        Curve("entropy", "Entropy", "nats a token"),
        Curve("kl", "KL to the reference", "nats a token"),
        Curve("completions/mean_length", "Length", "tokens a completion"),
        Curve("completions/clipped_ratio", "Hit the length limit", "share of completions"),
    ),
    "Updates": (
        Curve("grad_norm", "Gradient norm", "before clipping"),
        Curve("loss", "Loss", "mean over the updates"),
        Curve("clip_ratio", "Clipped tokens", "share of tokens"),
        Curve("frac_reward_zero_std", "Groups without a difference", "share of completions"),
        Curve("gtpo/kept_fraction", "Kept completions", "share of completions"),
        Curve("gtpo/conflict_fraction", "Conflict tokens", "share of tokens"),
        Curve("pushed_down/before", "Pushed down, plain advantages", "share of groups"),
        Curve("pushed_down/after", "Pushed down, the method's weights", "share of groups"),
    ),
}
# A line that lies at 0 throughout says nothing about these.
DULL_AT_ZERO = frozenset({"excluded_rows", "clip_ratio", "completions/clipped_ratio", "kl"})
# In policy-gradient methods the loss is no measure of anything; it is shown where there is no reward.
ONLY_WITHOUT_REWARD = frozenset({"loss"})
# Under a percent axis a line from 0 to 1 shows where it stands; others show how it moves.
SHARES = frozenset({"pushed_down/before", "pushed_down/after"})


def curve_sections(arms: Sequence[Arm]) -> list[Section]:
    """A legend and the findings, then a section of charts for each group of metrics that was measured."""
    labels = [arm.label for arm in arms]
    sections = [Section("Runs", paragraphs=_about(arms), legend=legend(arms))]
    sections.append(findings_section(arms))
    for heading, curves in GROUPS.items():
        charts = [curve_of(curve, arms, labels) for curve in _named(curves, arms)]
        if charts:
            sections.append(Section(heading, charts=charts))
    return sections


def legend(arms: Sequence[Arm]) -> list[LegendEntry]:
    """One entry an arm, in the order of the colours."""
    return [
        LegendEntry(arm.label, place, "" if len(arm.runs) == 1 else f"{len(arm.runs)} seeds")
        for place, arm in enumerate(arms)
    ]


def curve_of(curve: Curve, arms: Sequence[Arm], labels: Sequence[str]) -> Any:
    """The chart of one metric: a line an arm that measured it."""
    series: list[Series] = []
    marks = []
    for arm in arms:
        for place, run in enumerate(arm.runs):
            steps, values = thinned(*values_of(run, curve.key))
            if values:
                # Seeds of an arm differ, unless none of its runs names one.
                series.append((arm.label, run.seed if run.seed is not None else place, steps, values))
            marks += [
                Mark(arm.label, onset, f"{_who(arm, run)}{finding.get('message', '')}")
                for finding in run.findings or ()
                if finding.get("signal") == curve.key and (onset := _onset(finding)) is not None
            ]
    return curve_chart(
        series,
        title=curve.title,
        x_title="step",
        y_title=curve.unit,
        domain=(0, 1) if curve.key in SHARES else None,
        marks=marks,
        labels=labels,
        legend=False,
    )


def findings_section(arms: Sequence[Arm]) -> Section:
    """What the collapse monitor said, or that it said nothing, or that nobody watched."""
    runs = [(arm, run) for arm in arms for run in arm.runs]
    watched = [(arm, run) for arm, run in runs if run.findings is not None]
    words = []
    if not watched:
        words.append("No collapse monitor watched these runs.")
    elif len(watched) < len(runs):
        without = ", ".join(run.name for _, run in runs if run.findings is None)
        words.append(f"Not watched: {without}.")
    found = [(arm, run, finding) for arm, run in watched for finding in run.findings or ()]
    if watched and not found:
        words.append("Nothing left its band in the runs that were watched.")
    rows = [
        (
            arm.label,
            "–" if run.seed is None else str(run.seed),
            str(finding.get("step", "–")),
            "–" if _onset(finding) is None else f"{_onset(finding):g}",
            Cell("collapse", strong=True) if finding.get("collapse") else "notice",
            str(finding.get("message", finding.get("signal", ""))),
        )
        for arm, run, finding in sorted(found, key=lambda item: (item[2].get("step", 0), item[0].label))
    ]
    table = None
    if rows:
        columns = ("run", "seed", "found at step", "began about step", "kind", "what")
        table = Table(columns, rows, caption="Marked on the curves where they began.")
    return Section("Findings of the collapse monitor", paragraphs=words, table=table)


def thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `MOST_POINTS` points: each the mean of a stretch, at its last step. The first point stays as it is."""
    stretch = -(-len(steps) // MOST_POINTS)
    if stretch <= 1:
        return list(steps), list(values)
    starts = range(1, len(steps), stretch)
    kept_steps = [steps[min(start + stretch, len(steps)) - 1] for start in starts]
    means = [fmean(values[start : start + stretch]) for start in starts]
    return [steps[0], *kept_steps], [values[0], *means]


def _about(arms: Sequence[Arm]) -> list[str]:
    words = []
    if any(len(arm.runs) > 1 for arm in arms):
        words.append("Runs that differ by their seed alone are one line, the mean; its band spans all seeds.")
    longest = max(len(run.metrics) for arm in arms for run in arm.runs)
    if longest > MOST_POINTS:
        words.append(f"Each point is the mean of up to {-(-longest // MOST_POINTS)} steps.")
    return [" ".join(words)] if words else []


def _named(curves: Sequence[Curve], arms: Sequence[Arm]) -> Iterator[Curve]:
    """The curves that some run measured, with stars filled in."""
    runs = [run for arm in arms for run in arm.runs]
    keys = dict.fromkeys(key for run in runs for line in run.metrics for key in line)
    for curve in curves:
        before, star, after = curve.key.partition("*")
        names = (
            [""]
            if not star
            else [
                key[len(before) : len(key) - len(after)]
                for key in keys
                if key.startswith(before) and key.endswith(after) and len(key) > len(before) + len(after)
            ]
        )
        for name in sorted(names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0)):
            key = f"{before}{name}{after}"
            if key == "eval/pass@1" or not _worth_showing(key, runs):
                continue  # pass@1 is the accuracy
            yield Curve(key, curve.title.format(name), curve.unit)


def _worth_showing(key: str, runs: Sequence[Run]) -> bool:
    values = [value for run in runs for value in values_of(run, key)[1]]
    if not values or (key in DULL_AT_ZERO and not any(values)):
        return False
    return key not in ONLY_WITHOUT_REWARD or not all(values_of(run, "reward")[1] for run in runs)


def _onset(finding: dict[str, Any]) -> float | None:
    onset = finding.get("onset", finding.get("step"))
    return onset if isinstance(onset, int | float) else None


def _who(arm: Arm, run: Run) -> str:
    return f"seed {run.seed}: " if len(arm.runs) > 1 and run.seed is not None else ""
