"""GTPO's own arithmetic (conflict masks, entropy filter, entropy penalty) is below 1 % of a training step.

How it is measured: a small random Llama samples 4 prompts x G completions of a fixed length with this package's
sampler; a step is that sampling, scoring with gradient, the loss, the backward pass and a fused AdamW update.
`gtpo_weights` is timed on the rollouts of the very step. All repetitions run in one process, the parts taking turns, in
CPU seconds of the process; numbers are medians. The completions share a prefix and a suffix, as real ones share their
tags, so the masks are not empty.

The arithmetic does not depend on the model, and this model is far smaller than a real one, whose step makes the share
smaller still. `pushed_down_groups`, the diagnostic that training logs twice a step, is shown apart. The second table is
the arithmetic alone, up to 4096 tokens, with the growth of its time over the growth of the tokens.
The last line is `share_of_step=...`, the largest median share, as a fraction.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.objectives import gtpo_weights, loss_denominator, pushed_down_groups, surrogate_loss
from trimtab.policy.rollouts import Rollouts
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.policy.scorer import Scorer

PROMPTS, PROMPT_LENGTH = 4, 32
GROUPS, LENGTHS, LONG = (8, 16, 32, 64), (64, 128, 256, 512), (64, 256, 1024, 4096)
VOCABULARY = 512
SHARED = 8


def make_model(positions: int) -> nn.Module:
    """Llama, 0.7 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config)


def with_shared_ends(ids_NT: Tensor) -> Tensor:
    """The same ids with the first and the last `SHARED` tokens equal in all rows."""
    ids_NT = ids_NT.clone()
    ids_NT[:, :SHARED] = ids_NT[:, -SHARED:] = torch.arange(SHARED)
    return ids_NT


def made_up_rollouts(group: int, length: int) -> Rollouts:
    """Rollouts without a model, for the arithmetic alone."""
    rows = PROMPTS * group
    return Rollouts(
        prompt_ids_PL=torch.ones(PROMPTS, 1, dtype=torch.long),
        prompt_mask_PL=torch.ones(PROMPTS, 1, dtype=torch.bool),
        completion_ids_NT=with_shared_ends(torch.randint(VOCABULARY, (rows, length))),
        mask_NT=torch.ones(rows, length, dtype=torch.bool),
        group_ids_N=torch.arange(PROMPTS).repeat_interleave(group),
        truncated_N=torch.zeros(rows, dtype=torch.bool),
        entropies_NT=torch.rand(rows, length),
        rewards_N=torch.rand(rows).round(decimals=1),
    )


def weigh(rollouts: Rollouts) -> Tensor:
    """All of GTPO before the loss; the filter is on, with a threshold that a random model passes."""
    assert rollouts.rewards_N is not None
    return gtpo_weights(
        rollouts.completion_ids_NT,
        rollouts.mask_NT,
        rollouts.rewards_N,
        rollouts.group_ids_N,
        rollouts.entropies_NT,
        entropy_filter="on",
        entropy_threshold=10.0,
    ).weights_NT


def diagnose(rollouts: Rollouts, weights_NT: Tensor) -> None:
    """The diagnostic, as often as training calls it."""
    for _ in range(2):
        pushed_down_groups(
            rollouts.completion_ids_NT,
            rollouts.mask_NT,
            weights_NT,
            weights_NT.sum(dim=1),
            rollouts.group_ids_N,
        )


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """CPU seconds of a call, and its result."""
    started = time.process_time()
    result = function(*arguments)
    return time.process_time() - started, result


def steps(group: int, length: int, repetitions: int) -> Iterator[tuple[float, float, float]]:
    """CPU seconds of each repetition: the step without GTPO's arithmetic, the arithmetic, the diagnostic."""
    model = make_model(PROMPT_LENGTH + length).train()
    sampler, scorer = LocalSampler(model, end_ids=[VOCABULARY], pad_id=0), Scorer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT_LENGTH)).tolist()

    def sample() -> Rollouts:
        return sampler.sample(prompts, group, SamplingParams(max_tokens=length), seed=0)

    def update(rollouts: Rollouts, weights_NT: Tensor) -> None:
        optimizer.zero_grad()
        # 16,384 tokens at a time, as training does by default.
        for part_M in torch.arange(weights_NT.shape[0]).split(max(1, 16384 // length)):
            part = rollouts.select(part_M)
            logps_NT, _ = scorer.score(part)
            denominator = loss_denominator(rollouts.mask_NT)
            surrogate_loss(logps_NT, None, weights_NT[part_M], part.mask_NT, denominator=denominator)[0].backward()
        optimizer.step()

    for repetition in range(1 + repetitions):
        sampling, rollouts = timed(sample)
        rewards_N = torch.rand(PROMPTS * group).round(decimals=1)
        ids_NT = with_shared_ends(rollouts.completion_ids_NT)
        rollouts = replace(rollouts, completion_ids_NT=ids_NT, rewards_N=rewards_N)
        arithmetic, weights_NT = timed(weigh, rollouts)
        diagnostic, _ = timed(diagnose, rollouts, weights_NT)
        updating, _ = timed(update, rollouts, weights_NT)
        if repetition:
            yield sampling + updating, arithmetic, diagnostic


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="groups of 8 and 64, up to 256 tokens")
    parser.add_argument("--repetitions", type=int, help="default 3; quick: 2")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    groups, lengths = ((8, 64), (64, 256)) if options.quick else (GROUPS, LENGTHS)
    repetitions = options.repetitions or (2 if options.quick else 3)

    largest = 0.0
    print("group  tokens    step, ms   gtpo, ms    share   diagnostic, ms")
    for group in groups:
        for length in lengths:
            runs = list(steps(group, length, repetitions))
            step, arithmetic, diagnostic = (1000 * statistics.median(values) for values in zip(*runs, strict=True))
            share = statistics.median(gtpo / (rest + gtpo) for rest, gtpo, _ in runs)
            largest = max(largest, share)
            line = f"{group:5}{length:8}{step + arithmetic:12.0f}{arithmetic:11.2f}{share:9.2%}{diagnostic:17.2f}"
            print(line, flush=True)

    print("\nThe arithmetic alone, ms, and the growth of time over the growth of tokens from the column before")
    print("group" + "".join(f"{length:>9} tokens" for length in LONG))
    for group in groups:
        inputs = [made_up_rollouts(group, length) for length in LONG]
        for rollouts in inputs:
            weigh(rollouts)
        # Lengths take turns, so that whatever else the machine does falls on all of them.
        rounds = [[timed(weigh, rollouts)[0] for rollouts in inputs] for _ in range(2 * repetitions + 1)]
        times = [1000 * statistics.median(column) for column in zip(*rounds, strict=True)]
        cells = [f"{times[0]:16.2f}"]
        for place in range(1, len(LONG)):
            growth = times[place] / times[place - 1] / (LONG[place] / LONG[place - 1])
            cells.append(f"{times[place]:9.2f} ({growth:4.2f})")
        print(f"{group:5}" + "".join(cells))
    print(f"share_of_step={largest:.4f}")


if __name__ == "__main__":
    main()
