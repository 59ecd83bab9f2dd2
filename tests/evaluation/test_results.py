import logging
from dataclasses import replace
from typing import Any

import pytest

from trimtab.config_file import parse_config_as
from trimtab.evaluation.config import EvaluateConfig
from trimtab.evaluation.results import Problems, arms_of, compare_arms, scores_of
from trimtab.evaluation.subjects import Subject


def config(**changes: Any) -> EvaluateConfig:
    values = {"models": [{"model": "m"}], "data": [{"source": "rows.jsonl"}], "output": "out", **changes}
    return parse_config_as(EvaluateConfig, values)


def subject(label: str, *, method: str = "", seed: int | None = None) -> Subject:
    return Subject(label, "m", "", method, seed, "", None, None, None)


def lines(answers: list[str | None], verdicts: list[bool | None]) -> list[dict[str, Any]]:
    common = {"tokens": 10, "entropy": 0.5, "truncated": False, "format": True}
    return [{"answer": a, "verdict": v, **common} for a, v in zip(answers, verdicts, strict=True)]


def values(problems: Problems, **changes: Any) -> dict[tuple[str, int | None], float]:
    return {(s["metric"], s["k"]): s["value"] for s in scores_of(problems, config(**changes))}


PROBLEMS: Problems = {
    0: lines(["4", "3", "4.0", "3"], [True, False, True, False]),
    1: lines(["7", "7", "8", None], [False, False, True, False]),
}


def test_the_metrics_are_those_worked_out_by_hand() -> None:
    found = values(PROBLEMS, k=[1, 2, 4], majority_k=[4])
    assert found["mean", None] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert found["pass", 1] == pytest.approx(3 / 8)
    # 1 - C(2,2)/C(4,2) = 5/6 and 1 - C(3,2)/C(4,2) = 1/2
    assert found["pass", 2] == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert found["first", 2] == pytest.approx((1 + 0) / 2)
    # Problem 0: 4 and 4.0 vote together, two against two, and 4 came first; problem 1: the two 7 win, wrongly.
    assert found["maj_first", 4] == pytest.approx(0.5)
    assert found["maj", 4] == pytest.approx((0.5 + 0) / 2)
    assert (found["format", None], found["tokens", None], found["entropy", None]) == (1, 10, 0.5)


def test_k_beyond_the_samples_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = values(PROBLEMS, k=[1, 8], majority_k=[4, 16])
    assert ("pass", 8) not in found and ("maj", 16) not in found and ("pass", 1) in found
    assert "pass@k left out for k = 8: 4 samples" in caplog.text
    assert "maj@k left out for k = 16: 4 samples" in caplog.text


def test_a_problem_whose_gold_cannot_be_parsed_counts_in_no_accuracy_but_has_a_length() -> None:
    found = values({**PROBLEMS, 2: lines(["1"] * 4, [None] * 4)}, k=[1])
    assert found["mean", None] == pytest.approx(3 / 8)
    assert found["tokens", None] == 10


def test_every_share_has_an_interval_around_its_value() -> None:
    found = scores_of(PROBLEMS, config(k=[1, 2], majority_k=[2]))
    shares = [score for score in found if score["metric"] not in ("tokens", "entropy")]
    assert len(shares) == 9
    for score in shares:
        assert score["low"] <= score["value"] <= score["high"] and score["interval"], score


def test_arms_are_the_seeds_of_one_method_and_nothing_else() -> None:
    same = [subject("a0", method="A", seed=0), subject("a1", method="A", seed=1), subject("b0", method="B", seed=0)]
    steps = [subject("c s1", method="C", seed=0), subject("c s2", method="C", seed=0)]
    found = arms_of([subject("base"), *same, *steps])
    assert {label: [s.label for s in arm] for label, arm in found.items()} == {
        "base": ["base"],
        "a0": ["a0", "a1"],
        "b0": ["b0"],
        "c s1": ["c s1"],
        "c s2": ["c s2"],
    }


def some(rates: list[float], *, left_out: int | None = None) -> Problems:
    """Ten samples a problem with these shares of correct ones."""
    return {
        number: lines(["1"] * 10, [place < rate * 10 for place in range(10)])
        for number, rate in enumerate(rates)
        if number != left_out
    }


def test_a_comparison_is_paired_and_made_on_the_problems_that_both_had_room_for() -> None:
    base, better = some([0.1, 0.2, 0.3, 0.9]), some([0.3, 0.4, 0.5, 0.0], left_out=3)
    (record,) = compare_arms(
        [subject("base"), subject("better")], {"base": {"d": base}, "better": {"d": better}}, config()
    )
    assert (record["label"], record["baseline"], record["problems"]) == ("better", "base", 3)
    assert record["difference"] == pytest.approx(0.2)
    # Three equal differences: of the eight patterns of signs two are as extreme.
    assert record["p"] == record["p_holm"] == pytest.approx(0.25)


def test_several_seeds_on_both_sides_enter_the_interval_and_one_against_several_says_what_is_missing() -> None:
    arms = [subject("a0", method="A", seed=0), subject("a1", method="A", seed=1)]
    arms += [subject("b0", method="B", seed=0), subject("b1", method="B", seed=1), subject("c", method="C")]
    samples = {s.label: {"d": some([0.1 * n, 0.5, 0.3])} for n, s in enumerate(arms)}
    first, second, third = compare_arms(arms, samples, config())
    assert (first["label"], first["seeds"], second["label"], second["seeds"]) == ("b0", [2, 2], "c", [1, 2])
    assert "Student t over problems and seeds" in first["method"]
    assert "seeds averaged, their spread is not in the interval" in second["method"]
    # Two that are not the baseline can be looked up, and do not count in the family of comparisons.
    assert (third["label"], third["baseline"], third["p_holm"]) == ("c", "b0", None)
    assert first["p_holm"] is not None


def test_the_baseline_can_be_any_member_of_an_arm() -> None:
    arms = [subject("c", method="C"), subject("a0", method="A", seed=0), subject("a1", method="A", seed=1)]
    samples = {s.label: {"d": some([0.1 * n, 0.5, 0.3])} for n, s in enumerate(arms)}
    models = [{"model": "m"}]
    (record,) = compare_arms(arms, samples, config(models=models, baseline="a1"))
    assert (record["label"], record["baseline"]) == ("c", "a0")


def test_where_no_gold_can_be_parsed_nothing_is_compared() -> None:
    broken = {0: lines(["1"], [None])}
    arms = [subject("a"), subject("b")]
    assert compare_arms(arms, {"a": {"d": broken}, "b": {"d": broken}}, config()) == []
    assert ("mean", None) not in values(broken)


def test_a_selected_checkpoint_beside_the_final_ones_leaves_their_seeds_one_arm() -> None:
    final = [replace(subject(f"a{n}", method="A", seed=n), checkpoint="final, step 9") for n in (0, 1)]
    best = replace(subject("best", method="A", seed=0), checkpoint="selected, step 3: best of 2")
    found = arms_of([*final, best])
    assert {label: [s.label for s in arm] for label, arm in found.items()} == {"a0": ["a0", "a1"], "best": ["best"]}
