"""GTPO (Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772) on one page.

Against GRPO: no division by the group's standard deviation, no clip, no KL, no reference model. Tokens that good and
bad completions share at their ends are protected, completions of high entropy are dropped, entropy is penalised.
"""

from common import PARAMS, STEPS, setup

from trimtab.objectives import gtpo_weights, loss_denominator, row_mean, surrogate_loss
from trimtab.seeds import derive_seed

world = setup(learning_rate=1e-4)

# How unsure is the untouched policy? Below ln 2 = 0.69 nats a token the entropy filter is on, else off.
first = world.sampler.sample(world.prompt_ids[:100], 1, PARAMS, derive_seed(0, "initial entropy"))
initial_entropy = float(row_mean(first.entropies_NT, first.mask_NT).mean())
print(f"initial entropy {initial_entropy:.3f} nats a token")

for step in range(1, STEPS + 1):
    rollouts = world.rollout(step)

    # On whole groups, once, without gradient: delta (A - gamma <H>) lambda for every token.
    weights = gtpo_weights(
        rollouts.completion_ids_NT,
        rollouts.mask_NT,
        rollouts.rewards_N,
        rollouts.group_ids_N,
        rollouts.entropies_NT,
        initial_entropy=initial_entropy,
        gamma=0.1,
    )

    # With gradient; could be split over micro-batches, since the denominator is that of the whole batch.
    logps_NT, _ = world.scorer.score(rollouts)
    loss, _ = surrogate_loss(
        logps_NT,
        None,  # one update a rollout: the policy has not moved, the ratio is 1 in value and carries the gradient
        weights.weights_NT,
        weights.mask_NT,
        denominator=loss_denominator(weights.mask_NT, normaliser="rows"),
        normaliser="rows",
    )
    world.step(loss)

    conflicts, kept = weights.metrics["gtpo/conflict_fraction"], weights.metrics["gtpo/kept_fraction"]
    print(
        f"step {step:2}  reward {rollouts.rewards_N.mean():5.2f}  conflicting tokens {conflicts:.2f}  kept {kept:.2f}"
    )
