"""The residual that GVPO and distillation make constant within a group, and how a group's residuals are centred.

Group Variance Policy Optimization, arXiv 2504.19599, and its extension to teachers (GVPO++, arXiv 2609.21432; exponents
other than 1 also in G-OPD, arXiv 2602.12125). With l the log-probability of a whole completion (a sum over tokens, not
a mean), k completions of one prompt and Lambda the sum of the lambdas:

    d_i = f_i (beta (l_i - (1 - Lambda) l_ref,i - sum_j lambda_j l_Tj,i) - eta R_i)       residual
    L   = 1 / (2 (k - 1))  sum_i (d_i - mean d)^2                                         half its variance

Centring removes the unknown log Z of the prompt, so the minimum is the same for every sampling distribution that covers
the target; no importance ratio and no clip is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.objectives.groups import advantage_metrics, advantages_and_uniform, group_index, group_sum

SHARE_EPS = 1e-9
"""A reference whose share is closer to zero than this is left out: 1 - (0.1 + 0.2 + 0.7) is not exactly 0."""


def reference_share(lambdas: Sequence[float]) -> float:
    """1 - sum of the lambdas: the reference's exponent in the target; exactly 0 where rounding alone keeps it from it.

    A share of 0 means that the reference cancels and need not be scored.
    """
    share = 1.0 - sum(lambdas)
    return share if abs(share) > SHARE_EPS else 0.0


def gvpo_residuals(
    logps_NT: Tensor,
    mask_NT: Tensor,
    rewards_N: Tensor,
    *,
    reference_logps_NT: Tensor | None = None,
    teacher_logps_NT: Sequence[Tensor] = (),
    lambdas: Sequence[float] = (),
    eta: float = 1.0,
    beta: float = 0.1,
    length_power: float = 0.0,
) -> Tensor:
    """d_i = f_i (beta (l - (1 - sum lambda) l_ref - sum_j lambda_j l_Tj) - eta R) of every completion, differentiable.

    Without teachers this is GVPO's residual (arXiv 2504.19599); with them the target is
    pi_ref^(1 - sum lambda) prod_j pi_Tj^lambda_j exp(eta R / beta) / Z.

    Args:
        logps_NT: log-probabilities of the completion tokens under the current policy, nats.
        mask_NT: 1 on completion tokens through the first end-of-sequence token, inclusive.
        rewards_N: one reward a row; NaN or infinite gives a residual that is not finite.
        reference_logps_NT: under the reference; not needed when its share is 0.
        teacher_logps_NT: under each teacher, (N, T), or (N,) when its tokens are others and only the sum is known.
        lambdas: exponent of each teacher.
        eta: weight of the reward.
        beta: weight of the log-probabilities, reward units per nat.
        length_power: f = length^-length_power, in tokens.

    Returns:
        residuals_N, float64.

    Raises:
        ValueError: numbers of teachers and lambdas differ, the reference is missing, beta is not above 0, eta or
            length_power is negative, or length_power is used where it moves the optimum.
    """
    _check_family(len(teacher_logps_NT), lambdas, eta, beta, length_power)
    mask_NT = mask_NT.bool()
    ratio_N = log_ratio(
        sequence_logps(logps_NT, mask_NT),
        None if reference_logps_NT is None else sequence_logps(reference_logps_NT, mask_NT),
        [sequence_logps(teacher, mask_NT) for teacher in teacher_logps_NT],
        lambdas,
    )
    return (beta * ratio_N - eta * rewards_N.double()) * length_factor(mask_NT, length_power)


def sequence_logps(logps_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Log-probability of each completion, (N,), float64: the sum over its tokens. (N,) is taken as summed already."""
    if logps_NT.dim() == 1:
        return logps_NT.double()
    return logps_NT.double().where(mask_NT.bool(), 0.0).sum(dim=1)


def log_ratio(
    logps: Tensor, reference_logps: Tensor | None, teacher_logps: Sequence[Tensor], lambdas: Sequence[float]
) -> Tensor:
    """l - (1 - sum lambda) l_ref - sum_j lambda_j l_Tj: log-ratio to the target (up to log Z), a completion or a token.

    Raises:
        ValueError: the reference has a share in the target and is missing.
    """
    share = reference_share(lambdas)
    if share and reference_logps is None:
        raise ValueError(f"reference_logps_NT is missing: the reference has the share {share:g} in the target")
    if share and reference_logps is not None:
        logps = logps - share * reference_logps
    for factor, teacher in zip(lambdas, teacher_logps, strict=True):
        logps = logps - factor * teacher
    return logps


