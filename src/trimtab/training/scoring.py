"""Log-probabilities of a whole rollout, without gradient, in batches that fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.policy.rollouts import Rollouts
from trimtab.training.batches import micro_batches


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode for a while: what is only measured is measured of the whole model."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def score_rollouts(scorer: Any, rollouts: Rollouts, *, temperature: float, budget: int) -> Tensor:
    """Log-probability of every completion token, (N, T), nats, 0 outside the mask.

    Args:
        scorer: has the `score` of policy.scorer.Scorer.
        rollouts: on the scorer's device.
        temperature: that of sampling.
        budget: padded tokens that run at once.
    """
    logps_NT = torch.zeros(rollouts.mask_NT.shape, device=rollouts.mask_NT.device)
    rows_M = rollouts.mask_NT.any(dim=1).nonzero()[:, 0]
    for part_M in micro_batches(rollouts, rows_M, budget):
        part = rollouts.select(part_M)
        part_logps_MT, _ = scorer.score(part, temperature=temperature)
        logps_NT[part_M, : part_logps_MT.shape[1]] = part_logps_MT.to(logps_NT.dtype)
    return logps_NT
