"""GTPO's conflict masks: tokens that good and bad completions of a group share at their ends.

Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772, section 4.2. Pushing a token up in one completion
and down in another costs the format first; a conflicting token keeps only its positive updates.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.groups import check_choice, group_index

ConflictSides = Literal["both", "prefix", "suffix", "none"]
Combine = Literal["union", "product"]

ADVANTAGE_EPS = 1e-6
"""Advantages closer to zero than this take no part in the detection and keep lambda 1."""


def _align(values_NT: Tensor, source_NT: Tensor) -> Tensor:
    """Pick columns row by row; out-of-range columns (negative or past the end) are clamped, to be masked after."""
    return values_NT.gather(1, source_NT.clamp(0, values_NT.shape[1] - 1))


def _opposite_token_present(ids_NT: Tensor, valid_NT: Tensor, positive_N: Tensor, index_N: Tensor) -> Tensor:
    """Whether a row of the same group and the *other* sign holds the same token in the same column.

    One sort per column instead of a table over the vocabulary: the key packs (group, token, sign), so the key that
    would conflict with a row differs from its own in the last bit, and a binary search tells whether it is there.
    O(N T log N) time, O(N T) memory.
    """
    vocabulary = ids_NT.max() + 1 if ids_NT.numel() else 1
    key_NT = (index_N[:, None] * vocabulary + ids_NT) * 2 + positive_N[:, None].long()
    key_TN = torch.where(valid_NT, key_NT, -1).t().contiguous()
    sorted_TN = key_TN.sort(dim=1).values
    wanted_TN = key_TN ^ 1
    place_TN = torch.searchsorted(sorted_TN, wanted_TN).clamp(max=max(key_TN.shape[1] - 1, 0))
    found_TN = (sorted_TN.gather(1, place_TN) == wanted_TN) & (key_TN >= 0)
    return found_TN.t()


def _leading_run(flags_NT: Tensor) -> Tensor:
    """Keep only the run of True that starts in column 0."""
    return flags_NT.int().cummin(dim=1).values.bool() if flags_NT.shape[1] else flags_NT


def conflict_runs(
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    advantages_N: Tensor,
    group_ids_N: Tensor,
    *,
    sides: ConflictSides = "both",
) -> tuple[Tensor, Tensor]:
    """The forward and the backward conflict run of every row, booleans of shape (N, T).

    A token conflicts at position p (counted from the first completion token, or backwards from the last) when the same
    id stands at p in at least one row of positive and one row of negative advantage of the same group. The forward run
    is the contiguous run of conflicts from the first token on, the backward run the one that ends in the last.
    Rows of advantage 0 take no part. Only ids under the mask are compared, so padding may hold any id. A side that
    `sides` leaves out is False everywhere.

    Raises:
        ValueError: shapes do not fit, or `sides` is unknown.
    """
    check_choice("sides", sides, ("both", "prefix", "suffix", "none"))
    rows, width = token_ids_NT.shape
    if mask_NT.shape != token_ids_NT.shape or advantages_N.shape != (rows,) or group_ids_N.shape != (rows,):
        raise ValueError(
            f"token_ids_NT {tuple(token_ids_NT.shape)}, mask_NT {tuple(mask_NT.shape)}, advantages_N "
            f"{tuple(advantages_N.shape)} and group_ids_N {tuple(group_ids_N.shape)} do not fit together"
        )
    mask_NT = mask_NT.bool()
    if not rows or not width:
        return torch.zeros_like(mask_NT), torch.zeros_like(mask_NT)
    index_N, _ = group_index(group_ids_N)
    active_N = advantages_N.abs() > ADVANTAGE_EPS
    positive_N = advantages_N > 0
    column_T = torch.arange(width, device=token_ids_NT.device)
    first_N = torch.where(mask_NT, column_T, width).amin(dim=1)
    last_N = torch.where(mask_NT, column_T, -1).amax(dim=1)

    def run(side: ConflictSides, source_NT: Tensor) -> Tensor:
        if sides not in ("both", side):
            return torch.zeros_like(mask_NT)
        inside_NT = (source_NT >= 0) & (source_NT < width)
        valid_NT = _align(mask_NT, source_NT) & inside_NT & active_N[:, None]
        run_NT = _leading_run(_opposite_token_present(_align(token_ids_NT, source_NT), valid_NT, positive_N, index_N))
        return run_NT & valid_NT

    # Position p sits in column first + p, or last - p when counted from the end. No column under the mask lies
    # before the first or after the last, so on the way back the mask alone discards what was clamped.
    forward_NT = run("prefix", first_N[:, None] + column_T)
    backward_NT = run("suffix", last_N[:, None] - column_T)
    return (
        _align(forward_NT, column_T - first_N[:, None]) & mask_NT,
        _align(backward_NT, last_N[:, None] - column_T) & mask_NT,
    )


def conflict_weights(
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    advantages_N: Tensor,
    group_ids_N: Tensor,
    *,
    sides: ConflictSides = "both",
    negative: float = 0.0,
    positive: float = 2.0,
    combine: Combine = "union",
) -> Tensor:
    """lambda of every token: 0 on conflicts of negative rows, 2 on conflicts of positive rows, 1 everywhere else.

    arXiv 2508.03772, section 4.2. See `conflict_runs` for what a conflict is.

    Args:
        token_ids_NT: completion ids (integers).
        mask_NT: 1 on completion tokens through the first end-of-sequence token, inclusive.
        advantages_N: signed, before any entropy penalty.
        group_ids_N: integers; rows with equal ids form a group.
        sides: which runs count; the ablations of the paper's Figure 3 use one alone.
        negative: lambda of a conflicting token in a row of negative advantage.
        positive: lambda of a conflicting token in a row of positive advantage.
        combine: `union` of both runs; `product` multiplies the two lambdas where the runs overlap, as the authors' code
            does (a token can then reach 4).

    Returns:
        lambda_NT in the dtype of `advantages_N`; 1 outside the mask.

    Raises:
        ValueError: shapes do not fit, or an option is unknown.
    """
    forward_NT, backward_NT = conflict_runs(token_ids_NT, mask_NT, advantages_N, group_ids_N, sides=sides)
    return lambda_of_runs(forward_NT, backward_NT, advantages_N, negative=negative, positive=positive, combine=combine)


def lambda_of_runs(
    forward_NT: Tensor,
    backward_NT: Tensor,
    advantages_N: Tensor,
    *,
    negative: float = 0.0,
    positive: float = 2.0,
    combine: Combine = "union",
) -> Tensor:
    """`conflict_weights` when the two runs of `conflict_runs` are known already; arguments and errors as there."""
    check_choice("combine", combine, ("union", "product"))
    strength_N1 = torch.where(advantages_N > 0, positive, negative).to(advantages_N.dtype)[:, None]
    one = torch.ones((), dtype=advantages_N.dtype, device=advantages_N.device)
    if combine == "union":
        return torch.where(forward_NT | backward_NT, strength_N1, one)
    return torch.where(forward_NT, strength_N1, one) * torch.where(backward_NT, strength_N1, one)


def pushed_down_groups(
    token_ids_NT: Tensor, mask_NT: Tensor, weights_NT: Tensor, advantages_N: Tensor, group_ids_N: Tensor
) -> tuple[Tensor, Tensor]:
    """In which groups is a correct shared token pushed down? A diagnostic after section 4.1 of arXiv 2508.03772.

    A shared correct token stands in the forward conflict run of at least one row of positive advantage. It is pushed
    down when the weights it receives, each divided by its row's length and summed over all rows of the group that hold
    it at this position, are negative in total: what a loss that averages over each row's tokens applies to it.

    Args:
        token_ids_NT: completion ids, rows starting in column 0.
        mask_NT: 1 on completion tokens.
        weights_NT: signed token weights, before the division by length.
        advantages_N: signed.
        group_ids_N: integers; rows with equal ids form a group.

    Returns:
        (pushed_down_K, active_K), booleans over the groups in ascending id; active groups have a forward conflict.
    """
    mask_NT = mask_NT.bool()
    index_N, groups = group_index(group_ids_N)
    forward_NT, _ = conflict_runs(token_ids_NT, mask_NT, advantages_N, group_ids_N, sides="prefix")
    pushed_K = torch.zeros(groups, dtype=torch.bool, device=mask_NT.device)
    active_K = torch.zeros_like(pushed_K)
    # Runs are short: everything to the right of the longest one is cut off before the tokens are grouped.
    width = int(forward_NT.sum(dim=1).max()) if forward_NT.numel() else 0
    if width == 0:
        return pushed_K, active_K
    share_NW = (weights_NT / mask_NT.sum(dim=1).clamp(min=1)[:, None])[:, :width]
    column_W = torch.arange(width, device=token_ids_NT.device)
    vocabulary = token_ids_NT.max() + 1
    key_NW = (index_N[:, None] * width + column_W) * vocabulary + token_ids_NT[:, :width]
    held_NW = mask_NT[:, :width]
    keys_U, place_M = torch.unique(key_NW[held_NW], return_inverse=True)
    total_U = torch.zeros(keys_U.numel(), dtype=share_NW.dtype, device=share_NW.device)
    total_U.index_add_(0, place_M, share_NW[held_NW])
    shared_NW = forward_NT[:, :width] & (advantages_N > 0)[:, None]
    group_S = index_N[:, None].expand_as(key_NW)[shared_NW]
    total_S = total_U[torch.searchsorted(keys_U, key_NW[shared_NW])]
    pushed_K[group_S[total_S < 0]] = True
    active_K[group_S] = True
    return pushed_K, active_K
