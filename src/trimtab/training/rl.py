"""Reinforcement learning with a group-relative method: sample, reward, weigh on whole groups, update."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from trimtab.config import RunConfig
from trimtab.objectives import (
    TokenWeights,
    find_method,
    group_advantages,
    loss_denominator,
    pushed_down_groups,
    row_mean,
)
from trimtab.policy.loading import Policy
from trimtab.policy.rollouts import Rollouts
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.policy.scorer import Scorer
from trimtab.seeds import derive_seed
from trimtab.tasks.problems import Prompts
from trimtab.tasks.rewards import RewardPart
from trimtab.tasks.steps import StepScorer, step_tensors
from trimtab.training.batches import micro_batches
from trimtab.training.held_out import evaluate_held_out
from trimtab.training.references import Reference
from trimtab.training.rl_metrics import Total, loss_metrics, rollout_metrics
from trimtab.training.rollout import Batch, RolloutMaker, check_excluded
from trimtab.training.samples import group_samples
from trimtab.training.scoring import score_rollouts, without_dropout
from trimtab.training.stored import StoredCompletions
from trimtab.training.teachers import Teacher, whole_texts

logger = logging.getLogger("trimtab")

INITIAL_ENTROPY_PROMPTS = 100
"""GTPO measures the untouched policy on this many training prompts (arXiv 2508.03772, section 4.3)."""


class GroupRelative:
    """The `Objective` of every method in the registry."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        train: Prompts,
        held_out: Prompts | None,
        rewards: list[RewardPart],
        accelerator: Accelerator,
        *,
        reference: Reference | None = None,
        teachers: Sequence[Teacher] = (),
        stored: StoredCompletions | None = None,
        steps: StepScorer | None = None,
    ) -> None:
        self.config, self.policy, self.train, self.held_out = config, policy, train, held_out
        self.rewards, self.accelerator, self.reference = rewards, accelerator, reference
        self.teachers, self.stored = teachers, stored
        self.method = find_method(config.method["name"])
        self.weights_settings, self.loss_settings = self.method.split(config.method_settings)
        self.sampler = LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id)
        self.scorer = Scorer(policy.model)
        sampling = config.sampling
        self.params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_completion_tokens,
            entropy_temperature=sampling.entropy_temperature,
        )
        self.maker = RolloutMaker(config, policy, train, rewards, self.sampler, self.params, accelerator, stored, steps)
        self.total = Total(accelerator)
        self.initial_entropy: float | None = None
        self.warned = False
        self._metrics: dict[str, float] = {}
        self._batch: Batch | None = None
        self._weights: TokenWeights | None = None

    # What the loop asks for

    def begin(self) -> dict[str, float]:
        """Measure the untouched policy's entropy, once."""
        if not self.method.takes("initial_entropy"):
            return {}
        first = self.train.ids[:INITIAL_ENTROPY_PROMPTS]
        with self.accelerator.autocast():
            rollouts = self.sampler.sample(first, 1, self.params, derive_seed(self.config.seed, "initial entropy"))
        assert rollouts.entropies_NT is not None
        self.initial_entropy = float(row_mean(rollouts.entropies_NT, rollouts.mask_NT).mean())
        return {"initial_entropy": self.initial_entropy}

    def state(self) -> dict[str, Any]:
        """What a resumed run must not measure again."""
        return {"initial_entropy": self.initial_entropy, "warned": self.warned}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up where `state` left."""
        self.initial_entropy, self.warned = state["initial_entropy"], state["warned"]

    def save(self, folder: Path) -> None:
        """Write what does not fit into `state`: a moving reference, the replay buffer."""
        if self.reference is not None:
            self.reference.save(folder)
        if self.stored is not None:
            self.stored.save(folder)

    def load(self, folder: Path) -> None:
        """The opposite."""
        if self.reference is not None:
            self.reference.load(folder)
        if self.stored is not None:
            self.stored.load(folder)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step just done."""
        return self._metrics

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Whole groups of the step just done, with the weight of every token."""
        assert self._batch is not None and self._weights is not None
        return group_samples(
            step,
            self._batch.rollouts,
            self._weights,
            prompts=[self.train.prompts[i] for i in self._batch.owners],
            texts=self._batch.texts,
            sources=self._batch.sources,
            tokenizer=self.policy.tokenizer,
            count=self.config.log.samples,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Sample on the held-out rows; on every process alike."""
        return evaluate_held_out(self.config, self.policy, self.sampler, self.held_out, self.rewards, self.accelerator)

    def updates(self, step: int) -> Iterator[Iterable[Tensor]]:
        """One rollout, then as many optimizer steps on it as configured."""
        self._batch = batch = self.maker.make(step)
        rollouts = batch.rollouts
        self._metrics = rollout_metrics(batch, self.total, stored=self.stored is not None)
        check_excluded(self._metrics["excluded_rows"], self.config.training.max_excluded_rows, step, batch.messages)
        repeats = self.config.training.updates_per_rollout
        supplied = self._fixed_inputs(batch)
        totals: dict[str, float] = {}
        # The policy has not moved at the first update, so its own log-probabilities are the old ones; they are kept
        # for the updates that follow.
        old_logps_NT = torch.zeros(rollouts.mask_NT.shape, device=rollouts.mask_NT.device) if repeats > 1 else None
        for repeat in range(repeats):
            if repeat == 0 or self.method.at_every_update:
                if self._scores_at(repeat):
                    supplied["logps_NT"] = self._score(self.scorer, rollouts)
                    if repeat == 0 and old_logps_NT is not None:
                        # Of all rows: one whose weight is 0 now may have another at the next update.
                        old_logps_NT.copy_(supplied["logps_NT"])
                    if repeat == 0 and self.weights_settings.get("reference") == "rollout":
                        supplied["reference_logps_NT"] = supplied["logps_NT"]
                weights = self.weigh(rollouts, supplied)
                if repeat == 0:
                    self._count_pushed_down(rollouts, weights)
                denominator = self._denominator(rollouts, weights)
            yield self._losses(rollouts, weights, denominator, old_logps_NT, repeat == 0, totals)
        self._metrics |= loss_metrics(totals, self.total, updates=repeats, kl=bool(self.loss_settings.get("beta")))
        if self.reference is not None:
            self.reference.follow()

    # How a step is made

    def _scores_at(self, repeat: int) -> bool:
        """Whether the weights of an update need the policy's log-probabilities.

        GVPO with the sampling policy as its reference does not, as long as the two are the same.
        """
        if not self.method.at_every_update:
            return False
        still_the_same = repeat == 0 and self.config.training.updates_per_rollout == 1
        against_itself = self.weights_settings.get("reference") == "rollout" and "lambdas" not in self.weights_settings
        return not (still_the_same and against_itself)

    def _score(self, scorer: Any, rollouts: Rollouts) -> Tensor:
        with self.accelerator.autocast(), without_dropout(self.policy.model):
            return score_rollouts(
                scorer,
                rollouts,
                temperature=self.params.temperature,
                budget=self.config.training.micro_batch_tokens,
            )

    def _fixed_inputs(self, batch: Batch) -> dict[str, Any]:
        """What the weights need beside the rewards and does not move during the step."""
        supplied: dict[str, Any] = {}
        if batch.steps is not None:
            ends_NS, rewards_NS = step_tensors(batch.steps, batch.rollouts.mask_NT.device)
            supplied |= {"step_ends_NS": ends_NS, "step_rewards_NS": rewards_NS}
        if self.method.takes("reference_logps_NT") and self.reference is not None:
            supplied["reference_logps_NT"] = self._score(self.reference, batch.rollouts)
        if self.teachers:
            prompts = [self.train.prompts[i] for i in batch.owners]
            texts = whole_texts(self.policy.tokenizer, batch.rollouts.completion_lists(), batch.texts)
            budget = self.config.training.micro_batch_tokens
            with self.accelerator.autocast():
                scored = {
                    id(teacher): teacher.score(
                        batch.rollouts, prompts, texts, temperature=self.params.temperature, budget=budget
                    )
                    for teacher in {id(teacher): teacher for teacher in self.teachers}.values()
                }
            supplied["teacher_logps_NT"] = [scored[id(teacher)] for teacher in self.teachers]
        return supplied

    def _denominator(self, rollouts: Rollouts, weights: TokenWeights) -> Tensor:
        share = loss_denominator(
            weights.mask_NT,
            normaliser=self.loss_settings.get("normaliser", "rows"),
            max_length=self.params.max_tokens,
            group_ids_N=rollouts.group_ids_N,
        )
        # At least 1 holds for the whole batch: a process whose rows are all masked adds nothing.
        return self.total.sum(share * weights.mask_NT.any()).clamp(min=1)

    def weigh(self, rollouts: Rollouts, supplied: Mapping[str, Any]) -> TokenWeights:
        """The method's weights, on whole groups."""
        assert rollouts.rewards_N is not None and rollouts.entropies_NT is not None
        supplied = {
            "truncated_N": rollouts.truncated_N,
            "initial_entropy": self.initial_entropy,
            **supplied,
        }
        weights = self.method.weights(
            rollouts.completion_ids_NT,
            rollouts.mask_NT,
            rollouts.rewards_N,
            rollouts.group_ids_N,
            rollouts.entropies_NT,
            **self.method.accepted(supplied),
            **self.weights_settings,
        )
        self._weights = weights
        self._metrics |= {
            key: self.total.largest(value)
            if key.endswith("_max")
            else self.total.average(value, len(rollouts.rewards_N))
            for key, value in weights.metrics.items()
        }
        penalty, advantage = self._metrics.get("gtpo/penalty_abs", 0.0), self._metrics.get("advantage_abs", 0.0)
        if not self.warned and advantage > 0:
            self.warned = True
            if penalty > 0.5 * advantage:
                logger.warning(
                    "gamma times the entropy (%.3g) is more than half the mean |advantage| (%.3g): gamma is in reward "
                    "units per nat and the paper's rewards span 0..20; lower method.gamma or scale the rewards",
                    penalty,
                    advantage,
                )
        return weights

    def _count_pushed_down(self, rollouts: Rollouts, weights: TokenWeights) -> None:
        """GTPO paper, section 4.1: how often a shared token of a good completion is pushed down, before and after."""
        assert rollouts.rewards_N is not None
        advantages_N = group_advantages(rollouts.rewards_N, rollouts.group_ids_N)
        ids_NT, mask_NT = rollouts.completion_ids_NT, rollouts.mask_NT
        for name, weights_NT in (("before", advantages_N[:, None] * mask_NT), ("after", weights.weights_NT)):
            pushed_K, active_K = pushed_down_groups(ids_NT, mask_NT, weights_NT, advantages_N, rollouts.group_ids_N)
            # Groups without a conflict count in neither number: an average over none of them is 0.
            pushed, active = self.total.sum(pushed_K.sum()), self.total.sum(active_K.sum())
            self._metrics[f"pushed_down/{name}"] = float(pushed / active.clamp(min=1))
        self._metrics["pushed_down/active_groups"] = float(active)

    def _losses(
        self,
        rollouts: Rollouts,
        weights: TokenWeights,
        denominator: Tensor,
        old_logps_NT: Tensor | None,
        first: bool,
        totals: dict[str, float],
    ) -> Iterator[Tensor]:
        """Micro-batch losses of one update; rows that cannot matter are left out, the denominator stays."""
        beta = self.loss_settings.get("beta", 0.0)
        matters_NT = weights.mask_NT if beta else weights.weights_NT != 0
        if weights.entropy_weights_NT is not None:
            matters_NT = matters_NT | (weights.entropy_weights_NT != 0)
        rows_M = matters_NT.any(dim=1).nonzero()[:, 0]
        wants_entropy = weights.entropy_weights_NT is not None
        temperature = self.params.temperature
        entropy_temperature = (self.params.entropy_temperature or temperature) if wants_entropy else None
        for part_M in micro_batches(rollouts, rows_M, self.config.training.micro_batch_tokens):
            part = rollouts.select(part_M)
            width = part.mask_NT.shape[1]
            reference_logps_NT = None
            with self.accelerator.autocast():
                if beta and self.reference is not None:
                    with torch.no_grad():
                        reference_logps_NT, _ = self.reference.score(part, temperature=temperature)
                logps_NT, entropies_NT = self.scorer.score(
                    part, temperature=temperature, entropy_temperature=entropy_temperature
                )
            old_NT = None
            if old_logps_NT is not None:
                if first and not self.method.at_every_update:
                    old_logps_NT[part_M, :width] = logps_NT.detach()
                elif not first:
                    old_NT = old_logps_NT[part_M, :width]
            entropy_weights_NT = weights.entropy_weights_NT
            loss, sums = self.method.loss(
                logps_NT,
                old_NT,
                weights.weights_NT[part_M, :width],
                weights.mask_NT[part_M, :width],
                denominator=denominator,
                reference_logps_NT=reference_logps_NT,
                entropies_NT=entropies_NT if wants_entropy else None,
                entropy_weights_NT=None if entropy_weights_NT is None else entropy_weights_NT[part_M, :width],
                **self.loss_settings,
            )
            for key, value in {"loss": loss.detach(), **sums}.items():
                totals[key] = totals.get(key, 0.0) + float(value)
            yield loss
