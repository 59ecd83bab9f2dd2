"""The evaluation tab: bars for one choice, and pass@k and maj@k with every k, published numbers beside one's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.evaluation.scores import HERE, SHARES, Score, collect_scores, paper_scores
from trimtab.evaluation.tables import METRICS, MISSING, TableData, table_data
from trimtab.report.charts import bar_chart, json_in_html, page_chart
from trimtab.report.differences import Pair, difference, paired_differences
from trimtab.report.page import Cell, Section, Table, asset, render_template
from trimtab.report.runs import Evaluation

TABLES = (
    ("pass@k and maj@k", ("mean", "pass", "maj")),
    ("the first k samples alone", ("first", "maj_first")),
    ("format, length, entropy", ("format", "truncated", "tokens", "entropy")),
)


def result_sections(evaluations: Sequence[Evaluation], tables: Sequence[Path] = ()) -> list[Section]:
    """Bars for one choice, then tables of each data set; published rows are hidden until they are asked for.

    Args:
        evaluations: one's own.
        tables: CSV files of scores, one's own or published ones.

    Raises:
        InputError: a file cannot be read, or one thing was evaluated twice.
    """
    scores = collect_scores([*(evaluation.folder for evaluation in evaluations), *tables])
    scores += paper_scores()
    pairs = [pair for evaluation in evaluations for pair in paired_differences(evaluation, scores)]
    sections = [Section("Results", html=explorer_html(scores, pairs))]
    for data in dict.fromkeys(score.data for score in scores):
        for title, metrics in TABLES:
            chosen = [score for score in scores if score.data == data and score.metric in metrics]
            if chosen:
                kind = "" if any(score.source == HERE for score in chosen) else "published"
                table = score_table(table_data(chosen, metrics))
                folded = "pass" not in metrics
                sections.append(Section(f"{data}: {title}", table=table, kind=kind, folded=folded))
    return sections


def score_table(data: TableData) -> Table:
    """A table of one data set as the page shows it: what names the row in one cell, intervals below the values."""
    labels = data.labels
    rows, classes = [], []
    own_letters: set[str] = set()
    for number, row in enumerate(data.rows):
        named = dict(zip(data.columns[:labels], row[:labels], strict=True))
        published = "source" in named and named["source"].text != HERE
        if not published:
            own_letters |= {cell.reference for cell in row}
        values = [
            Cell(cell.text, cell.interval, strong=(number, labels + place) in data.marks)
            for place, cell in enumerate(row[labels:])
        ]
        rows.append([_row_name({name: str(cell) for name, cell in named.items()}), *values])
        classes.append(" ".join([*["published"] * published, *["first"] * (number in data.breaks)]))
    notes: dict[bool, list[str]] = {False: [f"{data.caption[:1].upper()}{data.caption[1:]}."], True: []}
    for note in data.notes:
        letter = re.match(r"\[([a-z]+)\] ", note)
        notes[letter is not None and letter[1] not in own_letters].append(note)
    return Table(
        ["method", *data.columns[labels:]],
        rows,
        caption="\n".join(notes[False]),
        published_caption="\n".join(notes[True]),
        row_classes=classes,
    )


def explorer_html(scores: Sequence[Score], pairs: Sequence[Pair]) -> str:
    """The bars of a chosen model, data set and metric, and the differences to each other row, with their intervals."""
    from markupsafe import Markup

    groups: dict[tuple[str, str, str, int | None], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.model, score.data, score.metric, score.k), []).append(score)
    data = {
        "rows": [_bar(score, group, pairs) for group in groups.values() for score in group],
        "bars": page_chart(bar_chart(compared=False)).specification,
        "differences": page_chart(bar_chart(compared=True)).specification,
    }
    sources = dict.fromkeys(score.source for score in scores if score.source != HERE)
    return render_template(
        "explorer.html.j2", data=Markup(json_in_html(data)), script=asset("explorer.js"), sources="; ".join(sources)
    )


def bar_label(score: Score) -> str:
    """Name of a bar, unlike every other of its model."""
    label = score.method or "no training"
    if score.training:
        label += f" on {score.training}"
    return label if score.source == HERE else f"{label} (published)"


def _row_name(named: dict[str, str]) -> Cell:
    """Method in the first line; model, training set and seeds in the second."""
    method = "no training" if named["method"] == MISSING else named["method"]
    seeds = "" if named["seeds"] == "1" else f"{named['seeds']} seeds"
    source = "" if named.get("source", HERE) == HERE else named["source"]
    words = [named["model"], named["training"], seeds, source]
    return Cell(method, ", ".join(word for word in words if word not in ("", MISSING)))


def _bar(score: Score, group: Sequence[Score], pairs: Sequence[Pair]) -> dict[str, Any]:
    """One row of the explorer, in the units that it shows, with its difference to each other row of its group."""
    share = score.metric in SHARES
    factor = 100 if share else 1

    def scaled(value: float | None) -> float | None:
        return None if value is None else round(factor * value, 4)

    seeds = f"{score.seeds} seeds" if score.seeds > 1 else ""
    return {
        "model": score.model,
        "data": score.data,
        "metric": METRICS[score.metric] if score.k is None else f"{METRICS[score.metric]}@{score.k}",
        "unit": "percent" if share else "nats a token" if score.metric == "entropy" else "tokens",
        "digits": 3 if score.metric == "entropy" else 1,
        "label": bar_label(score),
        "published": score.source != HERE,
        "value": scaled(score.value),
        "low": scaled(score.low),
        "high": scaled(score.high),
        "how": "; ".join(part for part in (score.interval, seeds, score.note) if part),
        "differences": [
            {
                "label": bar_label(other),
                "value": scaled(found.value),
                "low": scaled(found.low),
                "high": scaled(found.high),
                "how": found.how,
            }
            for other in group
            if other is not score
            for found in [difference(score, other, pairs)]
        ],
    }
