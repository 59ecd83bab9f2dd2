"""GTPO's entropy filter and penalty, and the whole method.

Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772. Other methods share the four letters (group
*token*, group *turn*, guided token-level); none of them is meant here.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.conflict import ADVANTAGE_EPS, Combine, ConflictSides, conflict_runs, lambda_of_runs
from trimtab.objectives.groups import (
    Normalise,
    TokenWeights,
    advantage_metrics,
    advantages_and_uniform,
    check_choice,
    effective_mask,
    group_index,
    group_sum,
)

FilterMode = Literal["auto", "on", "off"]
FilterRows = Literal["all", "negative"]
PenaltyForm = Literal["advantage", "gradient"]
Compat = Literal["paper", "authors"]

LN_2 = math.log(2.0)
AUTHORS_THRESHOLD = 0.7


def row_mean(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Mean of `values_NT` over each row's masked tokens, shape (N,); 0 for an empty row."""
    mask_NT = mask_NT.bool()
    return values_NT.where(mask_NT, 0.0).sum(dim=1) / mask_NT.sum(dim=1).clamp(min=1)


def entropy_filter(
    entropies_N: Tensor,
    *,
    initial_entropy: float | None,
    threshold: float = LN_2,
    mode: FilterMode = "auto",
) -> Tensor:
    """delta of every completion: False drops a row whose mean token entropy exceeds the threshold.

    arXiv 2508.03772, section 4.3: a policy that started confident (initial entropy below ln 2, one coin toss a token)
    should not learn from completions in which it is not. A policy that started above, or exactly at, the threshold is
    not filtered at all.

    Args:
        entropies_N: mean token entropy of each completion, in nats.
        initial_entropy: mean token entropy of the untouched policy, in nats; needed by `auto` only.
        threshold: nats.
        mode: `auto` follows the paper; `on` and `off` overrule the initial entropy.

    Returns:
        keep_N, boolean.

    Raises:
        ValueError: `auto` without an initial entropy, or an unknown mode.
    """
    check_choice("mode", mode, ("auto", "on", "off"))
    if mode == "auto":
        if initial_entropy is None:
            raise ValueError(
                "entropy_filter with mode 'auto' needs initial_entropy; measure it or set the mode to on or off"
            )
        mode = "on" if initial_entropy < threshold else "off"
    if mode == "off":
        return torch.ones_like(entropies_N, dtype=torch.bool)
    return entropies_N <= threshold


# `gtpo_weights` has a setting of the function's name.
_keep = entropy_filter


