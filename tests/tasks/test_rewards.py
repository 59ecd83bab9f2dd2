import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.errors import InputError
from trimtab.tasks.rewards import (
    PRESETS,
    RewardPart,
    RewardTable,
    accuracy_reward,
    binary_accuracy_reward,
    binary_format_reward,
    completion_text,
    format_reward,
    load_rewards,
    needed_columns,
    score_completions,
)

FULL = "<reasoning>2+2</reasoning><answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FULL, 10.0),
        (f"\n {FULL} \n", 10.0),
        ("<reasoning>a\nb</reasoning>\n\n<answer>\n4</answer>", 10.0),
        ("<reasoning>a</reasoning> so <answer>4</answer>", 1.5),
        (f"Well, {FULL}", 1.5),
        (f"{FULL} done", 1.5),
        (f"{FULL}{FULL}", 1.5),
        ("<reasoning>a</reasoning><answer>4<answer></answer>", 1.5),
        ("<reasoning>a</reasoning> 4", 1.0),
        ("<reasoning>a</reasoning><answer>4", 1.5),
        ("a <answer>4</answer>", 1.0),
        ("<reasoning>a <answer>4</answer>", 1.5),
        ("<answer>4</answer> a", 0.0),
        ("<answer>4</answer><reasoning>a</reasoning>", 1.5),
        ("</reasoning>a<reasoning>", 0.0),
        ("4", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_reward_is_full_only_for_the_whole_format_and_partial_else(text: str, expected: float) -> None:
    assert format_reward(completions=[text]) == [expected]
    assert binary_format_reward(completions=[text]) == [float(expected == 10)]


def test_the_accuracy_reward_needs_the_full_format_and_is_none_without_a_gold() -> None:
    completions = [FULL, FULL, "4", FULL, "4"]
    assert accuracy_reward(completions=completions, answer=[4, "5", 4, "", None]) == [10.0, 0.0, 0.0, None, None]


def test_the_binary_accuracy_reward_takes_any_extracted_answer() -> None:
    completions = [FULL, "so 4.", r"\boxed{4} not 5", "five", "4"]
    assert binary_accuracy_reward(completions=completions, answer=[4, 4, 4, 4, None]) == [1.0, 1.0, 1.0, 0.0, None]


def test_chat_shaped_completions_score_as_their_text() -> None:
    chat = [{"role": "assistant", "content": FULL}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": FULL}]}]
    assert format_reward(completions=[chat, parts]) == [10.0, 10.0]
    assert completion_text([{"role": "assistant", "content": None}, {"role": "tool", "content": "x"}]) == ""


def score(*parts: RewardPart, count: int = 3, **columns: list[Any]) -> RewardTable:
    return score_completions(
        list(parts), ["p"] * count, [str(i) for i in range(count)], [[i] for i in range(count)], columns
    )


def same(left: list[float], right: list[float]) -> bool:
    return np.array_equal(left, right, equal_nan=True)


def test_the_total_is_the_weighted_sum_of_the_parts_that_apply() -> None:
    first = RewardPart("first", lambda **_: [1.0, None, None], 2.0)
    second = RewardPart("second", lambda **_: [3, 4, None], -0.5)
    table = score(first, second)
    assert same(table.total, [0.5, -2.0, math.nan])
    assert same(table.parts["first"], [1.0, math.nan, math.nan])
    assert same(table.parts["second"], [3.0, 4.0, math.nan])
    assert table.failures == {"first": 0, "second": 0}
    assert table.messages == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, "1.0", [1.0], 1j, 10**400, object()])
def test_a_value_that_is_no_finite_number_excludes_its_row_and_is_counted(bad: Any) -> None:
    table = score(RewardPart("bad", lambda **_: [1.0, bad, 2.0]), RewardPart("good", lambda **_: [1.0] * 3))
    assert same(table.total, [2.0, math.nan, 3.0])
    assert same(table.parts["bad"], [1.0, math.nan, 2.0])
    assert table.failures == {"bad": 1, "good": 0}
    assert table.messages[0].startswith("bad: ")


@pytest.mark.parametrize(
    "values",
    [
        np.array([1, 0, 1], dtype=np.float32),
        torch.tensor([1.0, 0.0, 1.0], requires_grad=True),
        [True, False, np.bool_(True)],
        (torch.tensor(1), np.int64(0), torch.tensor([1.0])),
    ],
)
def test_numpy_and_torch_scalars_and_booleans_are_numbers(values: Any) -> None:
    assert score(RewardPart("part", lambda **_: values)).total == [1.0, 0.0, 1.0]


def test_an_exception_costs_only_the_offending_row() -> None:
    calls = []

    def fragile(prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str]) -> Any:
        calls.append((prompts, completions, completion_ids, answer))
        return [1 / int(text) for text in answer]

    table = score(RewardPart("fragile", fragile), answer=["1", "0", "4"])
    assert same(table.total, [1.0, math.nan, 0.25])
    assert table.failures == {"fragile": 1}
    assert table.messages == ["fragile: ZeroDivisionError: division by zero"]
    assert calls[1:] == [(["p"], [str(i)], [[i]], [answer]) for i, answer in enumerate("104")]


