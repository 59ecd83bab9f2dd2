"""A step's completions: sampled now, stored earlier, or both in one group, with what they earned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trimtab.config import RunConfig
from trimtab.errors import RunError
from trimtab.policy.loading import Policy
from trimtab.policy.rollouts import Rollouts
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.seeds import derive_seed
from trimtab.tasks.problems import Prompts
from trimtab.tasks.rewards import RewardPart, RewardTable, score_completions
from trimtab.tasks.steps import StepScorer, StepTable, score_steps
from trimtab.training.batches import step_rows
from trimtab.training.stored import Stored, StoredCompletions, join_rollouts


@dataclass(frozen=True)
class Batch:
    """One process's share of a step.

    Attributes:
        rollouts: whole groups with rewards; fresh rows first.
        texts: each row's completion as the reward functions saw it.
        owners: each row's training prompt.
        sources: where each row comes from: `fresh`, `replay`, or what its file says.
        fresh: how many rows were sampled now.
        failures: calls of reward functions that failed.
        messages: why, the first few.
        steps: the steps of every row, for a method of process rewards.
    """

    rollouts: Rollouts
    texts: list[str]
    owners: list[int]
    sources: list[str]
    fresh: int
    failures: int
    messages: list[str]
    steps: StepTable | None = None


class RolloutMaker:
    """Makes the batches of a run."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        train: Prompts,
        rewards: list[RewardPart],
        sampler: LocalSampler,
        params: SamplingParams,
        accelerator: Accelerator,
        stored: StoredCompletions | None,
        steps: StepScorer | None,
    ) -> None:
        self.config, self.policy, self.train, self.rewards = config, policy, train, rewards
        self.sampler, self.params, self.accelerator = sampler, params, accelerator
        self.stored, self.steps = stored, steps

    def make(self, step: int) -> Batch:
        """Sample this process's share of the step's prompts, join what is stored of them, and reward all of it."""
        config = self.config
        rows = step_rows(len(self.train), config.prompts_per_step, step, config.seed)
        share = len(rows) // self.accelerator.num_processes
        start = self.accelerator.process_index * share
        prompts = rows[start : start + share]
        count = config.fresh_per_group
        fresh = None
        if count:
            with self.accelerator.autocast():
                fresh = self.sampler.sample(
                    [self.train.ids[i] for i in prompts],
                    count,
                    self.params,
                    derive_seed(config.seed, step, "rollout"),
                    first_row=start * count,
                )
        extra: list[list[Stored]] = [[] for _ in prompts]
        if self.stored is not None:
            wanted = config.sampling.group_size - count
            extra = [
                self.stored.take(prompt, wanted, derive_seed(config.seed, step, "stored", prompt)) for prompt in prompts
            ]
        rollouts = fresh
        if rollouts is None or any(extra):
            rollouts = join_rollouts(fresh, [self.train.ids[i] for i in prompts], extra, pad_id=self.policy.pad_id)
            rollouts = rollouts.to(self.policy.device)
        batch = self._reward(rollouts, prompts, [row for own in extra for row in own])
        if self.steps is not None:
            batch = self._score_steps(batch, self.steps)
        if self.stored is not None and self.stored.settings.replay:
            self._keep(batch)
        return batch

    def _reward(self, rollouts: Rollouts, prompts: Sequence[int], stored: Sequence[Stored]) -> Batch:
        """Judge the rows that bring no reward of their own."""
        owners = [prompts[group] for group in rollouts.group_ids_N.tolist()]
        completion_ids = rollouts.completion_lists()
        fresh = len(owners) - len(stored)
        texts = self.policy.tokenizer.batch_decode(completion_ids[:fresh], skip_special_tokens=True)
        texts += [row.text for row in stored]
        brought: list[float | None] = [*([None] * fresh), *(row.reward for row in stored)]
        judged = [row for row, reward in enumerate(brought) if reward is None]
        table = self._judge(judged, owners, texts, completion_ids)
        totals = dict(zip(judged, table.total, strict=True))
        parts = {name: dict(zip(judged, values, strict=True)) for name, values in table.parts.items()}
        device = rollouts.mask_NT.device

        def column(values: dict[int, float]) -> torch.Tensor:
            return torch.tensor([values.get(row, torch.nan) for row in range(len(owners))], device=device)

        totals |= {row: reward for row, reward in enumerate(brought) if reward is not None}
        rewarded = replace(
            rollouts,
            rewards_N=column(totals),
            reward_parts={name: column(values) for name, values in parts.items()},
        )
        sources = ["fresh"] * fresh + [row.source for row in stored]
        return Batch(rewarded, texts, owners, sources, fresh, sum(table.failures.values()), table.messages)

    def _judge(self, rows: list[int], owners: list[int], texts: list[str], ids: list[list[int]]) -> RewardTable:
        if not self.rewards:
            return RewardTable({}, [0.0] * len(rows), {})
        return score_completions(
            self.rewards,
            [self.train.prompts[owners[row]] for row in rows],
            [texts[row] for row in rows],
            [ids[row] for row in rows],
            {name: [self.train.rows[owners[row]].get(name) for row in rows] for name in self.train.columns},
        )

    def _score_steps(self, batch: Batch, scorer: StepScorer) -> Batch:
        """Score the steps; a row that the scorer failed on has no reward either."""
        assert batch.rollouts.rewards_N is not None
        owners = batch.owners
        table = score_steps(
            scorer,
            [self.train.prompts[i] for i in owners],
            batch.texts,
            batch.rollouts.completion_lists(),
            {name: [self.train.rows[i].get(name) for i in owners] for name in self.train.columns},
            tokenizer=self.policy.tokenizer,
        )
        failed_N = torch.tensor(table.failed, device=batch.rollouts.mask_NT.device)
        rewards_N = batch.rollouts.rewards_N.masked_fill(failed_N, torch.nan)
        return replace(
            batch,
            rollouts=replace(batch.rollouts, rewards_N=rewards_N),
            failures=batch.failures + sum(table.failed),
            messages=[*batch.messages, *table.messages],
            steps=table,
        )

    def _keep(self, batch: Batch) -> None:
        """Put the fresh rows of all processes into the replay buffer, which is the same on each of them."""
        assert self.stored is not None and batch.rollouts.rewards_N is not None
        ids, rewards = batch.rollouts.completion_lists(), batch.rollouts.rewards_N.tolist()
        truncated: list[bool] = batch.rollouts.truncated_N.tolist()
        kept = [
            (batch.owners[row], Stored(ids[row], batch.texts[row], rewards[row], truncated[row], "replay"))
            for row in range(batch.fresh)
            if math.isfinite(rewards[row])
        ]
        if self.accelerator.num_processes > 1:
            # The prompt may return on another process, and one process alone writes the checkpoint.
            kept = gather_object(kept)
        for prompt, stored in kept:
            self.stored.add(prompt, stored)


def check_excluded(excluded: float, limit: float, step: int, messages: Sequence[Any]) -> None:
    """Raise RunError when more than `limit` (a share) of the rows got no reward."""
    if excluded > limit:
        reasons = "; ".join(messages) or "every reward was None"
        raise RunError(
            f"step {step}: {excluded:.0%} of the completions got no reward, more than training.max_excluded_rows = "
            f"{limit:.0%} allows ({reasons})"
        )
