"""GVPO: make the implicit reward of a completion agree with its reward, up to a constant of the prompt.

Group Variance Policy Optimization, arXiv 2504.19599; the residual d and the loss L are in
`trimtab.objectives.residuals`. The gradient of L is -beta / (k - 1) sum_i w_i grad l_i with the *detached* weights
w_i = (R_i - mean R) - beta ((l_i - l_ref,i) - mean), which add up to zero in every group. They follow the policy as it
is now, so they are computed anew, on whole groups, before every update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.groups import TokenWeights, check_choice
from trimtab.objectives.residuals import (
    centre_residuals,
    group_variance,
    gvpo_residuals,
    mean_over_rows,
    residual_metrics,
    sequence_logps,
    weights_dtype,
)
from trimtab.objectives.surrogate import surrogate_loss

Reference = Literal["rollout", "frozen", "ema"]


def gvpo_loss(
    logps_NT: Tensor,
    mask_NT: Tensor,
    rewards_N: Tensor,
    group_ids_N: Tensor,
    *,
    reference_logps_NT: Tensor | None = None,
    teacher_logps_NT: Sequence[Tensor] = (),
    lambdas: Sequence[float] = (),
    eta: float = 1.0,
    beta: float = 0.1,
    length_power: float = 0.0,
) -> Tensor:
    """1 / (2 (k - 1)) sum_i (d_i - mean d)^2, averaged over prompts: the loss in one piece, for autograd.

    arXiv 2504.19599. It needs whole groups with gradient; `gvpo_weights` and `gvpo_surrogate` give the same gradient
    and may be split. Rows whose residual is not finite are left out before centring, groups with fewer than two
    others are left out whole.

    Args:
        group_ids_N: integers; rows with equal ids form a group.
        For the others see `gvpo_residuals`.

    Returns:
        A scalar, float64, in squared reward units; 0 when no group is left.

    Raises:
        ValueError: a group of one row, or as in `gvpo_residuals`.
    """
    residuals_N = gvpo_residuals(
        logps_NT,
        mask_NT,
        rewards_N,
        reference_logps_NT=reference_logps_NT,
        teacher_logps_NT=teacher_logps_NT,
        lambdas=lambdas,
        eta=eta,
        beta=beta,
        length_power=length_power,
    )
    centred_N, kept_N, count_N = centre_residuals(residuals_N, mask_NT, rewards_N, group_ids_N)
    return 0.5 * group_variance(centred_N, kept_N, count_N, group_ids_N)


@torch.no_grad()
def gvpo_weights(
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    rewards_N: Tensor,
    group_ids_N: Tensor,
    entropies_NT: Tensor | None = None,
    *,
    logps_NT: Tensor | None = None,
    reference_logps_NT: Tensor | None = None,
    beta: float = 0.1,
    reference: Reference = "rollout",
    ema_decay: float = 0.99,
    scale_by_beta: bool = True,
) -> TokenWeights:
    """w_i / (k - 1) on every token of completion i, w_i = (R_i - mean R) - beta ((l_i - l_ref,i) - mean).

    Group Variance Policy Optimization, arXiv 2504.19599. To be called before *every* update with the log-probabilities
    of the policy as it is now. Groups of equal rewards are kept: they carry the beta term.

    Args:
        token_ids_NT: completion ids; only their shape matters here.
        mask_NT: 1 on completion tokens through the first end-of-sequence token, inclusive.
        rewards_N: one reward a row; NaN takes the row out, and its group is centred without it.
        group_ids_N: integers; rows with equal ids form a group.
        entropies_NT: not used; part of the contract.
        logps_NT: under the current policy, at the sampling temperature, nats.
        reference_logps_NT: under the reference, from the same scorer. With the `rollout` reference both may be None:
            the policy has not moved since it sampled.
        beta: weight of the KL to the reference, reward units per nat, above 0.
        reference: which policy the trainer scores as reference: the one that sampled, the one training began with, or
            a moving average of the weights.
        ema_decay: what the moving average keeps each step.
        scale_by_beta: take the gradient of L / beta, whose size does not depend on beta while the policy is near its
            reference.

    Returns:
        TokenWeights, for `gvpo_surrogate` with a denominator that counts groups.

    Raises:
        ValueError: a group of one row, a missing log-probability, or an option out of range.
    """
    check_reference(reference, ema_decay)
    if reference != "rollout" and logps_NT is None:
        raise ValueError(f"GVPO with the {reference} reference needs logps_NT before every update")
    if (logps_NT is None) != (reference_logps_NT is None):
        raise ValueError("GVPO needs logps_NT and reference_logps_NT, or neither while the policy has not moved")
    if logps_NT is None:
        logps_NT = reference_logps_NT = torch.zeros_like(mask_NT, dtype=rewards_N.dtype)
    residuals_N = gvpo_residuals(logps_NT, mask_NT, rewards_N, reference_logps_NT=reference_logps_NT, beta=beta)
    centred_N, kept_N, count_N = centre_residuals(residuals_N, mask_NT, rewards_N, group_ids_N)
    row_N = -centred_N / (count_N - 1).clamp(min=1) * (1.0 if scale_by_beta else beta)
    kept_mask_NT = mask_NT.bool() & kept_N[:, None]
    metrics = residual_metrics(centred_N, kept_N, count_N, rewards_N, group_ids_N, centred_N)
    assert reference_logps_NT is not None
    ratio_N = sequence_logps(logps_NT, mask_NT) - sequence_logps(reference_logps_NT, mask_NT)
    metrics["gvpo/log_ratio_abs"] = mean_over_rows(ratio_N.abs(), kept_N)
    return TokenWeights((row_N[:, None] * kept_mask_NT).to(weights_dtype(logps_NT)), kept_mask_NT, metrics=metrics)


def gvpo_surrogate(
    logps_NT: Tensor,
    old_logps_NT: Tensor | None,
    weights_NT: Tensor,
    mask_NT: Tensor,
    *,
    denominator: Tensor | float,
    reference_logps_NT: Tensor | None = None,
    entropies_NT: Tensor | None = None,
    entropy_weights_NT: Tensor | None = None,
    normaliser: Literal["groups"] = "groups",
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum_i w_i l_i / (k - 1) over the number of groups: its gradient is that of `gvpo_loss`, its value is not.

    `surrogate_loss` without importance ratio, clip or KL: what is wrong with a completion's probability is in its
    weight, whoever sampled it. The old log-probabilities serve the log alone (`ratio`, `kl_old`).

    Args:
        denominator: from `loss_denominator` with normaliser `groups`, over the *whole* batch.
        normaliser: `groups`; nothing is divided by a length.
        reference_logps_NT: not used, like the entropies; part of the contract.
        For the others see `surrogate_loss`.

    Raises:
        ValueError: another normaliser.
    """
    check_choice("normaliser", normaliser, ("groups",))
    loss, sums = surrogate_loss(logps_NT, None, weights_NT, mask_NT, denominator=denominator, normaliser="tokens")
    if old_logps_NT is not None:
        _, sums = surrogate_loss(logps_NT.detach(), old_logps_NT, weights_NT, mask_NT, denominator=denominator)
    return loss, sums


def check_reference(reference: str, ema_decay: float) -> None:
    """Raise ValueError unless `reference` is known and `ema_decay` lies in [0, 1)."""
    check_choice("reference", reference, ("rollout", "frozen", "ema"))
    if not 0 <= ema_decay < 1:
        raise ValueError(f"ema_decay must be at least 0 and below 1, not {ema_decay}")
