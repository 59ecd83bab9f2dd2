"""Supervised fine-tuning on one page: the mean negative log-likelihood of given completions, end token included."""

import torch
from common import PROMPTS, STEPS, setup

from trimtab.policy.rollouts import Rollouts, pad_left, pad_right

world = setup(learning_rate=1e-4)
tokenizer = world.policy.tokenizer
targets = [
    [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id] for row in world.rows
]

for step in range(1, STEPS + 1):
    chosen = range((step - 1) * PROMPTS, step * PROMPTS)
    prompt_ids_PL, prompt_mask_PL = pad_left([world.prompt_ids[i] for i in chosen], world.policy.pad_id)
    completion_ids_NT, mask_NT = pad_right([targets[i] for i in chosen], world.policy.pad_id)

    # Given completions in the shape of sampled ones, so that the same scorer serves both.
    given = Rollouts(
        prompt_ids_PL,
        prompt_mask_PL,
        completion_ids_NT,
        mask_NT,
        group_ids_N=torch.arange(PROMPTS),
        truncated_N=torch.zeros(PROMPTS, dtype=torch.bool),
    )
    logps_NT, _ = world.scorer.score(given)
    loss = -logps_NT.sum() / mask_NT.sum()
    world.step(loss)
    print(f"step {step:2}  loss {loss.item():.3f} nats a token")
