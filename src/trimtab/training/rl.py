"""Reinforcement learning with a group-relative method: sample, reward, weigh on whole groups, update."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from trimtab.config import RunConfig
from trimtab.errors import RunError
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
from trimtab.tasks.rewards import RewardPart, score_completions
from trimtab.training.batches import micro_batches, step_rows
from trimtab.training.held_out import evaluate_held_out
from trimtab.training.samples import group_samples

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
        reference: Scorer | None = None,
    ) -> None:
        self.config, self.policy, self.train, self.held_out = config, policy, train, held_out
        self.rewards, self.accelerator, self.reference = rewards, accelerator, reference
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
        self.initial_entropy: float | None = None
        self.warned = False
        self._metrics: dict[str, float] = {}
        self._last: tuple[Rollouts, list[str], list[int]] | None = None
        self._weights: TokenWeights | None = None

    # What the loop asks for

    def begin(self) -> dict[str, float]:
        """Measure the untouched policy's entropy, once."""
        if not self._takes("initial_entropy"):
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

    def metrics(self) -> dict[str, float]:
        """Metrics of the step just done."""
        return self._metrics

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Whole groups of the step just done, with the weight of every token."""
        assert self._last is not None and self._weights is not None
        rollouts, texts, owners = self._last
        return group_samples(
            step,
            rollouts,
            self._weights,
            prompts=[self.train.prompts[i] for i in owners],
            texts=texts,
            tokenizer=self.policy.tokenizer,
            count=self.config.log.samples,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Sample on the held-out rows; on every process alike."""
        return evaluate_held_out(self.config, self.policy, self.sampler, self.held_out, self.rewards, self.accelerator)

    def updates(self, step: int) -> Iterator[Iterable[Tensor]]:
        """One rollout, then as many optimizer steps on it as configured."""
        rollouts = self.rollout(step)
        weights = self.weigh(rollouts)
        share = loss_denominator(
            weights.mask_NT,
            normaliser=self.loss_settings.get("normaliser", "rows"),
            max_length=self.params.max_tokens,
        )
        # At least 1 holds for the whole batch: a process whose rows are all masked adds nothing.
        denominator = self._sum(share * weights.mask_NT.any()).clamp(min=1)
        repeats = self.config.training.updates_per_rollout
        totals: dict[str, float] = {}
        # The policy has not moved at the first update, so its own log-probabilities are the old ones; they are kept
        # for the updates that follow.
        old_logps_NT = torch.zeros_like(weights.weights_NT) if repeats > 1 else None
        for repeat in range(repeats):
            yield self._losses(rollouts, weights, denominator, old_logps_NT, repeat == 0, totals)
        self._metrics |= self._loss_metrics(totals)

    # How a step is made

    def rollout(self, step: int) -> Rollouts:
        """Sample this process's share of the step's prompts and score the completions."""
        config, accelerator = self.config, self.accelerator
        rows = step_rows(len(self.train), config.prompts_per_step, step, config.seed)
        share = len(rows) // accelerator.num_processes
        start = accelerator.process_index * share
        owners = rows[start : start + share]
        size = config.sampling.group_size
        with accelerator.autocast():
            rollouts = self.sampler.sample(
                [self.train.ids[i] for i in owners],
                size,
                self.params,
                derive_seed(config.seed, step, "rollout"),
                first_row=start * size,
            )
        per_row = [i for i in owners for _ in range(size)]
        completion_ids = rollouts.completion_lists()
        texts = self.policy.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        table = score_completions(
            self.rewards,
            [self.train.prompts[i] for i in per_row],
            texts,
            completion_ids,
            {name: [self.train.rows[i].get(name) for i in per_row] for name in self.train.columns},
        )
        device = rollouts.mask_NT.device
        rollouts = replace(
            rollouts,
            rewards_N=torch.tensor(table.total, dtype=torch.float32, device=device),
            reward_parts={n: torch.tensor(v, dtype=torch.float32, device=device) for n, v in table.parts.items()},
        )
        self._last = (rollouts, texts, per_row)
        self._metrics = self._rollout_metrics(rollouts, sum(table.failures.values()))
        excluded = self._metrics["excluded_rows"]
        if excluded > config.training.max_excluded_rows:
            reasons = "; ".join(table.messages) or "every reward was None"
            raise RunError(
                f"step {step}: {excluded:.0%} of the completions got no reward, more than training.max_excluded_rows = "
                f"{config.training.max_excluded_rows:.0%} allows ({reasons})"
            )
        return rollouts

    def weigh(self, rollouts: Rollouts) -> TokenWeights:
        """The method's weights, on whole groups, once a rollout."""
        assert rollouts.rewards_N is not None and rollouts.entropies_NT is not None
        supplied = {"truncated_N": rollouts.truncated_N, "initial_entropy": self.initial_entropy}
        weights = self.method.weights(
            rollouts.completion_ids_NT,
            rollouts.mask_NT,
            rollouts.rewards_N,
            rollouts.group_ids_N,
            rollouts.entropies_NT,
            **{key: value for key, value in supplied.items() if self._takes(key)},
            **self.weights_settings,
        )
        self._weights = weights
        self._metrics |= {key: self._average(value) for key, value in weights.metrics.items()}
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
        advantages_N = group_advantages(rollouts.rewards_N, rollouts.group_ids_N)
        ids_NT, mask_NT = rollouts.completion_ids_NT, rollouts.mask_NT
        for name, weights_NT in (("before", advantages_N[:, None] * mask_NT), ("after", weights.weights_NT)):
            pushed_K, active_K = pushed_down_groups(ids_NT, mask_NT, weights_NT, advantages_N, rollouts.group_ids_N)
            # Groups without a conflict count in neither number: an average over none of them is 0.
            pushed, active = self._sum(pushed_K.sum()), self._sum(active_K.sum())
            self._metrics[f"pushed_down/{name}"] = float(pushed / active.clamp(min=1))
        self._metrics["pushed_down/active_groups"] = float(active)
        return weights

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
                if first:
                    old_logps_NT[part_M, :width] = logps_NT.detach()
                else:
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

    # Numbers over all processes

    def _rollout_metrics(self, rollouts: Rollouts, failures: int) -> dict[str, float]:
        assert rollouts.rewards_N is not None and rollouts.entropies_NT is not None
        rewards_N = rollouts.rewards_N
        valid_N = rewards_N.isfinite()
        lengths_N = rollouts.mask_NT.sum(dim=1).float()
        total = float(self._sum(valid_N.sum()))
        mean = float(self._sum(rewards_N.where(valid_N, 0.0).sum())) / total if total else math.nan
        spread = float(self._sum((rewards_N.where(valid_N, mean) - mean).square().sum()))
        metrics = {
            "reward": mean,
            "reward_std": math.sqrt(spread / max(1.0, total - 1)),
            "entropy": self._average(row_mean(rollouts.entropies_NT, rollouts.mask_NT).mean()),
            "completions/mean_length": self._average(lengths_N.mean()),
            "completions/clipped_ratio": self._average(rollouts.truncated_N.float().mean()),
            "excluded_rows": self._average((~valid_N).float().mean()),
            "reward_failures": float(self._sum(torch.tensor(float(failures), device=rewards_N.device))),
        }
        for name, part_N in rollouts.reward_parts.items():
            applies_N = part_N.isfinite()
            count = float(self._sum(applies_N.sum()))
            summed = float(self._sum(part_N.where(applies_N, 0.0).sum()))
            metrics[f"rewards/{name}/mean"] = summed / count if count else math.nan
        return metrics

    def _loss_metrics(self, totals: dict[str, float]) -> dict[str, float]:
        # Processes may hold different keys (a rank without a row that matters has none), so the list is fixed.
        keys = ("loss", "tokens", "clipped", "ratio", "kl_old", "kl")
        values = self._sum(torch.tensor([totals.get(k, 0.0) for k in keys], dtype=torch.float64, device=self._device))
        summed = dict(zip(keys, values.tolist(), strict=True))
        # Nothing was scored in a step of nothing but equal rewards: there is no ratio to speak of.
        tokens = summed["tokens"] or math.nan
        result = {
            "loss": summed["loss"] / self.config.training.updates_per_rollout,
            "clip_ratio": summed["clipped"] / tokens,
            "ratio": summed["ratio"] / tokens,
            "kl_old": summed["kl_old"] / tokens,
        }
        if self.loss_settings.get("beta"):
            result["kl"] = summed["kl"] / tokens
        return result

    @property
    def _device(self) -> torch.device:
        return self.policy.device

    def _takes(self, name: str) -> bool:
        return name in inspect.signature(self.method.weights).parameters

    def _sum(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value, "sum") if self.accelerator.num_processes > 1 else value  # type: ignore[return-value]

    def _average(self, value: Tensor) -> float:
        return float(self._sum(value)) / self.accelerator.num_processes
