"""On-policy distillation: GVPO's residual with teachers, and the per-token form that other libraries have.

The residual, its optimum and where each part comes from are in `trimtab.objectives.residuals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.groups import TokenWeights, check_choice
from trimtab.objectives.gvpo import Reference, check_reference, gvpo_surrogate
from trimtab.objectives.residuals import (
    centre_residuals,
    gvpo_residuals,
    length_factor,
    log_ratio,
    mean_over_rows,
    residual_metrics,
    sequence_logps,
    weights_dtype,
)
from trimtab.objectives.surrogate import surrogate_loss

Form = Literal["sequence", "token"]


@torch.no_grad()
def distill_weights(
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    rewards_N: Tensor,
    group_ids_N: Tensor,
    entropies_NT: Tensor | None = None,
    *,
    logps_NT: Tensor | None = None,
    reference_logps_NT: Tensor | None = None,
    teacher_logps_NT: Sequence[Tensor] = (),
    lambdas: list[float] = [1.0],  # noqa: B006 - never changed, and a list is what a configuration holds
    eta: float = 0.0,
    beta: float = 1.0,
    length_power: float = 0.0,
    form: Form = "sequence",
    reference: Reference = "frozen",
    ema_decay: float = 0.99,
) -> TokenWeights:
    """Weights of GVPO's gradient (of L / beta) towards pi_ref^(1 - sum lambda) prod pi_Tj^lambda_j exp(eta R / beta).

    Defaults: one teacher, reached on its own. `sequence` is the form of `gvpo_residuals`, for completions from
    anywhere. `token` is what most libraries call on-policy distillation: on the student's own samples, every token is
    weighed by its own log-ratio to the target of its state, -beta (log pi - log target), and answers for nothing that
    follows (discount 0); nothing is centred, since other samples are in other states at the same position.

    Args:
        logps_NT: under the current student, at the sampling temperature, nats; before every update.
        reference_logps_NT: needed when the lambdas do not sum to 1.
        teacher_logps_NT: see `gvpo_residuals`; a row that a teacher cannot score is NaN and left out.
        lambdas: exponent of each teacher.
        eta: weight of the reward; rows without a reward are left out in any case.
        beta: weight of the log-probabilities against the reward; with eta 0 it is a factor of the step alone.
        length_power: f = length^-length_power (the weighted family of arXiv 2609.21432).
        form: `sequence` or `token`.
        reference: see `gvpo_weights`.
        ema_decay: see `gvpo_weights`.
        For the others see `gvpo_weights`.

    Returns:
        TokenWeights, for `distill_surrogate` with a denominator that counts groups.

    Raises:
        ValueError: as in `gvpo_residuals`; a group of one row (sequence form); the token form with a reward, with a
            length factor or with a teacher of other tokens.
    """
    check_choice("form", form, ("sequence", "token"))
    check_reference(reference, ema_decay)
    if logps_NT is None:
        raise ValueError("distillation needs logps_NT before every update")
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
    mask_NT = mask_NT.bool()
    least = 2 if form == "sequence" else 1
    centred_N, kept_N, count_N = centre_residuals(residuals_N, mask_NT, rewards_N, group_ids_N, least=least)
    kept_mask_NT = mask_NT & kept_N[:, None]
    if form == "sequence":
        w_NT = (-length_factor(mask_NT, length_power) * centred_N)[:, None] * kept_mask_NT
    else:
        _check_token_form(teacher_logps_NT, eta, length_power)
        ratio_NT = log_ratio(logps_NT.double(), reference_logps_NT, teacher_logps_NT, lambdas)
        w_NT = (-beta * ratio_NT).where(kept_mask_NT, 0.0)
    # A mean over the group's rows; for the sequence form of leave-one-out differences, hence k - 1.
    weights_NT = w_NT / (count_N - least + 1).clamp(min=1)[:, None]
    metrics = residual_metrics(centred_N, kept_N, count_N, rewards_N, group_ids_N, w_NT)
    own_N = sequence_logps(logps_NT, mask_NT)
    if reference_logps_NT is not None:
        ratio_N = own_N - sequence_logps(reference_logps_NT, mask_NT)
        metrics["gvpo/log_ratio_abs"] = mean_over_rows(ratio_N.abs(), kept_N)
    for number, teacher in enumerate(teacher_logps_NT, start=1):
        metrics[f"distill/kl_{number}"] = mean_over_rows(own_N - sequence_logps(teacher, mask_NT), kept_N)
    return TokenWeights(weights_NT.to(weights_dtype(logps_NT)), kept_mask_NT, metrics=metrics)


def distill_surrogate(
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
    form: Form = "sequence",
) -> tuple[Tensor, dict[str, Tensor]]:
    """`gvpo_surrogate`; in the token form with the token's importance ratio, unclipped.

    The token form is a mean over the student's own choices in the states that it visited. After the first update the
    choices are those of an older student, and the ratio corrects for that; for the states nothing does.

    Args:
        form: as in `distill_weights`.
        For the others see `gvpo_surrogate`.

    Raises:
        ValueError: another normaliser, or an unknown form.
    """
    check_choice("form", form, ("sequence", "token"))
    if form == "sequence":
        return gvpo_surrogate(
            logps_NT, old_logps_NT, weights_NT, mask_NT, denominator=denominator, normaliser=normaliser
        )
    check_choice("normaliser", normaliser, ("groups",))
    return surrogate_loss(logps_NT, old_logps_NT, weights_NT, mask_NT, denominator=denominator, normaliser="tokens")


def _check_token_form(teacher_logps_NT: Sequence[Tensor], eta: float, length_power: float) -> None:
    if eta:
        raise ValueError("form 'token' has no place for the reward of a whole completion: set eta to 0")
    if length_power:
        raise ValueError("form 'token' weighs every token by itself: set length_power to 0, or form to sequence")
    if any(teacher.dim() != 2 for teacher in teacher_logps_NT):
        raise ValueError("form 'token' needs a teacher with the student's tokenizer; set form to sequence")