@torch.no_grad()
def gtpo_weights(
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    rewards_N: Tensor,
    group_ids_N: Tensor,
    entropies_NT: Tensor | None = None,
    *,
    truncated_N: Tensor | None = None,
    initial_entropy: float | None = None,
    gamma: float = 0.1,
    entropy_penalty: PenaltyForm = "advantage",
    entropy_filter: FilterMode = "auto",
    entropy_threshold: float = LN_2,
    entropy_filter_rows: FilterRows = "all",
    conflict_sides: ConflictSides = "both",
    conflict_negative: float = 0.0,
    conflict_positive: float = 2.0,
    filtered_rows_define_conflicts: bool = True,
    normalise: Normalise = "none",
    keep_uniform_groups: bool = False,
    mask_truncated: bool = False,
    compat: Compat = "paper",
) -> TokenWeights:
    """The whole of GTPO up to the policy ratio: delta_i (A_i - gamma <H>_i) lambda_{i,t}.

    Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772, objective of section 4.4. What it changes
    against GRPO: no division by the group's standard deviation, no clipping, no KL and no reference model; conflicting
    tokens at the ends of completions keep only their positive updates; completions of high entropy are dropped; entropy
    itself is penalised. Conflicts are found from the raw advantages, on whole groups, before anything is dropped.

    Args:
        token_ids_NT: completion ids.
        mask_NT: 1 on completion tokens through the first end-of-sequence token, inclusive.
        rewards_N: one reward a row; NaN takes the row out. The paper's rewards span 0..20, and gamma is not scale-free.
        group_ids_N: integers; rows with equal ids form a group.
        entropies_NT: full-vocabulary entropy of every token's distribution, nats. May be None only when gamma is 0 and
            the filter is off.
        truncated_N: rows that ended at the length limit.
        initial_entropy: see `entropy_filter`.
        gamma: weight of the mean entropy, in reward units per nat.
        entropy_penalty: `advantage` subtracts a constant from the advantage (the authors' code); `gradient` adds
            gamma <H>_i to the loss as a differentiable term instead.
        entropy_filter: `auto`, `on` or `off`; see the function of this name.
        entropy_threshold: nats.
        entropy_filter_rows: `negative` drops only rows of negative advantage (the paper's Figure 4).
        conflict_sides: see `conflict_weights`.
        conflict_negative: see `conflict_weights`.
        conflict_positive: see `conflict_weights`.
        filtered_rows_define_conflicts: whether rows that the filter drops still take part in finding conflicts.
        normalise: `std` divides the advantages by the group's standard deviation.
        keep_uniform_groups: keep groups of equal rewards, which then receive the entropy penalty alone.
        mask_truncated: take truncated rows out of numerator and denominator.
        compat: `authors` follows the authors' public code where it differs from the paper: the product of the two
        masks,
            each row divided by its number of conflicting tokens (as they count them: the longer of the two runs), rows
            of a group summed instead of averaged, and the filter at 0.7 always on. The factor for the sum is the
            group's size, for a loss that divides by the number of rows.

    Returns:
        TokenWeights.

    Raises:
        ValueError: entropies are needed but missing, gamma is negative, or an option is unknown.
    """
    check_choice("entropy_penalty", entropy_penalty, ("advantage", "gradient"))
    check_choice("entropy_filter_rows", entropy_filter_rows, ("all", "negative"))
    check_choice("compat", compat, ("paper", "authors"))
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, not {gamma}")
    if entropy_threshold <= 0:
        raise ValueError(f"entropy_threshold must be above 0, not {entropy_threshold}")
    combine: Combine = "union"
    if compat == "authors":
        combine, entropy_filter, entropy_threshold = "product", "on", AUTHORS_THRESHOLD
    if entropies_NT is None and (gamma > 0 or entropy_filter != "off"):
        raise ValueError("GTPO needs entropies_NT unless gamma is 0 and entropy_filter is off")

    advantages_N, uniform_N = advantages_and_uniform(rewards_N, group_ids_N, normalise=normalise)
    kept_mask_NT = effective_mask(mask_NT, rewards_N, truncated_N=truncated_N, mask_truncated=mask_truncated)
    if entropies_NT is None:
        entropies_N, keep_N = torch.zeros_like(advantages_N), torch.ones_like(uniform_N)
    else:
        entropies_N = row_mean(entropies_NT.to(advantages_N.dtype), mask_NT)
        keep_N = _keep(entropies_N, initial_entropy=initial_entropy, threshold=entropy_threshold, mode=entropy_filter)
        if entropy_filter_rows == "negative":
            keep_N = keep_N | (advantages_N >= -ADVANTAGE_EPS)

    conflict_mask_NT = mask_NT.bool() if filtered_rows_define_conflicts else mask_NT.bool() & keep_N[:, None]
    forward_NT, backward_NT = conflict_runs(
        token_ids_NT, conflict_mask_NT, advantages_N, group_ids_N, sides=conflict_sides
    )
    lambda_NT = lambda_of_runs(
        forward_NT,
        backward_NT,
        advantages_N,
        negative=conflict_negative,
        positive=conflict_positive,
        combine=combine,
    )
    conflicts_N = (forward_NT | backward_NT).sum(dim=1)

    row_N = advantages_N - gamma * entropies_N if entropy_penalty == "advantage" else advantages_N
    taking_part_N = keep_N if keep_uniform_groups else keep_N & ~uniform_N
    row_N = row_N * taking_part_N
    if compat == "authors":
        # Their backward run is counted in reversed positions, so the union of the two is as long as the longer one.
        longer_N = torch.maximum(forward_NT.sum(dim=1), backward_NT.sum(dim=1)).clamp(min=1)
        index_N, groups = group_index(group_ids_N)
        size_N = group_sum(torch.ones_like(row_N), index_N, groups)[index_N]
        row_N = row_N * size_N / longer_N
    weights_NT = row_N[:, None] * lambda_NT * kept_mask_NT
    entropy_weights_NT = None
    if entropy_penalty == "gradient" and gamma > 0:
        entropy_weights_NT = gamma * (taking_part_N[:, None] & kept_mask_NT).to(weights_NT.dtype)

    tokens = mask_NT.bool().sum().clamp(min=1)
    rewarded_N = rewards_N.isfinite()

    def over_rows(values_N: Tensor) -> Tensor:
        return values_N.double().where(rewarded_N, 0.0).sum() / rewarded_N.sum().clamp(min=1)

    metrics = advantage_metrics(advantages_N, uniform_N) | {
        "gtpo/kept_fraction": over_rows(keep_N),
        "gtpo/conflict_fraction": conflicts_N.sum().double() / tokens,
        "gtpo/sign_balance": over_rows(row_N.sign()),
        "gtpo/penalty_abs": over_rows((gamma * entropies_N).abs()),
    }
    return TokenWeights(weights_NT, kept_mask_NT, entropy_weights_NT, metrics)
