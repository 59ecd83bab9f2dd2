from typing import Any

import pytest

from trimtab.errors import InputError, RunError
from trimtab.pivotal.oracle import judge, load_oracle


def test_verify_compares_with_the_answer_column() -> None:
    rows = [{"answer": "12"}, {"answer": 7}]
    assert judge(load_oracle("verify"), ["", ""], ["so it is 12", "6"], [[1], [2]], rows) == [True, False]


def test_verify_refuses_a_gold_that_cannot_be_parsed() -> None:
    with pytest.raises(InputError, match="gold answer None"):
        judge(load_oracle("verify"), [""], ["12"], [[1]], [{"answer": None}])


def test_any_reward_function_judges_and_a_half_is_a_success() -> None:
    assert load_oracle("trimtab.tasks.rewards:binary_accuracy_reward") is not None

    def length(completions: list[str], target: list[int], **_: Any) -> list[float]:
        return [len(text) / goal for text, goal in zip(completions, target, strict=True)]

    assert judge(length, ["a", "b"], ["xx", "x"], [[1], [1]], [{"target": 4}, {"target": 4}]) == [True, False]


@pytest.mark.parametrize("value", [None, float("nan"), "yes"])
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(RunError, match="the oracle"):
        judge(lambda **_: [value], [""], ["x"], [[1]], [{}])


def test_an_unknown_oracle_is_named() -> None:
    with pytest.raises(InputError, match="verifier"):
        load_oracle("verifier")
    with pytest.raises(InputError, match="no module"):
        load_oracle("nowhere_at_all:judge")
