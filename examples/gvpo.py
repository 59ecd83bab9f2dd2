"""GVPO (arXiv 2504.19599) on one page: three updates on every rollout, against the policy that sampled it.

Against GRPO: no importance ratio and no clip. Each completion's log-ratio to the reference is regressed on its reward,
inside the group, so the optimum is the same whoever sampled; its weight follows the policy and is computed anew before
every update.
"""

import torch
from common import STEPS, setup

from trimtab.objectives import gvpo_surrogate, gvpo_weights, loss_denominator

world = setup(learning_rate=5e-5)

for step in range(1, STEPS + 1):
    rollouts = world.rollout(step)
    with torch.no_grad():
        reference_logps_NT, _ = world.scorer.score(rollouts)

    for _ in range(3):
        # On whole groups, without gradient, from the policy as it is now.
        with torch.no_grad():
            current_logps_NT, _ = world.scorer.score(rollouts)
        weights = gvpo_weights(
            rollouts.completion_ids_NT,
            rollouts.mask_NT,
            rollouts.rewards_N,
            rollouts.group_ids_N,
            logps_NT=current_logps_NT,
            reference_logps_NT=reference_logps_NT,
            beta=0.5,
        )

        # With gradient: the log-probability of every completion, times its weight.
        logps_NT, _ = world.scorer.score(rollouts)
        denominator = loss_denominator(weights.mask_NT, normaliser="groups", group_ids_N=rollouts.group_ids_N)
        loss, _ = gvpo_surrogate(logps_NT, None, weights.weights_NT, weights.mask_NT, denominator=denominator)
        world.step(loss)

    moved = weights.metrics["gvpo/log_ratio_abs"]
    print(f"step {step:2}  reward {rollouts.rewards_N.mean():5.2f}  mean |log-ratio| {moved:.3f} nats a completion")
