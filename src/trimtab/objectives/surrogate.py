"""The differentiable half of the group-relative family: ratio, clip, KL and an explicit denominator.

The loss is a plain sum over tokens divided by a number that the caller computed on the whole batch (`denominator`), so
splitting the rows over micro-batches or processes and adding the parts gives the same loss and the same gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.groups import check_choice

Level = Literal["token", "sequence"]
Normaliser = Literal["rows", "tokens", "constant"]
BatchNormaliser = Literal["rows", "tokens", "constant", "groups"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here: e^20 is already far outside any trust region, and e^120 is not a finite float32."""


def loss_denominator(
    mask_NT: Tensor,
    *,
    normaliser: BatchNormaliser = "rows",
    max_length: int | None = None,
    group_ids_N: Tensor | None = None,
) -> Tensor:
    """What the sum over the whole batch is divided by; compute it before splitting and pass it to `surrogate_loss`.

    `rows`: rows with a token left (mean over rows of the mean over tokens: GRPO, GTPO, GSPO); `tokens`: number of
    tokens (DAPO, RLOO, REINFORCE); `constant`: rows times `max_length` (Dr. GRPO); `groups`: groups with a token left
    (GVPO, distillation).

    Returns:
        A scalar, float32, at least 1, so that a batch in which everything is masked has loss 0.

    Raises:
        ValueError: `constant` without a positive `max_length`, `groups` without `group_ids_N`, or an unknown
            normaliser.
    """
    check_choice("normaliser", normaliser, ("rows", "tokens", "constant", "groups"))
    mask_NT = mask_NT.bool()
    rows = mask_NT.any(dim=1).sum()
    if normaliser == "groups":
        if group_ids_N is None:
            raise ValueError("normaliser 'groups' needs group_ids_N: which rows belong together")
        groups = group_ids_N[mask_NT.any(dim=1)].unique().numel()
        return torch.tensor(float(max(groups, 1)), device=mask_NT.device)
    if normaliser == "tokens":
        return mask_NT.sum().clamp(min=1).float()
    if normaliser == "constant":
        if not max_length or max_length < 1:
            raise ValueError("normaliser 'constant' needs max_length: the longest completion allowed, in tokens")
        return (rows.clamp(min=1) * max_length).float()
    return rows.clamp(min=1).float()


