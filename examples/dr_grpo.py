"""Dr. GRPO (arXiv 2503.20783) on one page.

Against GRPO: no division by the standard deviation (it favours easy and hard prompts) and a constant denominator
instead of each completion's own length (which favours long wrong answers).
"""

from common import PARAMS, STEPS, setup

from trimtab.objectives import loss_denominator, outcome_weights, surrogate_loss

world = setup(learning_rate=1e-4)

for step in range(1, STEPS + 1):
    rollouts = world.rollout(step)

    # On whole groups, once, without gradient: every token carries its completion's advantage.
    weights = outcome_weights(
        rollouts.completion_ids_NT,
        rollouts.mask_NT,
        rollouts.rewards_N,
        rollouts.group_ids_N,
        baseline="mean",
        normalise="none",
    )

    # With gradient. The policy has not moved since it sampled, so the old log-probabilities are its own (None).
    logps_NT, _ = world.scorer.score(rollouts)
    loss, _ = surrogate_loss(
        logps_NT,
        None,
        weights.weights_NT,
        weights.mask_NT,
        denominator=loss_denominator(weights.mask_NT, normaliser="constant", max_length=PARAMS.max_tokens),
        normaliser="constant",
        clip_low=0.2,
        clip_high=0.2,
    )
    world.step(loss)

    uniform = weights.metrics["frac_reward_zero_std"]
    print(f"step {step:2}  reward {rollouts.rewards_N.mean():5.2f}  groups of equal rewards {uniform:.2f}")
