"""On-policy distillation on one page: the student learns to be at temperature 1 what its teacher is at 0.7.

The student samples, the teacher scores; no reward is used. In every group the student's log-ratio to the teacher is
made constant, which at the optimum makes the two distributions equal.
"""

import copy

import torch
from common import STEPS, setup

from trimtab.objectives import distill_surrogate, distill_weights, loss_denominator
from trimtab.policy.scorer import Scorer

world = setup(learning_rate=5e-5)
teacher = Scorer(copy.deepcopy(world.policy.model).requires_grad_(False))

for step in range(1, STEPS + 1):
    rollouts = world.rollout(step)
    with torch.no_grad():
        teacher_logps_NT, _ = teacher.score(rollouts, temperature=0.7)
        student_logps_NT, _ = world.scorer.score(rollouts)

    # On whole groups, without gradient. The rewards do not count: eta is 0.
    weights = distill_weights(
        rollouts.completion_ids_NT,
        rollouts.mask_NT,
        rollouts.rewards_N,
        rollouts.group_ids_N,
        logps_NT=student_logps_NT,
        teacher_logps_NT=[teacher_logps_NT],
    )

    # With gradient.
    logps_NT, _ = world.scorer.score(rollouts)
    denominator = loss_denominator(weights.mask_NT, normaliser="groups", group_ids_N=rollouts.group_ids_N)
    loss, _ = distill_surrogate(logps_NT, None, weights.weights_NT, weights.mask_NT, denominator=denominator)
    world.step(loss)

    divergence = weights.metrics["distill/kl_1"]
    print(
        f"step {step:2}  reward {rollouts.rewards_N.mean():5.2f}  KL to the teacher {divergence:.3f} nats a completion"
    )
