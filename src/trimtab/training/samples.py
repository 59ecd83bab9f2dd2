"""What samples.jsonl keeps of a step: whole groups, token by token, with the weights that the method gave them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trimtab.objectives import TokenWeights, group_advantages, row_mean
from trimtab.policy.rollouts import Rollouts
from trimtab.policy.token_texts import token_texts


def group_samples(
    step: int,
    rollouts: Rollouts,
    weights: TokenWeights,
    *,
    prompts: Sequence[str | list[dict[str, str]]],
    texts: Sequence[str],
    sources: Sequence[str],
    tokenizer: Any,
    count: int,
) -> list[dict[str, Any]]:
    """JSON lines for `count` completions, rounded up to whole groups; groups whose rewards differ come first.

    Args:
        step: training step.
        rollouts: with rewards and entropies.
        weights: the method's, of the same rows.
        prompts: each row's prompt, plain text or chat messages.
        texts: each row's completion as the reward functions saw it.
        sources: where each row comes from.
        tokenizer: for the text of each token.
        count: completions wanted.

    Returns:
        One line a completion: `group` is its place in the step, `advantage` the reward minus the group's mean (null
        without a reward), `weights` are signed and not divided by any length, `kept` is false where no token of the
        row has a weight in the loss. Weights and entropies (nats) have six significant digits; stored completions have
        no entropy (null).
    """
    assert rollouts.rewards_N is not None and rollouts.entropies_NT is not None
    entropies_N = row_mean(rollouts.entropies_NT, rollouts.mask_NT).tolist()
    advantages_N = group_advantages(rollouts.rewards_N, rollouts.group_ids_N).tolist()
    kept_N = rows_in_the_loss(weights).tolist()
    group_ids_N = rollouts.group_ids_N.tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids_N):
        members.setdefault(group, []).append(row)
    groups = sorted(members.values(), key=lambda rows: not any(advantages_N[row] for row in rows))
    chosen: list[int] = []
    for rows in groups:
        if len(chosen) >= count:
            break
        chosen += rows
    completion_ids = rollouts.completion_lists()
    lines = []
    for row in chosen:
        ids = completion_ids[row]
        reward = _or_none(float(rollouts.rewards_N[row]))
        lines.append(
            {
                "step": step,
                "group": group_ids_N[row],
                "prompt": prompts[row],
                "completion": texts[row],
                "source": sources[row],
                "reward": reward,
                "rewards": {name: _or_none(float(part[row])) for name, part in rollouts.reward_parts.items()},
                "entropy": _or_none(entropies_N[row]),
                "truncated": bool(rollouts.truncated_N[row]),
                "advantage": None if reward is None else _short(advantages_N[row]),
                "kept": kept_N[row],
                "tokens": token_texts(tokenizer, ids),
                "token_ids": ids,
                "weights": [_short(value) for value in weights.weights_NT[row, : len(ids)].tolist()],
                "entropies": [_short(value) for value in rollouts.entropies_NT[row, : len(ids)].tolist()],
            }
        )
    return lines


def rows_in_the_loss(weights: TokenWeights) -> Tensor:
    """Rows with a token that the loss gives a weight, boolean of shape (N,)."""
    matters_NT = weights.weights_NT != 0
    if weights.entropy_weights_NT is not None:
        matters_NT = matters_NT | (weights.entropy_weights_NT != 0)
    return matters_NT.any(dim=1)


def _short(value: float) -> float | None:
    # Adding 0 makes a plain zero of the negative one.
    return float(f"{value:.6g}") + 0.0 if math.isfinite(value) else None


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
