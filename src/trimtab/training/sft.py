"""Supervised fine-tuning: the mean negative log-likelihood of given completions, over all tokens of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from trimtab.config import RunConfig
from trimtab.errors import InputError
from trimtab.policy.loading import Policy
from trimtab.policy.rollouts import Rollouts, pad_left, pad_right
from trimtab.policy.sampler import LocalSampler
from trimtab.policy.scorer import Scorer
from trimtab.tasks.problems import Prompts
from trimtab.tasks.rewards import RewardPart
from trimtab.training.batches import micro_batches, step_rows
from trimtab.training.held_out import evaluate_held_out


class SupervisedFineTuning:
    """The `Objective` of `method: sft`: rows need a `completion` column; the end token is learnt too."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        train: Prompts,
        held_out: Prompts | None,
        rewards: list[RewardPart],
        accelerator: Accelerator,
        *,
        completions: list[list[int]],
    ) -> None:
        self.config, self.policy, self.train, self.held_out = config, policy, train, held_out
        self.rewards, self.accelerator = rewards, accelerator
        self.scorer = Scorer(policy.model)
        self.sampler = LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id)
        end = policy.tokenizer.eos_token_id
        end = end if end is not None else policy.end_ids[0]
        self.completions = [[*ids, end] for ids in completions]
        self._metrics: dict[str, float] = {}
        self._rows: list[int] = []

    def begin(self) -> dict[str, float]:
        """Nothing to measure."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing to remember: the order of the rows follows from the seed."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""

    def save(self, folder: Path) -> None:
        """Nothing else."""

    def load(self, folder: Path) -> None:
        """Nothing else."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the step just done."""
        return self._metrics

    def samples(self, step: int) -> list[dict[str, Any]]:
        """A few of the step's rows."""
        chosen = self._rows[: self.config.log.samples]
        rows = self.train.rows
        return [{"step": step, "prompt": self.train.prompts[i], "completion": rows[i]["completion"]} for i in chosen]

    def evaluate(self, step: int) -> dict[str, float]:
        """Sample on the held-out rows and judge, as in reinforcement learning."""
        return evaluate_held_out(self.config, self.policy, self.sampler, self.held_out, self.rewards, self.accelerator)

    def updates(self, step: int) -> Iterator[Iterable[Tensor]]:
        """One optimizer step on the step's rows."""
        accelerator = self.accelerator
        rows = step_rows(len(self.train), self.config.training.batch_size, step, self.config.seed)
        self._rows = rows[accelerator.process_index :: accelerator.num_processes]
        rollouts = supervised_rollouts(
            [self.train.ids[i] for i in self._rows], [self.completions[i] for i in self._rows], self.policy
        )
        tokens = accelerator.reduce(rollouts.mask_NT.sum(), "sum")
        totals = torch.zeros((), dtype=torch.float64)
        yield self._losses(rollouts, float(tokens), totals)
        loss = float(accelerator.reduce(totals.to(self.policy.device), "sum"))
        self._metrics = {"loss": loss, "completions/mean_length": float(tokens) / len(rows)}

    def _losses(self, rollouts: Rollouts, tokens: float, totals: Tensor) -> Iterator[Tensor]:
        rows_M = torch.arange(rollouts.mask_NT.shape[0], device=rollouts.mask_NT.device)
        for part_M in micro_batches(rollouts, rows_M, self.config.training.micro_batch_tokens):
            with self.accelerator.autocast():
                logps_NT, _ = self.scorer.score(rollouts.select(part_M))
            loss = -logps_NT.sum() / tokens
            totals += loss.detach().double().cpu()
            yield loss


def encode_completions(train: Prompts, tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Completion ids, without the end token.

    Raises:
        InputError: a completion is no text, or with its end token longer than `max_tokens`.
    """
    encoded = []
    for number, row in zip(train.numbers, train.rows, strict=True):
        text = row["completion"]
        if not isinstance(text, str):
            raise InputError(f"row {number}: the completion is a {type(text).__name__}; it must be text")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) + 1 > max_tokens:
            raise InputError(
                f"row {number}: the completion has {len(ids) + 1} tokens with its end, more than "
                f"sampling.max_completion_tokens = {max_tokens}; raise it or shorten the row"
            )
        encoded.append(ids)
    return encoded


def supervised_rollouts(prompts: list[list[int]], completions: list[list[int]], policy: Policy) -> Rollouts:
    """Given completions in the shape of sampled ones, one group a row."""
    prompt_ids_PL, prompt_mask_PL = pad_left(prompts, policy.pad_id)
    completion_ids_NT, mask_NT = pad_right(completions, policy.pad_id)
    rows = len(prompts)
    return Rollouts(
        prompt_ids_PL, prompt_mask_PL, completion_ids_NT, mask_NT, torch.arange(rows), torch.zeros(rows).bool()
    ).to(policy.device)
