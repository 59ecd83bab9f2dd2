"""GRPO with process rewards (arXiv 2402.03300, section 4.1.3) on one page.

Against GRPO: every equation of the reasoning is a step with a reward of its own. The steps of all completions of a
group are one pool, and a token answers for the steps that end at it or after it.
"""

from common import STEPS, setup

from trimtab.objectives import loss_denominator, process_weights, surrogate_loss
from trimtab.tasks.steps import load_step_scorer, score_steps, step_tensors

world = setup(learning_rate=5e-5)
scorer = load_step_scorer("arithmetic")

for step in range(1, STEPS + 1):
    rollouts = world.rollout(step)
    ids = rollouts.completion_lists()
    texts = world.policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    table = score_steps(scorer, texts, texts, ids, {}, tokenizer=world.policy.tokenizer)
    ends_NS, step_rewards_NS = step_tensors(table, rollouts.mask_NT.device)

    # On whole groups, once, without gradient. The outcome is the last step, on the scale of the others.
    weights = process_weights(
        rollouts.completion_ids_NT,
        rollouts.mask_NT,
        rollouts.rewards_N / 20.0,
        rollouts.group_ids_N,
        step_ends_NS=ends_NS,
        step_rewards_NS=step_rewards_NS,
    )

    # With gradient. The policy has not moved since it sampled, so the old log-probabilities are its own (None).
    logps_NT, _ = world.scorer.score(rollouts)
    loss, _ = surrogate_loss(
        logps_NT,
        None,
        weights.weights_NT,
        weights.mask_NT,
        denominator=loss_denominator(weights.mask_NT),
        clip_low=0.2,
        clip_high=0.2,
    )
    world.step(loss)

    right = weights.metrics["process/step_reward"]
    print(f"step {step:2}  reward {rollouts.rewards_N.mean():5.2f}  equations that hold {right:.2f}")
