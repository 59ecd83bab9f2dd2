"""Compare the vLLM backend with the local one and with the scorer on the built-in model; needs vLLM.

    python scripts/prove_vllm.py [--dtype float32] [--prompts 16]

Greedy completions of the two backends are compared token by token, and vLLM's log-probabilities of the tokens it
sampled with those that `Scorer` gives the same tokens. Prints what it finds; exit code 1 where they differ by more than
rounding.
"""

import argparse
import sys

import torch

from trimtab.policy.completions import Completion, LocalCompleter, Prompt
from trimtab.policy.loading import encode_prompt, load_policy
from trimtab.policy.rollouts import Rollouts, pad_left, pad_right
from trimtab.policy.sampler import SamplingParams
from trimtab.policy.scorer import Scorer
from trimtab.policy.vllm import VllmCompleter
from trimtab.tasks.arithmetic import make_rows

MODEL = "builtin:arithmetic-varied"
SAMPLES = 4


def rollouts_of(prompts: list[Prompt], completions: list[list[Completion]]) -> Rollouts:
    """The same tokens as the scorer takes them."""
    rows = [completion for group in completions for completion in group]
    ids = [prompt.token_ids for prompt in prompts if prompt.token_ids]
    prompt_ids_PL, prompt_mask_PL = pad_left(ids, 0)
    completion_ids_NT, mask_NT = pad_right([row.token_ids or [] for row in rows], 0)
    return Rollouts(
        prompt_ids_PL=prompt_ids_PL,
        prompt_mask_PL=prompt_mask_PL,
        completion_ids_NT=completion_ids_NT,
        mask_NT=mask_NT,
        group_ids_N=torch.arange(len(prompts)).repeat_interleave(len(completions[0])),
        truncated_N=torch.tensor([row.truncated for row in rows]),
    )


def largest_difference(
    scorer: Scorer, prompts: list[Prompt], completions: list[list[Completion]], temperature: float
) -> tuple[float, int]:
    """(largest difference of a log-probability in nats, tokens compared)."""
    rollouts = rollouts_of(prompts, completions)
    with torch.no_grad():
        logps_NT, _ = scorer.score(rollouts, temperature=temperature)
    told = torch.tensor([logp for group in completions for row in group for logp in row.logps or []])
    return float((logps_NT[rollouts.mask_NT] - told).abs().max()), told.numel()


def main() -> int:
    """Run both backends and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.2)
    arguments = parser.parse_args()
    policy = load_policy(MODEL, dtype=arguments.dtype)
    texts = [row["prompt"] for row in make_rows(arguments.prompts, seed=1)]
    prompts = [Prompt(text, encode_prompt(policy.tokenizer, text)) for text in texts]
    local, scorer = LocalCompleter(policy), Scorer(policy.model)
    # Eager: compiling costs more than these few tokens.
    vllm = VllmCompleter(
        MODEL,
        dtype=arguments.dtype,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        enforce_eager=True,
        rows_at_once=32,
    )
    # Rounding: a near tie may fall to the other side, and everything after it then differs.
    allowed = {"float32": 1e-3}.get(arguments.dtype, 0.3)
    failures = 0

    def check(what: str, holds: bool) -> None:
        nonlocal failures
        failures += not holds
        print(f"{'ok ' if holds else 'NOT'} {what}")

    greedy = SamplingParams(temperature=0, max_tokens=120)
    ours, theirs = (completer.complete(prompts, 1, greedy, 0) for completer in (local, vllm))
    same = sum(a[0].token_ids == b[0].token_ids for a, b in zip(ours, theirs, strict=True))
    check(f"greedy: {same} of {len(prompts)} completions have the same tokens", same >= 0.9 * len(prompts))
    texts_agree = all(
        a[0].text == b[0].text for a, b in zip(ours, theirs, strict=True) if a[0].token_ids == b[0].token_ids
    )
    check("greedy: equal tokens are decoded to equal text and end for the same reason", texts_agree)
    difference, tokens = largest_difference(scorer, prompts, theirs, 1.0)
    check(
        f"greedy: log-probabilities differ from the scorer's by {difference:.1e} at most ({tokens} tokens)",
        difference < allowed,
    )

    for temperature in (1.0, 0.6):
        params = SamplingParams(temperature=temperature, max_tokens=120)
        first = vllm.complete(prompts, SAMPLES, params, 7)
        difference, tokens = largest_difference(scorer, prompts, first, temperature)
        check(
            f"temperature {temperature}: log-probabilities differ by {difference:.1e} at most ({tokens} tokens)",
            difference < allowed,
        )
        rows = [row for group in first for row in group]
        ended = [row for row in rows if not row.truncated]
        check(
            f"temperature {temperature}: {len(ended)} of {len(rows)} completions ended, each with its end token",
            bool(ended) and all((row.token_ids or [0])[-1] in policy.end_ids for row in ended),
        )
        distinct = sum(len({row.text for row in group}) for group in first)
        check(
            f"temperature {temperature}: {distinct} of {len(rows)} completions are unlike the others of their prompt",
            distinct > len(prompts),
        )
        half = len(prompts) // 2
        rest = vllm.complete(prompts[half:], SAMPLES, params, 7, first_row=half * SAMPLES)
        again = sum(
            a.token_ids == b.token_ids
            for x, y in zip(rest, first[half:], strict=True)
            for a, b in zip(x, y, strict=True)
        )
        check(
            f"temperature {temperature}: {again} of {len(rest) * SAMPLES} completions come again after an interruption",
            again >= 0.9 * len(rest) * SAMPLES,
        )

    short = vllm.complete(prompts, 1, SamplingParams(max_tokens=3, top_p=0.9, top_k=40), 0)
    check(
        "three tokens: all are truncated, and top-p leaves no log-probabilities",
        all(group[0].truncated and group[0].tokens == 3 and group[0].logps is None for group in short),
    )
    vllm.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
