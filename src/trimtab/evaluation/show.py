"""The results of an evaluation on a terminal."""

from __future__ import annotations

from typing import Any

SHOWN = ("mean", "pass", "maj", "format", "tokens")


def print_results(results: dict[str, Any]) -> None:
    """Accuracy, pass@k and maj@k of every subject, then the comparisons."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for title in results["subjects"][0]["data"]:
        by_subject = {
            subject["label"]: {(score["metric"], score["k"]): score for score in subject["data"][title]["scores"]}
            for subject in results["subjects"]
        }
        # On its side, so that several models fit the width: a line a metric, the interval below.
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        table.add_column(escape(title))
        for label in by_subject:
            table.add_column(escape(label), justify="right", overflow="fold")
        for key in dict.fromkeys(key for scores in by_subject.values() for key in scores if key[0] in SHOWN):
            table.add_row(_metric_name(*key), *(_with_interval(scores.get(key)) for scores in by_subject.values()))
        console.print(table)
    for record in results["comparisons"]:
        if record["p_holm"] is None:
            continue
        interval = "n/a" if record["low"] is None else f"{record['low']:+.3f} to {record['high']:+.3f}"
        console.print(
            f"{_arm(record, 0)} against {_arm(record, 1)} on {record['data']}: accuracy {record['difference']:+.3f} "
            f"({interval}), p = {record['p_holm']:.3g}",
            highlight=False,
            markup=False,
        )


def _arm(record: dict[str, Any], side: int) -> str:
    """The first of a method's seeds speaks for all of them."""
    seeds = record["seeds"][side]
    return str(record[("label", "baseline")[side]]) + (f" and {seeds - 1} more" if seeds > 1 else "")


def _metric_name(metric: str, k: int | None) -> str:
    names = {"mean": "accuracy"}
    return names.get(metric, metric) if k is None else f"{metric}@{k}"


def _with_interval(score: dict[str, Any] | None) -> str:
    if score is None:
        return "–"
    digits = 1 if score["metric"] == "tokens" else 3
    interval = "n/a" if score["low"] is None else f"{score['low']:.{digits}f}–{score['high']:.{digits}f}"
    return f"{score['value']:.{digits}f}\n{interval}"
