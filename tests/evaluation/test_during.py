import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_rewards
from run_folder import RunFolder

from trimtab.config_file import load_config
from trimtab.evaluation.during import evaluate_policy
from trimtab.policy.loading import Policy, load_policy
from trimtab.policy.rollouts import Rollouts, pad_left, pad_right
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.tasks.rewards import RewardPart
from trimtab.training.run import run_training

FULL = "<reasoning>r</reasoning><answer>{}</answer>"


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(str(tiny_model))


@dataclass
class Scripted:
    """A sampler that says what it is told: per prompt its completions, each with one entropy for all its tokens."""

    tokenizer: Any
    script: list[list[tuple[str, float]]]
    taken: int = 0

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, seed: int, *, first_row: int = 0
    ) -> Rollouts:
        """The next prompts' completions, with an end token except for those that end in a dash."""
        assert first_row == self.taken * n
        said = [pair for pairs in self.script[self.taken : self.taken + len(prompts)] for pair in pairs]
        self.taken += len(prompts)
        ids = [self.tokenizer(text, add_special_tokens=False).input_ids for text, _ in said]
        truncated = [text.endswith("-") for text, _ in said]
        ids = [row if cut else [*row, 1] for row, cut in zip(ids, truncated, strict=True)]
        prompt_ids_PL, prompt_mask_PL = pad_left(prompts, 2)
        completion_ids_NT, mask_NT = pad_right(ids, 2)
        return Rollouts(
            prompt_ids_PL,
            prompt_mask_PL,
            completion_ids_NT,
            mask_NT,
            torch.arange(len(prompts)).repeat_interleave(n),
            torch.tensor(truncated),
            entropies_NT=torch.tensor([[entropy] for _, entropy in said]) * mask_NT,
        )


def length(completions: list[str], **_: Any) -> list[float | None]:
    return [float(len(text)) for text in completions]


def evaluate(
    policy: Policy, script: list[list[tuple[str, float]]], answers: list[Any], **changes: Any
) -> dict[str, float]:
    rows = [{"prompt": "p", "answer": answer} for answer in answers]
    return evaluate_policy(
        Scripted(policy.tokenizer, script),  # type: ignore[arg-type]
        policy.tokenizer,
        rows,
        ["p"] * len(rows),
        [[0, 5]] * len(rows),
        [RewardPart("length", length)],
        **{"samples": 2, "k": [1, 2, 4], "params": SamplingParams(), "seed": 0, **changes},
    )


SCRIPT = [
    [("4", 0.5), (FULL.format(4), 1.5)],
    [("5-", 0.0), (FULL.format(7), 2.0)],
    [("1", 1.0), ("2", 1.0)],
]


@pytest.mark.parametrize("rows_at_once", [1, 4, 512])
def test_every_number_is_as_counted_by_hand(policy: Policy, rows_at_once: int) -> None:
    result = evaluate(policy, SCRIPT, ["4", "7", "9"], rows_at_once=rows_at_once)
    full = len(FULL.format(4))
    assert result == pytest.approx(
        {
            "eval/accuracy": (2 / 2 + 1 / 2 + 0 / 2) / 3,
            "eval/pass@1": 1 / 2,
            "eval/pass@2": 2 / 3,
            "eval/format": 2 / 6,
            "eval/entropy": 6.0 / 6,
            "eval/mean_length": ((1 + 1) + (full + 1) + 2 + (full + 1) + 2 + 2) / 6,
            "eval/truncated": 1 / 6,
            "eval/reward": (1 + full + 2 + full + 1 + 1) / 6,
            "eval/rewards/length/mean": (1 + full + 2 + full + 1 + 1) / 6,
        }
    )


def test_pass_at_more_than_the_samples_is_left_out(policy: Policy) -> None:
    assert not {"eval/pass@4"} & evaluate(policy, SCRIPT, ["4", "7", "9"]).keys()


def test_a_problem_without_a_gold_is_counted_and_takes_no_part_in_the_accuracy(policy: Policy) -> None:
    result = evaluate(policy, SCRIPT, ["4", None, "9"])
    assert result["eval/unparsable_gold"] == 1
    assert result["eval/accuracy"] == pytest.approx((2 / 2 + 0 / 2) / 2)


def test_without_answers_there_is_no_accuracy(policy: Policy) -> None:
    result = evaluate_policy(
        Scripted(policy.tokenizer, SCRIPT[:1]),  # type: ignore[arg-type]
        policy.tokenizer,
        [{"prompt": "p"}],
        ["p"],
        [[0, 5]],
        [RewardPart("broken", toy_rewards.broken)],
        samples=2,
        k=[1],
        params=SamplingParams(),
        seed=0,
    )
    assert not {"eval/accuracy", "eval/pass@1", "eval/unparsable_gold"} & result.keys()
    assert math.isnan(result["eval/reward"])


def test_the_numbers_do_not_depend_on_how_many_rows_are_sampled_at_once(policy: Policy) -> None:
    sampler = LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id)
    rows = [{"prompt": "ab", "answer": "1"}, {"prompt": "ac", "answer": "2"}, {"prompt": "ad", "answer": "3"}]

    def run(rows_at_once: int, **changes: Any) -> dict[str, float]:
        settings = {"samples": 4, "k": [1], "params": SamplingParams(max_tokens=6), "seed": 3, **changes}
        prompts = [row["prompt"] for row in rows]
        ids = [policy.tokenizer(prompt).input_ids for prompt in prompts]
        parts = [RewardPart("low", toy_rewards.low_bytes)]
        return evaluate_policy(
            sampler, policy.tokenizer, rows, prompts, ids, parts, rows_at_once=rows_at_once, **settings
        )

    assert run(1) == pytest.approx(run(512), abs=1e-5)
    assert run(512)["eval/reward"] != run(512, seed=4)["eval/reward"]
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    assert run(512, params=greedy) == run(512, params=greedy, seed=4)


def test_a_run_evaluates_before_training_in_between_and_at_the_end_with_the_same_draws(
    configure: Callable[..., Path], tmp_path: Path
) -> None:
    evaluation = {"every": 2, "samples": 2, "k": [1, 2, 8], "data": {"source": str(tmp_path / "rows.jsonl")}}
    frozen = {"optimizer": {"learning_rate": 0.0}, "training.steps": 3, "evaluation": evaluation}
    run_training(load_config(configure(frozen)), quiet=True)
    lines = RunFolder(tmp_path / "run").metrics
    evaluated = [{k: v for k, v in line.items() if k.startswith("eval/")} for line in lines]
    assert [bool(values) for values in evaluated] == [True, False, True, True]
    # The policy stands still, so every evaluation must say the same.
    assert evaluated[0] == evaluated[2] == evaluated[3]
    assert {"eval/pass@1", "eval/pass@2", "eval/accuracy", "eval/rewards/low/mean"} <= evaluated[0].keys()
    assert "eval/pass@8" not in evaluated[0]
