"""What a step of reinforcement learning writes into metrics.jsonl, over all processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from trimtab.objectives import row_mean
from trimtab.policy.rollouts import Rollouts
from trimtab.training.rollout import Batch


@dataclass(frozen=True)
class Total:
    """Adds up and averages over processes, each of which holds equally many groups."""

    accelerator: Accelerator

    def sum(self, value: Tensor) -> Tensor:
        """Sum over processes."""
        return self.accelerator.reduce(value, "sum") if self.accelerator.num_processes > 1 else value  # type: ignore[return-value]

    def average(self, value: Tensor | float, rows: int) -> float:
        """Mean over processes of a mean over rows, of which this one has so many."""
        return self.number(value * rows) / self.number(float(rows))

    def largest(self, value: Tensor | float) -> float:
        """Maximum over processes."""
        value = torch.as_tensor(value, device=self.accelerator.device).double().reshape(1)
        return float(self.accelerator.gather(value).max())  # type: ignore[union-attr]

    def mean(self, values: Tensor) -> float:
        """Mean of a vector whose parts lie on all processes; NaN where there is none."""
        count = self.number(float(values.numel()))
        return self.number(values.double().sum()) / count if count else math.nan

    def number(self, value: Tensor | float) -> float:
        """Sum over processes, as a number."""
        return float(self.sum(torch.as_tensor(value, device=self.accelerator.device)))


def rollout_metrics(batch: Batch, total: Total, *, stored: bool) -> dict[str, float]:
    """Of the fresh rows, which show the policy as it is; of all rows in a step without any.

    Args:
        batch: this process's share.
        total: over processes.
        stored: whether the run uses stored completions, which have metrics of their own.
    """
    rollouts = batch.rollouts
    assert rollouts.rewards_N is not None
    metrics: dict[str, float] = {}
    if stored:
        earned_N = rollouts.rewards_N[batch.fresh :]
        earned_N = earned_N[earned_N.isfinite()]
        metrics["off_policy/rows"] = total.mean(torch.arange(len(batch.owners)) >= batch.fresh)
        metrics["off_policy/reward"] = total.mean(earned_N)
    excluded_rows = total.mean(~rollouts.rewards_N.isfinite())
    if 0 < batch.fresh < len(batch.owners):
        rollouts = rollouts.select(torch.arange(batch.fresh, device=rollouts.mask_NT.device))
    metrics |= _row_metrics(rollouts, total)
    if batch.fresh and not rollouts.reward_parts:
        # Nothing judged the fresh rows: their rewards of 0 only keep them in.
        metrics |= {"reward": math.nan, "reward_std": math.nan}
    metrics["excluded_rows"] = excluded_rows
    metrics["reward_failures"] = total.number(float(batch.failures))
    return metrics


def _row_metrics(rollouts: Rollouts, total: Total) -> dict[str, float]:
    assert rollouts.rewards_N is not None and rollouts.entropies_NT is not None
    rewards_N = rollouts.rewards_N
    valid_N = rewards_N.isfinite()
    rows = total.number(valid_N.sum())
    mean = total.number(rewards_N.where(valid_N, 0.0).sum()) / rows if rows else math.nan
    spread = total.number((rewards_N.where(valid_N, mean) - mean).square().sum())
    metrics = {
        "reward": mean,
        "reward_std": math.sqrt(spread / max(1.0, rows - 1)),
        "entropy": total.mean(row_mean(rollouts.entropies_NT, rollouts.mask_NT)),
        "completions/mean_length": total.mean(rollouts.mask_NT.sum(dim=1)),
        "completions/clipped_ratio": total.mean(rollouts.truncated_N),
    }
    for name, part_N in rollouts.reward_parts.items():
        metrics[f"rewards/{name}/mean"] = total.mean(part_N[part_N.isfinite()])
    return metrics


def loss_metrics(sums: dict[str, float], total: Total, *, updates: int, kl: bool) -> dict[str, float]:
    """From what the micro-batches of a step added up.

    Args:
        sums: of this process.
        total: over processes.
        updates: optimizer steps in it.
        kl: whether a divergence was measured.
    """
    # Processes may hold different keys (a rank without a row that matters has none), so the list is fixed.
    keys = ("loss", "tokens", "clipped", "ratio", "kl_old", "kl")
    values = torch.tensor([sums.get(k, 0.0) for k in keys], dtype=torch.float64, device=total.accelerator.device)
    summed = dict(zip(keys, total.sum(values).tolist(), strict=True))
    # Nothing was scored in a step of nothing but equal rewards: there is no ratio to speak of.
    tokens = summed["tokens"] or math.nan
    result = {
        "loss": summed["loss"] / updates,
        "clip_ratio": summed["clipped"] / tokens,
        "ratio": summed["ratio"] / tokens,
        "kl_old": summed["kl_old"] / tokens,
    }
    if kl:
        result["kl"] = summed["kl"] / tokens
    return result
