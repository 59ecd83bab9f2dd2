"""Process rewards: every step of a completion has a reward of its own, and a token answers for the steps ahead of it.

`sum` is GRPO with process supervision (DeepSeekMath, arXiv 2402.03300 section 4.1.3). `min` is the min-form credit
assignment of PURE (arXiv 2504.15275) on the same normalised rewards: a chain is as good as its worst step.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.entropy import row_mean
from trimtab.objectives.groups import (
    Normalise,
    TokenWeights,
    advantage_metrics,
    advantages_and_uniform,
    check_choice,
    effective_mask,
)

ProcessForm = Literal["sum", "min"]
Outcome = Literal["last_step", "none"]


def process_advantages(
    mask_NT: Tensor,
    step_ends_NS: Tensor,
    step_rewards_NS: Tensor,
    group_ids_N: Tensor,
    *,
    form: ProcessForm = "sum",
    normalise: Normalise = "std",
) -> Tensor:
    """Advantage of every token, from the rewards of the steps that end at it or after it.

    All steps of all rows of a group are one pool. Each reward is centred on the pool's mean and, with `std`, divided by
    its sample standard deviation (ddof 1); a pool of one step, or with a deviation below 1e-6, gives zeros.

    `sum` adds the normalised rewards of the steps that end at the token or after it.

    `min` hands the row's smallest normalised reward to all tokens up to the end of that step, and 0 to those after it,
    which had no part in it. PURE multiplies the rewards of a row by softmax(-reward / 0.1) and sums those ahead; this
    is its limit at temperature 0, where the worst step alone is left. Of equal worst steps the last one counts.

    Args:
        mask_NT: 1 on completion tokens, from the first position on.
        step_ends_NS: position of the token that ends each step, counted from 0, in any order; -1 fills up.
        step_rewards_NS: in the scorer's units; NaN or infinite means "no reward": the step is as if it were not there.
        group_ids_N: integers; rows with equal ids form a group.
        form: `sum` or `min`.
        normalise: `std`, or `none` to centre only.

    Returns:
        advantages_NT, 0 outside the mask, after a row's last step and in rows without steps; float32 (float64 when the
        step rewards are).

    Raises:
        ValueError: shapes differ, an option is unknown, or a step with a reward ends outside its row's tokens.
    """
    return _advantages_and_uniform(mask_NT, step_ends_NS, step_rewards_NS, group_ids_N, form, normalise)[0]


@torch.no_grad()
def process_weights(
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    rewards_N: Tensor,
    group_ids_N: Tensor,
    entropies_NT: Tensor | None = None,
    *,
    step_ends_NS: Tensor | None = None,
    step_rewards_NS: Tensor | None = None,
    truncated_N: Tensor | None = None,
    form: ProcessForm = "sum",
    outcome: Outcome = "last_step",
    normalise: Normalise = "std",
    mask_truncated: bool = False,
    drop_uniform_groups: bool = False,
) -> TokenWeights:
    """Every token carries its process advantage: GRPO with a reward for each step.

    Args:
        token_ids_NT: completion ids; only their shape matters here.
        mask_NT: 1 on completion tokens through the first end-of-sequence token, inclusive.
        rewards_N: the outcome, one reward a row. NaN takes the row out, and its steps out of the pool, whatever
            `outcome` says.
        group_ids_N: see `process_advantages`.
        entropies_NT: not used; part of the contract.
        step_ends_NS: see `process_advantages`.
        step_rewards_NS: see `process_advantages`.
        truncated_N: rows that ended at the length limit.
        form: see `process_advantages`.
        outcome: `last_step` adds the outcome to the pool, as a step that ends at the row's last token; with `none` the
            steps alone count.
        normalise: see `process_advantages`.
        mask_truncated: take truncated rows out of numerator and denominator; their steps stay in the pool.
        drop_uniform_groups: take groups whose pool holds one reward only out of the denominator too.

    Returns:
        TokenWeights.

    Raises:
        ValueError: as in `process_advantages`; the steps are missing, or `mask_truncated` without `truncated_N`.
    """
    check_choice("outcome", outcome, ("last_step", "none"))
    if step_ends_NS is None or step_rewards_NS is None:
        raise ValueError("process rewards need step_ends_NS and step_rewards_NS, from a step scorer")
    given_NS = _given_steps(mask_NT, step_ends_NS, step_rewards_NS)
    valid_N = rewards_N.isfinite()
    step_rewards_NS = step_rewards_NS.where(valid_N[:, None], torch.nan)
    # Counted before the outcome joins them.
    given_NS = given_NS & valid_N[:, None]
    steps = given_NS.sum()
    metrics = {
        "process/steps": steps / valid_N.sum().clamp(min=1),
        "process/step_reward": step_rewards_NS.where(given_NS, 0.0).double().sum() / steps.clamp(min=1),
    }
    if outcome == "last_step":
        last_N = mask_NT.bool().sum(dim=1) - 1
        step_ends_NS = torch.cat([step_ends_NS, last_N[:, None]], dim=1)
        step_rewards_NS = torch.cat([step_rewards_NS, rewards_N[:, None]], dim=1)
    advantages_NT, uniform_N = _advantages_and_uniform(
        mask_NT, step_ends_NS, step_rewards_NS, group_ids_N, form, normalise
    )
    kept_mask_NT = effective_mask(mask_NT, rewards_N, truncated_N=truncated_N, mask_truncated=mask_truncated)
    if drop_uniform_groups:
        kept_mask_NT = kept_mask_NT & ~uniform_N[:, None]
    metrics |= advantage_metrics(row_mean(advantages_NT.abs(), mask_NT), uniform_N)
    return TokenWeights(advantages_NT * kept_mask_NT, kept_mask_NT, metrics=metrics)


def _advantages_and_uniform(
    mask_NT: Tensor,
    step_ends_NS: Tensor,
    step_rewards_NS: Tensor,
    group_ids_N: Tensor,
    form: ProcessForm,
    normalise: Normalise,
) -> tuple[Tensor, Tensor]:
    """`process_advantages`, and which rows' pools hold one reward only or fewer than two steps (boolean, (N,))."""
    check_choice("form", form, ("sum", "min"))
    mask_NT = mask_NT.bool()
    given_NS = _given_steps(mask_NT, step_ends_NS, step_rewards_NS)
    # One column without a reward: a row that has no step belongs to a pool too.
    pool_NS = torch.nn.functional.pad(step_rewards_NS.where(given_NS, torch.nan), (0, 1), value=torch.nan)
    columns = pool_NS.shape[1]
    advantages_M, uniform_M = advantages_and_uniform(
        pool_NS.flatten(), group_ids_N.repeat_interleave(columns), normalise=normalise
    )
    normalised_NS = advantages_M.view(-1, columns)[:, :-1].double()
    uniform_N = uniform_M.view(-1, columns)[:, -1]

    ends_NS = step_ends_NS.long().where(given_NS, 0)
    start_NT = torch.zeros(mask_NT.shape, dtype=torch.float64, device=mask_NT.device)
    if form == "sum":
        at_end_NT = start_NT.scatter_add(1, ends_NS, normalised_NS)
        ahead_NT = at_end_NT.flip(1).cumsum(dim=1).flip(1)
    else:
        nothing = torch.inf
        at_end_NT = (start_NT + nothing).scatter_reduce(1, ends_NS, normalised_NS.where(given_NS, nothing), "amin")
        ahead_NT = at_end_NT.flip(1).cummin(dim=1).values.flip(1)
        worst_N1 = ahead_NT[:, :1]
        ahead_NT = ahead_NT.where((ahead_NT == worst_N1) & worst_N1.isfinite(), 0.0)
    return ahead_NT.to(advantages_M.dtype), uniform_N


def _given_steps(mask_NT: Tensor, step_ends_NS: Tensor, step_rewards_NS: Tensor) -> Tensor:
    """Which places hold a step with a reward, (N, S); raises ValueError as `process_advantages` says."""
    if step_ends_NS.dim() != 2 or step_ends_NS.shape != step_rewards_NS.shape or len(step_ends_NS) != len(mask_NT):
        raise ValueError(
            f"step_ends_NS and step_rewards_NS must be two matrices of equal shape with {len(mask_NT)} rows, as many "
            f"as mask_NT has, not {tuple(step_ends_NS.shape)} and {tuple(step_rewards_NS.shape)}"
        )
    given_NS = (step_ends_NS >= 0) & step_rewards_NS.isfinite()
    lengths_N = mask_NT.bool().sum(dim=1)
    last_N = torch.nn.functional.pad(step_ends_NS.where(given_NS, -1), (0, 1), value=-1).amax(dim=1)
    outside_N = last_N >= lengths_N
    if outside_N.any():
        row = int(outside_N.nonzero()[0, 0])
        raise ValueError(
            f"step_ends_NS, row {row}: a step ends at token {int(last_N[row])}, counted from 0, but the completion has "
            f"{int(lengths_N[row])} tokens"
        )
    return given_NS
