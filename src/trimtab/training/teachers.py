"""Teachers of a distillation: any causal models, loaded once, frozen, scored on the student's completions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.config import LoadedModelSection, RunConfig
from trimtab.errors import InputError
from trimtab.objectives import find_method
from trimtab.policy.loading import (
    Policy,
    encode_prompt,
    load_configured,
    load_configured_tokenizer,
    uses_chat_template,
)
from trimtab.policy.rollouts import Rollouts, pad_left, pad_right
from trimtab.policy.scorer import Scorer
from trimtab.tasks.prompts import messages_to_text
from trimtab.training.scoring import score_rollouts

logger = logging.getLogger("trimtab")


@dataclass(frozen=True)
class Teacher:
    """A frozen model that scores.

    Attributes:
        name: as configured.
        policy: its model and tokenizer.
        scorer: of its model.
        same_tokens: whether its tokens are the student's, so that every token has a log-probability of its own.
    """

    name: str
    policy: Policy
    scorer: Scorer
    same_tokens: bool

    @property
    def megabytes(self) -> float:
        """Memory of its weights, MiB."""
        return sum(p.numel() * p.element_size() for p in self.policy.model.parameters()) / 2**20

    def score(
        self,
        rollouts: Rollouts,
        prompts: Sequence[str | list[dict[str, str]]],
        texts: Sequence[str | None],
        *,
        temperature: float,
        budget: int,
    ) -> Tensor:
        """Log-probabilities under the teacher, nats.

        With the student's tokens: (N, T), of each token. With other tokens: (N,), of the whole completion, which the
        teacher reads as text behind its own rendering of the prompt. There a row is NaN, so that the objective leaves
        it out and counts it, when it was truncated (its text has no end), has no text, or does not come back from the
        teacher's tokenizer as it was.

        Args:
            rollouts: the student's tokens.
            prompts: each row's prompt as text or messages.
            texts: each row's completion; None where the text is not all that the tokens say.
            temperature: that of sampling.
            budget: padded tokens that run at once.
        """
        if self.same_tokens:
            return score_rollouts(self.scorer, rollouts, temperature=temperature, budget=budget)
        return self._score_texts(rollouts, prompts, texts, temperature, budget)

    def _score_texts(
        self,
        rollouts: Rollouts,
        prompts: Sequence[str | list[dict[str, str]]],
        texts: Sequence[str | None],
        temperature: float,
        budget: int,
    ) -> Tensor:
        tokenizer = self.policy.tokenizer
        # A chat model's tokenizer names the token that ends a turn; its other end tokens end documents.
        end = self.policy.end_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        sums_N = torch.full((len(texts),), torch.nan, device=rollouts.mask_NT.device)
        completions, kept = [], []
        for row, (text, truncated) in enumerate(zip(texts, rollouts.truncated_N.tolist(), strict=True)):
            if text is None or truncated:
                continue
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if tokenizer.decode(ids) == text:
                completions.append([*ids, end])
                kept.append(row)
        if not kept:
            return sums_N
        places: dict[int, int] = {}
        encoded: list[list[int]] = []
        owners = []
        for row in kept:
            # One prompt a group, as the student's: the scorer runs it once for all its completions.
            group = int(rollouts.group_ids_N[row])
            if group not in places:
                places[group] = len(encoded)
                encoded.append(self._encode(prompts[row]))
            owners.append(places[group])
        prompt_ids_PL, prompt_mask_PL = pad_left(encoded, self.policy.pad_id)
        ids_MT, mask_MT = pad_right(completions, self.policy.pad_id)
        own = Rollouts(
            prompt_ids_PL, prompt_mask_PL, ids_MT, mask_MT, torch.tensor(owners), torch.zeros(len(kept)).bool()
        ).to(self.policy.device)
        logps_MT = score_rollouts(self.scorer, own, temperature=temperature, budget=budget)
        sums_N[torch.tensor(kept, device=sums_N.device)] = logps_MT.sum(dim=1).to(sums_N.device)
        return sums_N

    def _encode(self, prompt: str | list[dict[str, str]]) -> list[int]:
        tokenizer = self.policy.tokenizer
        if not isinstance(prompt, str) and not uses_chat_template(tokenizer, "auto"):
            prompt = messages_to_text(prompt)
        return encode_prompt(tokenizer, prompt)


def check_tokenizers(config: RunConfig, tokenizer: Any) -> None:
    """Load the teachers' tokenizers; raise InputError where the token form meets other tokens than the student's."""
    token_form = find_method(config.method["name"]).split(config.method_settings)[0].get("form") == "token"
    for number, section in enumerate(config.teachers):
        with _named(number):
            own = load_configured_tokenizer(section)
        if token_form and not same_tokens(tokenizer, own):
            raise InputError(
                f"teachers.{number}: {section.name} has another tokenizer than the student, so single tokens cannot be "
                "compared; use method.form: sequence"
            )


@contextmanager
def _named(number: int) -> Iterator[None]:
    """An error about a model, told of the teacher that it is."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("model.", f"teachers.{number}.", 1)) from error


def load_teachers(config: RunConfig, student: Policy) -> list[Teacher]:
    """Load every teacher once (two entries of one model share it) and say what they cost.

    Raises:
        InputError: a teacher cannot be loaded.
    """
    loaded: dict[LoadedModelSection, Teacher] = {}
    for number, section in enumerate(config.teachers):
        if section in loaded:
            continue
        with _named(number):
            policy = load_configured(section, device=student.device)
        policy.model.eval().requires_grad_(False)
        same = same_tokens(student.tokenizer, policy.tokenizer)
        loaded[section] = teacher = Teacher(section.name, policy, Scorer(policy.model), same)
        shape = "the student's tokens" if same else "tokens of its own, so whole completions are scored as text"
        logger.info("teacher %s: %.0f MiB, frozen, %s", section.name, teacher.megabytes, shape)
    return [loaded[section] for section in config.teachers]


def whole_texts(tokenizer: Any, completion_ids: Sequence[list[int]], texts: Sequence[str]) -> list[str | None]:
    """The texts that say all that their tokens do; None where a special token inside or half a character is lost.

    Args:
        tokenizer: the student's.
        completion_ids: its tokens, with the end token last.
        texts: the same decoded without special tokens.
    """
    decoded = tokenizer.batch_decode([ids[:-1] for ids in completion_ids])
    return [
        text if text == all_of_it and "\ufffd" not in text else None
        for text, all_of_it in zip(texts, decoded, strict=True)
    ]


def same_tokens(one: Any, other: Any) -> bool:
    """Whether two tokenizers give every id the same piece of text."""
    vocabulary: dict[str, int] = one.get_vocab()
    return vocabulary == other.get_vocab()
