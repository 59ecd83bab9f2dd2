"""Group statistics: who belongs together, and how far each completion stands from its group.

A group is the set of completions sampled from one prompt. Rows are matched by `group_ids_N`, never by position, so rows
may arrive interleaved and groups may differ in size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "none"]
Normalise = Literal["none", "std"]

UNIFORM_STD = 1e-6
"""A group whose sample standard deviation lies below this holds one reward only: nothing can be learnt from it."""


@dataclass(frozen=True)
class TokenWeights:
    """What a method decides on whole groups, once per rollout, without gradient.

    Attributes:
        weights_NT: signed weight of every token, 0 outside `mask_NT`; not yet divided by any length.
        mask_NT: tokens that count in the denominator (truncated or excluded rows are taken out here).
        entropy_weights_NT: weight of every token's differentiable entropy in the loss, or None.
        metrics: scalar tensors for the log.
    """

    weights_NT: Tensor
    mask_NT: Tensor
    entropy_weights_NT: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def group_index(group_ids_N: Tensor) -> tuple[Tensor, int]:
    """Number the groups 0..K-1. Returns (index_N, K); group ids may be any integers."""
    unique_K, index_N = torch.unique(group_ids_N, return_inverse=True)
    return index_N, unique_K.numel()


def group_sum(values_N: Tensor, index_N: Tensor, groups: int) -> Tensor:
    """Sum of `values_N` over each group, shape (K,)."""
    return torch.zeros(groups, dtype=values_N.dtype, device=values_N.device).index_add_(0, index_N, values_N)


def _centre(rewards_N: Tensor, group_ids_N: Tensor, baseline: Baseline) -> tuple[Tensor, Tensor, Tensor]:
    """Centred rewards, sample std and uniformity of each row's group, all (N,), in float64.

    float64 because a reward such as 0.1 has no exact float32 mean, and a residue of 1e-9 would look like an advantage.
    """
    rewards_N = rewards_N.double()
    valid_N = rewards_N.isfinite()
    values_N = rewards_N.where(valid_N, 0.0)
    index_N, groups = group_index(group_ids_N)
    count_N = group_sum(valid_N.double(), index_N, groups)[index_N]
    mean_N = group_sum(values_N, index_N, groups)[index_N] / count_N.clamp(min=1)
    deviation_N = (values_N - mean_N) * valid_N
    squares_N = group_sum(deviation_N.square(), index_N, groups)[index_N]
    std_N = (squares_N / (count_N - 1).clamp(min=1)).sqrt()
    uniform_N = (std_N < UNIFORM_STD) | (count_N < 2)
    if baseline == "leave_one_out":
        deviation_N = deviation_N * count_N / (count_N - 1).clamp(min=1)
    elif baseline == "none":
        return values_N, std_N, uniform_N
    return deviation_N.where(~uniform_N, 0.0), std_N, uniform_N


def group_advantages(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    *,
    baseline: Baseline = "mean",
    normalise: Normalise = "none",
) -> Tensor:
    """Advantage of each completion over its group.

    `mean` subtracts the group's mean reward (GRPO, arXiv 2402.03300 section 4.1.2; Dr. GRPO, arXiv 2503.20783; GTPO,
    arXiv 2508.03772); `leave_one_out` the mean of the *other* rows (RLOO, arXiv 2402.14740 equation 7); `none` nothing.
    `std` divides by the group's sample standard deviation (ddof 1). With a baseline, a group that holds one reward
    only (std below 1e-6) or a single valid row has advantage 0; nothing is ever divided by a small number.

    Args:
        rewards_N: one reward a row, in the reward function's units; NaN or infinite means "no reward": the row is
            left out of its group's statistics and gets advantage 0.
        group_ids_N: integers; rows with equal ids form a group.

    Returns:
        advantages_N, float32 (float64 when the rewards are).

    Raises:
        ValueError: shapes differ, or an option is unknown.
    """
    return advantages_and_uniform(rewards_N, group_ids_N, baseline=baseline, normalise=normalise)[0]


def advantages_and_uniform(
    rewards_N: Tensor, group_ids_N: Tensor, *, baseline: Baseline = "mean", normalise: Normalise = "none"
) -> tuple[Tensor, Tensor]:
    """`group_advantages`, and which rows' groups hold one reward only or fewer than two valid ones (boolean, (N,))."""
    check_choice("baseline", baseline, ("mean", "leave_one_out", "none"))
    check_choice("normalise", normalise, ("none", "std"))
    if rewards_N.dim() != 1 or rewards_N.shape != group_ids_N.shape:
        raise ValueError(
            f"rewards_N and group_ids_N must be two vectors of equal length, "
            f"not {tuple(rewards_N.shape)} and {tuple(group_ids_N.shape)}"
        )
    advantages_N, std_N, uniform_N = _centre(rewards_N, group_ids_N, baseline)
    if normalise == "std":
        advantages_N = torch.where(uniform_N, 0.0, advantages_N / std_N.clamp(min=UNIFORM_STD))
    return advantages_N.to(torch.float64 if rewards_N.dtype == torch.float64 else torch.float32), uniform_N