def surrogate_loss(
    logps_NT: Tensor,
    old_logps_NT: Tensor | None,
    weights_NT: Tensor,
    mask_NT: Tensor,
    *,
    denominator: Tensor | float,
    reference_logps_NT: Tensor | None = None,
    entropies_NT: Tensor | None = None,
    entropy_weights_NT: Tensor | None = None,
    normaliser: Normaliser = "rows",
    level: Level = "token",
    clip_low: float | None = None,
    clip_high: float | None = None,
    beta: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum_t min(r w, clip(r) w) + beta k3 (+ entropy weight times entropy), over `denominator`.

    PPO's clipped surrogate (arXiv 1707.06347 equation 7) with the token weights of a group-relative method; k3 is the
    KL estimator of arXiv 2402.03300 equation 4. `level="sequence"` uses the length-normalised sequence ratio of GSPO
    (arXiv 2507.18071 equation 7). Without clip bounds r is not clipped, as in GTPO; its logarithm
    is clamped to +-20 in any case.

    Args:
        logps_NT: log-probabilities of the completion tokens under the policy, with gradient.
        old_logps_NT: the same under the policy that sampled; None means "has not moved since": r is 1 in value.
        weights_NT: from a method's weights function.
        mask_NT: from the same place.
        denominator: from `loss_denominator`, over the *whole* batch.
        reference_logps_NT: needed when `beta` is not 0.
        entropies_NT: with gradient; needed with `entropy_weights_NT`.
        entropy_weights_NT: weight of each token's entropy in the loss.
        normaliser: `rows` also divides each row by its own length.
        level: `token` or `sequence`.
        clip_low: r is clipped below at 1 - clip_low.
        clip_high: r is clipped above at 1 + clip_high.
        beta: weight of the KL to the reference.

    Returns:
        (loss, sums): scalar loss, and sums over tokens (`tokens`, `clipped`, `ratio`, `kl_old`, `kl`), to be added over
        micro-batches and divided by `tokens` at the end.

    Raises:
        ValueError: `beta` without reference log-probabilities, entropy weights without entropies, or a bad option.
    """
    check_choice("level", level, ("token", "sequence"))
    check_choice("normaliser", normaliser, ("rows", "tokens", "constant"))
    for name, bound in (("clip_low", clip_low), ("clip_high", clip_high), ("beta", beta)):
        if bound is not None and bound < 0:
            raise ValueError(f"{name} must be at least 0, not {bound}")
    if beta and reference_logps_NT is None:
        raise ValueError("beta above 0 needs reference_logps_NT")
    if entropy_weights_NT is not None and entropies_NT is None:
        raise ValueError("entropy_weights_NT needs entropies_NT, with gradient")
    mask_NT = mask_NT.bool()
    lengths_N1 = mask_NT.sum(dim=1, keepdim=True).clamp(min=1)
    # `where` and not a product: a masked position may hold inf or nan, and 0 * inf is nan in the gradient.
    logps_NT, weights_NT = logps_NT.where(mask_NT, 0.0), weights_NT.where(mask_NT, 0.0)
    old_logps_NT = logps_NT.detach() if old_logps_NT is None else old_logps_NT.where(mask_NT, 0.0)
    log_ratio_NT = logps_NT - old_logps_NT
    if level == "sequence":
        log_ratio_NT = (log_ratio_NT.sum(dim=1, keepdim=True) / lengths_N1).expand_as(logps_NT)
    ratio_NT = log_ratio_NT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    gain_NT = ratio_NT * weights_NT
    clipped_NT = torch.zeros_like(mask_NT)
    if clip_low is not None or clip_high is not None:
        low = None if clip_low is None else 1.0 - clip_low
        high = None if clip_high is None else 1.0 + clip_high
        bounded_NT = ratio_NT.clamp(low, high) * weights_NT
        clipped_NT = (bounded_NT < gain_NT) & mask_NT
        gain_NT = torch.minimum(gain_NT, bounded_NT)
    loss_NT = -gain_NT
    sums = {
        "tokens": mask_NT.sum(),
        "clipped": clipped_NT.sum(),
        "ratio": ratio_NT.detach().where(mask_NT, 0.0).sum(),
        "kl_old": k3_divergence(logps_NT.detach(), old_logps_NT).where(mask_NT, 0.0).sum(),
    }
    if beta and reference_logps_NT is not None:
        kl_NT = k3_divergence(logps_NT, reference_logps_NT.where(mask_NT, 0.0))
        loss_NT = loss_NT + beta * kl_NT
        sums["kl"] = kl_NT.detach().where(mask_NT, 0.0).sum()
    if entropy_weights_NT is not None and entropies_NT is not None:
        loss_NT = loss_NT + entropy_weights_NT * entropies_NT.where(mask_NT, 0.0)
    loss_NT = loss_NT.where(mask_NT, 0.0)
    if normaliser == "rows":
        loss_NT = loss_NT / lengths_N1
    return loss_NT.sum() / denominator, sums


def k3_divergence(logps_NT: Tensor, reference_logps_NT: Tensor) -> Tensor:
    """exp(q - p) - (q - p) - 1 of each token: an unbiased, non-negative estimate of KL(p || q), in nats.

    arXiv 2402.03300 equation 4. q - p is clamped to at most 20, so that value and gradient stay finite. It has no lower
    clamp: there k3 grows only linearly, and its gradient pulls back a token that the reference finds impossible.
    """
    log_ratio_NT = (reference_logps_NT - logps_NT).clamp(max=LOG_RATIO_LIMIT)
    return log_ratio_NT.exp() - log_ratio_NT - 1.0
