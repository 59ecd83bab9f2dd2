"""Completions as text, whoever samples them: the model in this process, vLLM (vllm.py) or a server (openai.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from trimtab.policy.loading import Policy
from trimtab.policy.sampler import LocalSampler, SamplingParams


@dataclass(frozen=True)
class Prompt:
    """One prompt in both shapes, since servers take text and models take tokens.

    Attributes:
        content: text, or messages with the keys `role` and `content`.
        token_ids: the same, encoded for the model (loading.encode_prompt); None when only a server will see it.
    """

    content: str | list[dict[str, str]]
    token_ids: list[int] | None = None


@dataclass(frozen=True)
class Completion:
    """What was sampled.

    Attributes:
        text: decoded, without special tokens.
        truncated: the length limit ended it.
        tokens: how many, the end token included where the backend counts it; None where a server does not tell.
        token_ids: the end token included.
        logps: log-probability of each token, nats; local and vLLM at the temperature of sampling (1 when greedy) and
            before top-k and top-p, a server as it pleases (most: at temperature 1).
        entropy: mean over the tokens, nats. Like the two above, None where the backend does not tell.
    """

    text: str
    truncated: bool
    tokens: int | None
    token_ids: list[int] | None = None
    logps: list[float] | None = None
    entropy: float | None = None


OnDone = Callable[[int, list[Completion]], None]
"""Called with a prompt's place in the list and its completions; what it saves survives an error after it."""


class Completer(Protocol):
    """Something that completes prompts."""

    def complete(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        seed: int,
        *,
        first_row: int = 0,
        on_done: OnDone | None = None,
    ) -> list[list[Completion]]:
        """n completions of each prompt.

        Args:
            prompts: with token ids, except for a server.
            n: completions a prompt.
            params: how to sample.
            seed: completion j of prompt i is row `first_row` + n i + j, and draws by the seed and its row alone, so
                that neither the neighbours nor an interruption changes it (as far as a server honours seeds).
            first_row: where the first prompt's rows begin in a larger evaluation.
            on_done: called in this thread as soon as a prompt has its completions, in any order.

        Returns:
            A list for each prompt, in order, of n completions.

        Raises:
            InputError: a prompt or a setting cannot be used.
            RunError: the backend failed; what it completed before has been passed to `on_done`.
        """
        ...


def stretches(places: Sequence[int]) -> Iterator[range]:
    """The gap-free stretches of ascending places: what an interrupted evaluation still lacks, one call for each."""
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield range(places[start], places[end - 1] + 1)
            start = end


class LocalCompleter:
    """Completes with the model in this process."""

    def __init__(self, policy: Policy, rows_at_once: int = 512) -> None:
        """`rows_at_once` bounds memory; apart from rounding, nothing depends on it."""
        self.tokenizer = policy.tokenizer
        self.sampler = LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id)
        self.rows_at_once = rows_at_once

    def complete(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        seed: int,
        *,
        first_row: int = 0,
        on_done: OnDone | None = None,
    ) -> list[list[Completion]]:
        """See `Completer`; every field of a completion is filled."""
        ids = prompt_ids(prompts)
        result: list[list[Completion]] = []
        at_once = max(1, self.rows_at_once // n)
        for start in range(0, len(ids), at_once):
            chunk = ids[start : start + at_once]
            rows: list[Completion] = []
            # More than one round only where the samples of a single prompt are too many.
            for sample in range(0, n, self.rows_at_once):
                count = min(self.rows_at_once, n - sample)
                rows += self._sample(chunk, count, params, seed, first_row + start * n + sample)
            for place in range(len(chunk)):
                result.append(rows[place * n : (place + 1) * n])
                if on_done:
                    on_done(start + place, result[-1])
        return result

    def _sample(
        self, ids: Sequence[list[int]], n: int, params: SamplingParams, seed: int, first_row: int
    ) -> list[Completion]:
        rollouts = self.sampler.sample(ids, n, params, seed, first_row=first_row)
        assert rollouts.old_logps_NT is not None and rollouts.entropies_NT is not None
        tokens = rollouts.completion_lists()
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        logps, entropies = rollouts.old_logps_NT.tolist(), rollouts.entropies_NT.tolist()
        return [
            Completion(
                text=text,
                truncated=truncated,
                tokens=len(row),
                token_ids=row,
                logps=row_logps[: len(row)],
                entropy=sum(row_entropies[: len(row)]) / len(row),
            )
            for text, truncated, row, row_logps, row_entropies in zip(
                texts, rollouts.truncated_N.tolist(), tokens, logps, entropies, strict=True
            )
        ]


def prompt_ids(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The token ids of prompts.

    Raises:
        ValueError: a prompt has none, which is the caller's mistake.
    """
    ids = [prompt.token_ids for prompt in prompts if prompt.token_ids]
    if len(ids) < len(prompts):
        raise ValueError("a model completes token ids, and a prompt has none: encode it with encode_prompt")
    return ids
