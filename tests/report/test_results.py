import json
import math
import re

import pytest

from trimtab.evaluation.scores import HERE, Score
from trimtab.report.differences import MIXED, NO_INTERVAL, UNPAIRED, difference
from trimtab.report.results import result_sections
from trimtab.report.runs import read_evaluation

COMPARISON = {
    "data": "AIME 2024",
    "label": "small GTPO",
    "baseline": "small GRPO",
    "metric": "mean",
    "difference": 0.1,
    "low": 0.02,
    "high": 0.18,
    "method": "bootstrap over problems; sign-flip test",
}


def a_score(method, value, half=0.05, interval="bootstrap over problems, 95 %", **fields):
    limits = (None, None) if half is None else (value - half, value + half)
    names = {"model": "small", "training": "GSM8K", "method": method, "data": "AIME 2024"}
    fields = {"metric": "mean", "k": None, "source": HERE, **fields}
    return Score(**names, value=value, low=limits[0], high=limits[1], interval=interval, **fields)


def test_without_a_comparison_the_interval_follows_from_those_of_both():
    found = difference(a_score("GTPO", 0.4, 0.03), a_score("GRPO", 0.3, 0.04), [])
    assert found.value == pytest.approx(0.1)
    assert (found.low, found.high) == (pytest.approx(0.05), pytest.approx(0.15))
    assert found.how == UNPAIRED


def test_unequal_sides_of_an_interval_count_where_they_point():
    # Below: down from the first, up from the second; above: the other way round.
    first = Score("m", "", "a", "d", "mean", None, 0.9, 0.7, 0.95, source=HERE, interval="over problems")
    second = Score("m", "", "b", "d", "mean", None, 0.1, 0.06, 0.4, source=HERE, interval="over problems")
    found = difference(first, second, [])
    assert (found.low, found.high) == (
        pytest.approx(0.8 - math.hypot(0.2, 0.3)),
        pytest.approx(0.8 + math.hypot(0.05, 0.04)),
    )


def test_there_is_no_interval_where_one_score_has_none_or_the_two_are_over_different_things():
    bare, seeds = a_score("GRPO", 0.3, None), a_score("GRPO", 0.3, interval="Student t over seeds, 95 %")
    for other, how in ((bare, NO_INTERVAL), (seeds, MIXED)):
        found = difference(a_score("GTPO", 0.4), other, [])
        assert (found.low, found.high, found.how) == (None, None, how)


def explorer(sections):
    return json.loads(re.search(r'id="explorer-data">(.*?)</script>', sections[0].html)[1])


def test_the_evaluations_own_comparison_is_used_in_both_directions(write_evaluation):
    rows = explorer(result_sections([read_evaluation(write_evaluation(comparisons=[COMPARISON]))]))["rows"]
    at = {(r["model"], r["data"], r["metric"], r["label"]): r for r in rows}
    gtpo = at["small", "AIME 2024", "accuracy", "GTPO on GSM8K"]
    grpo = at["small", "AIME 2024", "accuracy", "GRPO on GSM8K"]
    assert (gtpo["value"], gtpo["low"], gtpo["high"]) == (40.0, 35.0, 45.0)

    def to(row, label):
        return next(found for found in row["differences"] if found["label"] == label)

    one, other = to(gtpo, "GRPO on GSM8K"), to(grpo, "GTPO on GSM8K")
    assert (one["value"], one["low"], one["high"]) == (10.0, 2.0, 18.0)
    assert (other["value"], other["low"], other["high"]) == (-10.0, -18.0, -2.0)
    assert one["how"] == other["how"] == COMPARISON["method"]
    # Each other row of the same model is a baseline.
    assert [found["label"] for found in gtpo["differences"]] == ["no training", "GRPO on GSM8K"]
    assert at["small", "AIME 2024", "entropy (nats)", "no training"]["value"] == 0.312


def test_every_k_has_a_column_and_the_best_of_a_column_stands_out(write_evaluation):
    sections = result_sections([read_evaluation(write_evaluation())])
    section = next(s for s in sections if s.heading == "AIME 2024: pass@k and maj@k")
    assert section.table.columns == ["method", "accuracy", "pass@1", "pass@4", "pass@16", "maj@16"]
    rows = {row[0].text.split(" [")[0] + ", " + row[0].note.split(",")[0]: row[1:] for row in section.table.rows}
    best = {name: [cell.strong for cell in cells] for name, cells in rows.items()}
    assert best["GTPO, small"] == [True] * 5 and best["GRPO, small"] == [False] * 5
    assert (rows["GTPO, small"][3].text, rows["GTPO, small"][3].note) == ("56.0", "[51.0, 61.0]")
    assert rows["GTPO, small"][4].note == "n/a"


def test_published_rows_their_footnotes_and_their_bars_wait_until_they_are_asked_for(write_evaluation, published):
    sections = result_sections([read_evaluation(write_evaluation())], [published])
    table = next(s for s in sections if s.heading == "AIME 2024: pass@k and maj@k").table
    hidden = [row for row, kind in zip(table.rows, table.row_classes, strict=True) if "published" in kind]
    assert len(hidden) == 1 and [cell.text for cell in hidden[0][1:]] == ["–", "–", "61.0", "–", "–"]
    assert "from the first k samples" in table.published_caption and "arXiv" not in table.caption
    assert 'id="show-published"' in sections[0].html
    (bar,) = [row for row in explorer(sections)["rows"] if row["published"]]
    assert (bar["label"], bar["metric"], bar["low"]) == ("GTPO on GSM8K (published)", "pass@4", None)