def effective_mask(
    mask_NT: Tensor, rewards_N: Tensor, *, truncated_N: Tensor | None = None, mask_truncated: bool = False
) -> Tensor:
    """Completion tokens that may carry weight: rows without a reward, and truncated ones if asked, are taken out.

    They leave the numerator *and* the denominator, as DAPO's overlong filtering does (arXiv 2503.14476 section 3.4).

    Raises:
        ValueError: `mask_truncated` without `truncated_N`.
    """
    keep_N = rewards_N.isfinite()
    if mask_truncated:
        if truncated_N is None:
            raise ValueError("mask_truncated needs truncated_N: which rows ended at the length limit")
        keep_N = keep_N & ~truncated_N.bool()
    return mask_NT.bool() & keep_N[:, None]


@torch.no_grad()
def outcome_weights(
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    rewards_N: Tensor,
    group_ids_N: Tensor,
    entropies_NT: Tensor | None = None,
    *,
    truncated_N: Tensor | None = None,
    baseline: Baseline = "mean",
    normalise: Normalise = "none",
    mask_truncated: bool = False,
    drop_uniform_groups: bool = False,
) -> TokenWeights:
    """Every token carries its completion's advantage: GRPO, Dr. GRPO, DAPO, GSPO, RLOO and REINFORCE.

    Args:
        token_ids_NT: completion ids; only their shape matters here.
        mask_NT: 1 on completion tokens through the first end-of-sequence token, inclusive.
        rewards_N: see `group_advantages`.
        group_ids_N: see `group_advantages`.
        entropies_NT: not used; part of the contract.
        truncated_N: rows that ended at the length limit.
        baseline: see `group_advantages`.
        normalise: see `group_advantages`.
        mask_truncated: take truncated rows out of numerator and denominator.
        drop_uniform_groups: take groups of equal rewards out of the denominator too (DAPO's dynamic sampling without
            the resampling, arXiv 2503.14476 section 3.2).
    """
    advantages_N, uniform_N = advantages_and_uniform(rewards_N, group_ids_N, baseline=baseline, normalise=normalise)
    kept_mask_NT = effective_mask(mask_NT, rewards_N, truncated_N=truncated_N, mask_truncated=mask_truncated)
    if drop_uniform_groups:
        kept_mask_NT = kept_mask_NT & ~uniform_N[:, None]
    weights_NT = advantages_N[:, None] * kept_mask_NT
    return TokenWeights(weights_NT, kept_mask_NT, metrics=advantage_metrics(advantages_N, uniform_N))


def advantage_metrics(advantages_N: Tensor, uniform_N: Tensor) -> dict[str, Tensor]:
    """What every method logs about its advantages."""
    return {"frac_reward_zero_std": uniform_N.double().mean(), "advantage_abs": advantages_N.abs().double().mean()}
