"""What the example scripts share: the warm start, the built-in task, one rollout with rewards, one optimizer step."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from trimtab.policy.loading import Policy, encode_prompt, load_policy
from trimtab.policy.rollouts import Rollouts
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.policy.scorer import Scorer
from trimtab.seeds import derive_seed
from trimtab.tasks.arithmetic import make_rows
from trimtab.tasks.rewards import load_rewards, score_completions

SEED = 0
STEPS = 20
PROMPTS = 8
GROUP_SIZE = 8
PARAMS = SamplingParams(temperature=1.0, max_tokens=96)


@dataclass
class World:
    """Everything a script needs."""

    policy: Policy
    sampler: LocalSampler
    scorer: Scorer
    optimizer: torch.optim.Optimizer
    rows: list[dict[str, Any]]
    prompt_ids: list[list[int]]

    def rollout(self, step: int) -> Rollouts:
        """Sample a group for each of the step's prompts and reward every completion (format 0..10, accuracy 0..10)."""
        chosen = range((step - 1) * PROMPTS, step * PROMPTS)
        seed = derive_seed(SEED, step, "rollout")
        rollouts = self.sampler.sample([self.prompt_ids[i] for i in chosen], GROUP_SIZE, PARAMS, seed)
        owners = [i for i in chosen for _ in range(GROUP_SIZE)]
        ids = rollouts.completion_lists()
        texts = self.policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
        columns = {key: [self.rows[i][key] for i in owners] for key in self.rows[0]}
        table = score_completions(load_rewards("paper"), columns["prompt"], texts, ids, columns)
        return replace(rollouts, rewards_N=torch.tensor(table.total))

    def step(self, loss: torch.Tensor) -> None:
        """One optimizer step, the gradient's norm clipped at 1."""
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), 1.0)
        self.optimizer.step()


def setup(learning_rate: float) -> World:
    """The warm start and enough problems for every step."""
    policy = load_policy("builtin:arithmetic-varied")
    rows = make_rows(STEPS * PROMPTS, seed=SEED)
    return World(
        policy,
        LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id),
        Scorer(policy.model),
        torch.optim.AdamW(policy.model.parameters(), lr=learning_rate, weight_decay=0.0),
        rows,
        [encode_prompt(policy.tokenizer, row["prompt"]) for row in rows],
    )