@pytest.mark.parametrize("result", [[1.0], [1.0] * 4, 1.0, None, "abc", {"a": 1, "b": 2, "c": 3}])
def test_a_result_of_the_wrong_shape_is_asked_for_again_row_by_row(result: Any) -> None:
    def function(completions: list[str], **_: Any) -> Any:
        return [2.0] if len(completions) == 1 else result

    assert score(RewardPart("part", function)).total == [2.0, 2.0, 2.0]


def test_a_function_that_always_fails_never_raises_and_its_messages_are_few() -> None:
    def broken(completions: list[str], **_: Any) -> Any:
        raise ValueError(f"bad {completions}")

    table = score(RewardPart("broken", broken), count=20)
    assert all(math.isnan(value) for value in table.total)
    assert table.failures == {"broken": 20}
    assert len(table.messages) == len(set(table.messages)) == 5


def test_an_error_that_cannot_be_printed_is_still_only_a_failure() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def broken(**_: Any) -> Any:
        raise Unprintable

    assert score(RewardPart("broken", broken)).messages == ["broken: Unprintable"]


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_reward_function_passes_through(signal: type[BaseException]) -> None:
    def stop(**_: Any) -> Any:
        raise signal

    with pytest.raises(signal):
        score(RewardPart("stop", stop))


def test_columns_of_another_length_are_refused_and_no_completions_give_an_empty_table() -> None:
    with pytest.raises(InputError, match="3 completions, but 'answer' has 2"):
        score(RewardPart("format", format_reward), answer=[1, 2])
    assert score(RewardPart("format", format_reward), count=0).total == []


def test_a_column_named_like_an_argument_does_not_replace_it() -> None:
    part = RewardPart("part", lambda completions, **columns: [float(text) for text in completions])
    assert score(part, completions=["x"] * 3, prompt=["y"] * 3).total == [0.0, 1.0, 2.0]


def test_the_presets_score_a_right_answer_with_twenty_and_with_one() -> None:
    for preset, expected in (("paper", 20.0), ("binary", 1.0)):
        table = score_completions(load_rewards(preset), ["2+2?"], [FULL], [[1]], {"answer": ["4"]})
        assert table.total == [expected]
    assert list(score_completions(load_rewards("paper"), ["p"], [FULL], [[1]], {"answer": [4]}).parts) == [
        "format",
        "accuracy",
    ]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_test_rewards.py").write_text(
        "def length(completions, **columns):\n    return [len(c) for c in completions]\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'source': data_source, 'extra': extra_info}\n"
        "VALUE = 3\n"
    )
    (tmp_path / "my_broken_rewards.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_test_rewards", "my_broken_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "my_test_rewards"


def test_a_function_on_the_import_path_is_loaded_with_name_and_weight(module: str) -> None:
    parts = load_rewards(
        [{"function": f"{module}:length"}, {"function": f"{module}:length", "name": "half", "weight": 0.5}]
    )
    assert [(part.name, part.weight) for part in parts] == [("length", 1.0), ("half", 0.5)]
    assert score_completions(parts, ["p"], ["four"], [[1]], {}).total == [6.0]


def test_a_verl_function_gets_its_columns_and_its_score_is_taken(module: str) -> None:
    parts = load_rewards([{"function": f"verl:{module}:compute_score"}])
    assert score(*parts, answer=["0", "9", "2"], data_source=["s"] * 3, extra_info=[{}] * 3).total == [1.0, 0.0, 1.0]
    assert score(*parts, reward_model=[{"ground_truth": "1"}] * 3).total == [0.0, 1.0, 0.0]
    assert score(*parts).failures == {"compute_score": 3}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("papr", "'papr' is unknown .*did you mean 'paper'"),
        ([], "list of rewards is empty"),
        ([{"weight": 1}], "reward 1 must be a mapping with the key 'function'"),
        ([{"function": "my_test_rewards:length", "wieght": 1}], "'wieght'; did you mean 'weight'"),
        ([{"function": "my_test_rewards:length", "weight": math.nan}], "weight must be a finite number"),
        ([{"function": "my_test_rewards:length"}] * 2, "two rewards are called 'length'"),
        ([{"function": "my_test_rewards"}], "form module:function"),
        ([{"function": "my_test_rewards:lenght"}], "no function 'lenght'; did you mean 'length'"),
        ([{"function": "my_test_rewards:VALUE"}], "cannot be called"),
        ([{"function": "my_test_reward:length"}], "no module 'my_test_reward'; did you mean 'my_test_rewards'"),
        ([{"function": "trimtab.tasks.reward:f"}], "did you mean 'trimtab.tasks.rewards'"),
        ([{"function": "my_broken_rewards:f"}], "importing my_broken_rewards failed .*a_module_that_is_not_there"),
    ],
)
def test_an_unusable_reward_entry_is_refused(module: str, spec: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_rewards(spec)


def test_the_answer_to_messages_is_a_message_and_the_answer_to_text_is_text() -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    prompts = ["plain", [{"role": "user", "content": "chat"}]]
    score_completions([RewardPart("r", reward)], prompts, ["a", "b"], [[1], [2]], {})
    assert seen == ["a", [{"role": "assistant", "content": "b"}]]


def test_the_columns_that_functions_cannot_do_without_are_read_off_their_signatures() -> None:
    def reward(prompts: Any, completions: Any, difficulty: Any, hint: Any = None, **_: Any) -> list[float]:
        return []

    parts = [*PRESETS["paper"], RewardPart("mine", reward)]
    assert needed_columns(parts) == ["answer", "difficulty"]
