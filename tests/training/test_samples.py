from pathlib import Path
from typing import Any

import torch

from trimtab.objectives import TokenWeights
from trimtab.policy.loading import load_tokenizer
from trimtab.policy.rollouts import Rollouts
from trimtab.training.samples import group_samples


def lines(tiny_model: Path, *, count: int, rewards: list[float]) -> list[dict[str, Any]]:
    """Samples of three groups of two completions, "a</s>" and "bc</s>"; the last row has no weight."""
    ids_NT = torch.tensor([[67, 1, 2], [68, 69, 1]] * 3)
    mask_NT = torch.tensor([[True, True, False], [True, True, True]] * 3)
    weights_NT = torch.full((6, 3), 0.1).masked_fill(~mask_NT, 0.0)
    weights_NT[5] = 0.0
    rollouts = Rollouts(
        torch.zeros(3, 1, dtype=torch.long),
        torch.ones(3, 1, dtype=torch.bool),
        ids_NT,
        mask_NT,
        torch.tensor([0, 0, 1, 1, 2, 2]),
        torch.zeros(6, dtype=torch.bool),
        entropies_NT=torch.full((6, 3), 0.25),
        rewards_N=torch.tensor(rewards),
    )
    return group_samples(
        7,
        rollouts,
        TokenWeights(weights_NT, mask_NT),
        prompts=["p", "p", "q", "q", "r", "r"],
        texts=["a", "bc"] * 3,
        sources=["fresh"] * 6,
        tokenizer=load_tokenizer(str(tiny_model)),
        count=count,
    )


def test_groups_whose_rewards_differ_come_first_and_are_never_cut(tiny_model: Path) -> None:
    rewards = [1.0, 1.0, 0.0, 2.0, 3.0, 0.0]
    assert [line["group"] for line in lines(tiny_model, count=3, rewards=rewards)] == [1, 1, 2, 2]
    assert [line["group"] for line in lines(tiny_model, count=9, rewards=rewards)] == [1, 1, 2, 2, 0, 0]
    assert [line["group"] for line in lines(tiny_model, count=1, rewards=rewards)] == [1, 1]
    assert lines(tiny_model, count=0, rewards=rewards) == []


def test_a_line_says_of_every_token_its_text_id_weight_and_entropy(tiny_model: Path) -> None:
    first, second = lines(tiny_model, count=6, rewards=[1.0, 1.0, 1.0, 1.0, 3.0, 0.0])[:2]
    assert first["tokens"] == [load_tokenizer(str(tiny_model)).decode([67]), "</s>"]
    assert (first["token_ids"], first["weights"], first["entropies"]) == ([67, 1], [0.1, 0.1], [0.25, 0.25])
    assert (first["step"], first["prompt"], first["advantage"], first["kept"]) == (7, "r", 1.5, True)
    assert (second["weights"], second["advantage"], second["kept"]) == ([0.0, 0.0, 0.0], -1.5, False)


def test_a_completion_without_a_reward_has_no_advantage(tiny_model: Path) -> None:
    assert [line["advantage"] for line in lines(tiny_model, count=2, rewards=[float("nan"), 1.0] * 3)] == [None, 0.0]
