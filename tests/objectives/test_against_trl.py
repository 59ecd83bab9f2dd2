"""Equality with another implementation: the loss of TRL's GRPO trainer on random tensors, value and gradient."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.objectives.registry import find_method
from trimtab.objectives.surrogate import loss_denominator

pytest.importorskip("trl", reason="the comparison needs TRL: pip install 'trimtab[oracle]'")

ROWS, WIDTH, MAX_LENGTH = 8, 9, 12


def random_tensors(seed: int) -> dict[str, Tensor]:
    """Two groups of four, lengths 1 to 9; the policy has moved far enough for clipping to act on either side."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)

    old_NT = -draw().abs()
    lengths_N1 = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    return {
        "old_NT": old_NT,
        "logps_NT": old_NT + 0.4 * draw(),
        "reference_NT": old_NT + 0.4 * draw(),
        "entropies_NT": draw().abs(),
        "mask_NT": (torch.arange(WIDTH) < lengths_N1).long(),
        "rewards_N": torch.rand(ROWS, dtype=torch.float64, generator=generator),
        "group_ids_N": torch.arange(2).repeat_interleave(ROWS // 2),
    }


def trl_loss(
    data: dict[str, Tensor], logps_NT: Tensor, advantages: Tensor, settings: dict[str, Any], loss_type: str
) -> Tensor:
    """TRL's loss on a bare trainer that holds only what the method reads, one process, no accumulation."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps_NT, data["entropies_NT"], None),
        loss_type=loss_type,
        importance_sampling_level=settings["level"],
        epsilon_low=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        beta=settings["beta"],
        max_completion_length=MAX_LENGTH,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value),
        _metrics={"train": defaultdict(list)},
    )
    ids_NT = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids_NT[:, :1],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": ids_NT,
        "completion_mask": data["mask_NT"],
        "advantages": advantages,
        "old_per_token_logps": data["old_NT"],
        "ref_per_token_logps": data["reference_NT"],
        "num_items_in_batch": data["mask_NT"].sum(),
    }
    loss = trainer._compute_loss(None, inputs)
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    ("name", "loss_type"), [("grpo", "grpo"), ("dr_grpo", "dr_grpo"), ("dapo", "dapo"), ("gspo", "grpo")]
)
def test_the_loss_and_its_gradient_equal_those_of_trl(name: str, loss_type: str, beta: float, seed: int) -> None:
    data = random_tensors(seed)
    method = find_method(name)
    weights_settings, loss_settings = method.split({"beta": beta})
    found = method.weights(
        torch.zeros(ROWS, WIDTH, dtype=torch.long),
        data["mask_NT"],
        data["rewards_N"],
        data["group_ids_N"],
        **weights_settings,
    )
    ours_NT = data["logps_NT"].clone().requires_grad_()
    loss, sums = method.loss(
        ours_NT,
        data["old_NT"],
        found.weights_NT,
        found.mask_NT,
        denominator=loss_denominator(found.mask_NT, normaliser=loss_settings["normaliser"], max_length=MAX_LENGTH),
        reference_logps_NT=data["reference_NT"],
        **loss_settings,
    )
    loss.backward()

    theirs_NT = data["logps_NT"].clone().requires_grad_()
    advantages_N = found.weights_NT[:, 0]  # every row has a first token
    their_loss = trl_loss(data, theirs_NT, advantages_N, loss_settings, loss_type)
    their_loss.backward()

    assert 0 < sums["clipped"] < sums["tokens"]
    torch.testing.assert_close(loss, their_loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours_NT.grad, theirs_NT.grad, atol=1e-6, rtol=0)
    assert ours_NT.grad is not None
    assert ours_NT.grad.abs().max() > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_weights_that_differ_from_token_to_token_mean_the_same_to_trl(beta: float) -> None:
    data = random_tensors(9)
    weights_NT = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    method = find_method("grpo")
    settings = method.split({"beta": beta})[1]
    ours_NT, theirs_NT = (data["logps_NT"].clone().requires_grad_() for _ in range(2))
    loss, _ = method.loss(
        ours_NT,
        data["old_NT"],
        weights_NT,
        data["mask_NT"],
        denominator=loss_denominator(data["mask_NT"]),
        reference_logps_NT=data["reference_NT"],
        **settings,
    )
    loss.backward()
    their_loss = trl_loss(data, theirs_NT, weights_NT, settings, "grpo")
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours_NT.grad, theirs_NT.grad, atol=1e-6, rtol=0)