def length_factor(mask_NT: Tensor, length_power: float) -> Tensor:
    """f = length^-length_power of each row, (N,), float64; an empty row counts as one token."""
    return mask_NT.bool().sum(dim=1).clamp(min=1).double() ** -length_power


def centre_residuals(
    residuals_N: Tensor, mask_NT: Tensor, rewards_N: Tensor, group_ids_N: Tensor, *, least: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract each group's mean from the residuals of its usable rows.

    A row is usable when its reward and its residual are finite and it has a token; a group when it has `least` usable
    rows. The others are taken out *before* the mean is, so that the centred rows of every group add up to zero.

    Returns:
        (centred_N, kept_N, count_N): 0 in rows that are not kept; which are kept; usable rows in each row's group.

    Raises:
        ValueError: a group has fewer rows than `least`, usable or not.
    """
    index_N, groups = group_index(group_ids_N)
    size_K = torch.bincount(index_N, minlength=groups)
    if groups and int(size_K.min()) < least:
        raise ValueError(
            "sampling.group_size must be at least 2: a group has a single completion, and its residual is compared "
            "with those of the other completions of its prompt"
        )
    valid_N = residuals_N.isfinite() & rewards_N.isfinite() & mask_NT.bool().any(dim=1)
    count_N = group_sum(valid_N.double(), index_N, groups)[index_N]
    kept_N = valid_N & (count_N >= least)
    mean_N = group_sum(residuals_N.where(kept_N, 0.0), index_N, groups)[index_N] / count_N.clamp(min=1)
    return (residuals_N - mean_N).where(kept_N, 0.0), kept_N, count_N


def group_variance(centred_N: Tensor, kept_N: Tensor, count_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Mean over the kept groups of sum d^2 / (k - 1), d centred: their mean sample variance; 0 without a group."""
    groups = group_ids_N[kept_N].unique().numel()
    return (centred_N.square() / (count_N - 1).clamp(min=1)).sum() / max(groups, 1)


def mean_over_rows(values_N: Tensor, kept_N: Tensor) -> Tensor:
    """Mean over the kept rows; 0 without one."""
    return values_N.where(kept_N, 0.0).sum() / kept_N.sum().clamp(min=1)


def residual_metrics(
    centred_N: Tensor, kept_N: Tensor, count_N: Tensor, rewards_N: Tensor, group_ids_N: Tensor, w: Tensor
) -> dict[str, Tensor]:
    """Var(d), max |w| (before any division) and the share of rows left out, next to what every method logs."""
    return advantage_metrics(*advantages_and_uniform(rewards_N, group_ids_N)) | {
        "gvpo/variance": group_variance(centred_N, kept_N, count_N, group_ids_N),
        "gvpo/weight_max": w.abs().max(),
        "gvpo/left_out": (~kept_N).double().mean(),
    }


def weights_dtype(logps_NT: Tensor) -> torch.dtype:
    """float64 for float64, else float32: what the weights come back in."""
    return torch.float64 if logps_NT.dtype == torch.float64 else torch.float32


def _check_family(teachers: int, lambdas: Sequence[float], eta: float, beta: float, length_power: float) -> None:
    if teachers != len(lambdas):
        raise ValueError(
            f"lambdas needs one number a teacher: it has {len(lambdas)}, and there are {teachers} teachers"
        )
    if beta <= 0:
        raise ValueError(f"beta must be above 0, not {beta}: without it no optimum is unique")
    for name, value in (("eta", eta), ("length_power", length_power)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, not {value}")
    if length_power and (len(lambdas) != 1 or reference_share(lambdas) != 0 or eta != 0):
        raise ValueError(
            "length_power above 0 needs one teacher with lambda 1, and eta 0: only then is log Z 0; anywhere else a "
            "factor that differs within a group leaves part of log Z in the residual and moves the optimum"
        )
