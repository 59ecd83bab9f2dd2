from collections.abc import Callable
from typing import Any

import pytest
from run_folder import RunFolder, distance

from trimtab.errors import InputError

Train = Callable[..., RunFolder]

STEPS = {"process": {"scorer": "toy_rewards:steps_without_z", "delimiter": " "}}
PROCESS = {"method": "grpo_process", "training.steps": 3, **STEPS}


def test_a_run_learns_from_the_rewards_of_steps(train: Train) -> None:
    run = train({**PROCESS, "log": {"samples": 8, "samples_every": 1}})
    assert all(value >= 0 for value in run.column("process/steps"))
    # Tokens of one completion may have different weights, which no outcome reward can give.
    lines = run.lines("samples.jsonl")
    assert any(len({weight for weight in line["weights"] if weight}) > 1 for line in lines)


def test_without_a_single_step_it_is_grpo(train: Train) -> None:
    process = train({**PROCESS, "process.scorer": "toy_rewards:no_steps"}, name="process")
    outcome = train({"method": "grpo", "training.steps": 3}, name="outcome")
    assert distance(process.weights, outcome.weights) < 1e-6


def test_a_row_that_the_scorer_fails_on_is_excluded_and_counted(train: Train) -> None:
    run = train({**PROCESS, "process.scorer": "toy_rewards:steps_that_fail_on_the_first", "training.steps": 1})
    assert run.metrics[1]["reward_failures"] == 1.0
    assert run.metrics[1]["excluded_rows"] == pytest.approx(1 / 8)


def test_the_steps_alone_need_no_reward_of_the_whole(train: Train) -> None:
    alone = {**PROCESS, "method": {"name": "grpo_process", "outcome": "none"}}
    with_outcome = train(alone, name="with")
    assert distance(train({**alone, "rewards": "none"}, name="without").weights, with_outcome.weights) == 0.0


@pytest.mark.parametrize("cut", ["cut_that_raises", "cut_past_the_end"])
def test_a_cut_that_fails_costs_its_row_alone(cut: str, train: Train) -> None:
    run = train(
        {**PROCESS, "process.scorer": f"toy_rewards:{cut}", "training.steps": 1, "training.max_excluded_rows": 1.0}
    )
    assert 0 < run.metrics[1]["excluded_rows"] < 1
    assert run.metrics[1]["reward_failures"] == 8 * run.metrics[1]["excluded_rows"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "grpo_process"}, "process: grpo_process needs a step scorer"),
        ({**PROCESS, "rewards": "none"}, "rewards: none, but grpo_process learns from rewards"),
        ({"method": "grpo", **STEPS}, "process: grpo has no use for steps; use method: grpo_process"),
        ({"method": "sft", **STEPS}, "process: method sft learns from the completions in data alone"),
        ({**PROCESS, "process.scorer": "toy_rewards:steps_without_y"}, "steps_without_z"),
        ({**PROCESS, "process.scorer": "toy_rewards:steps_with_a_hint"}, "needs the column 'hint'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_model_loads(
    changes: dict[str, Any], message: str, train: Train
) -> None:
    with pytest.raises(InputError, match=message):
        train(changes)
