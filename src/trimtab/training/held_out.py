"""Evaluation while a run trains, the same for every kind of run."""

from __future__ import annotations

from accelerate import Accelerator

from trimtab.config import RunConfig
from trimtab.evaluation.during import evaluate_policy
from trimtab.policy.loading import Policy
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.seeds import derive_seed
from trimtab.tasks.problems import Prompts
from trimtab.tasks.rewards import RewardPart


def evaluate_held_out(
    config: RunConfig,
    policy: Policy,
    sampler: LocalSampler,
    held_out: Prompts | None,
    rewards: list[RewardPart],
    accelerator: Accelerator,
) -> dict[str, float]:
    """Sample on the held-out rows, on every process alike; empty when there are none.

    The draws are the same at every evaluation: what differs between two is the policy alone.
    """
    if held_out is None:
        return {}
    settings, sampling = config.evaluation, config.sampling
    with accelerator.autocast():
        return evaluate_policy(
            sampler,
            policy.tokenizer,
            held_out.rows,
            held_out.prompts,
            held_out.ids,
            rewards,
            samples=settings.samples,
            k=settings.k,
            params=SamplingParams(
                temperature=settings.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_completion_tokens,
            ),
            seed=derive_seed(config.seed, "evaluation"),
            rows_at_once=settings.rows_at_once,
        )
