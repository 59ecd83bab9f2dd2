"""Evaluation while a policy trains: sampled accuracy, pass@k, format, entropy and length on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trimtab.evaluation.metrics import mean_pass_at_k
from trimtab.objectives import row_mean
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.tasks.rewards import RewardPart, has_full_format, score_completions
from trimtab.tasks.verify import verify_all


def evaluate_policy(
    sampler: LocalSampler,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    rewards: Sequence[RewardPart],
    *,
    samples: int,
    k: Sequence[int],
    params: SamplingParams,
    seed: int,
    rows_at_once: int = 512,
) -> dict[str, float]:
    """Sample `samples` completions of each prompt and judge them.

    Returns:
        `eval/reward`, `eval/rewards/NAME/mean`, `eval/format` (share of completions in the paper's format),
        `eval/entropy` (mean over completions of the mean over tokens, nats), `eval/mean_length` (tokens),
        `eval/truncated`; with an `answer` column also `eval/accuracy` (mean over problems of the share of right
        completions) and `eval/pass@K`. Problems whose gold cannot be parsed are left out and counted in
        `eval/unparsable_gold`.
    """
    verdicts: list[list[bool]] = []
    columns: dict[str, list[float]] = {}
    unparsable = 0
    at_once = max(1, rows_at_once // samples)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for start in range(0, len(rows), at_once):
        chunk = range(start, min(start + at_once, len(rows)))
        rollouts = sampler.sample([prompt_ids[i] for i in chunk], samples, params, seed, first_row=start * samples)
        texts = tokenizer.batch_decode(rollouts.completion_lists(), skip_special_tokens=True)
        owners = [i for i in chunk for _ in range(samples)]
        table = score_completions(
            rewards,
            [prompts[i] for i in owners],
            texts,
            rollouts.completion_lists(),
            {name: [rows[i].get(name) for i in owners] for name in names},
        )
        assert rollouts.entropies_NT is not None
        columns.setdefault("entropy", []).extend(row_mean(rollouts.entropies_NT, rollouts.mask_NT).tolist())
        columns.setdefault("mean_length", []).extend(rollouts.mask_NT.sum(dim=1).float().tolist())
        columns.setdefault("truncated", []).extend(rollouts.truncated_N.float().tolist())
        columns.setdefault("format", []).extend(float(has_full_format(text)) for text in texts)
        columns.setdefault("reward", []).extend(table.total)
        for name, values in table.parts.items():
            columns.setdefault(f"rewards/{name}/mean", []).extend(values)
        if "answer" in names:
            verdicts_N = verify_all(golds=[rows[i].get("answer") for i in owners], predictions=texts)
            for place in range(len(chunk)):
                judged = verdicts_N[place * samples : (place + 1) * samples]
                if None in judged:
                    unparsable += 1
                else:
                    verdicts.append([bool(verdict) for verdict in judged])
    result = {f"eval/{name}": _mean(values) for name, values in columns.items()}
    if verdicts:
        result["eval/accuracy"] = _mean([sum(v) / len(v) for v in verdicts])
        for size in k:
            value = mean_pass_at_k(verdicts, size)
            if value is not None:
                result[f"eval/pass@{size}"] = value
    if unparsable:
        result["eval/unparsable_gold"] = float(unparsable)
    return result


def _mean(values: Sequence[float]) -> float:
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan
