"""What the search asks of a model: continue token prefixes, and score a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """Continuations to sample.

    Attributes:
        prompt_ids: the question.
        prefix_ids: the start of the completion; never holds an end token.
        banned: a token that the first sampled token must not be: it is drawn from the rest, renormalised.
        first: number of the first continuation.
        count: how many continuations.
        seed: continuation `first` + i draws by the seed and its own number alone, never by its neighbours.
    """

    prompt_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    banned: int | None
    first: int
    count: int
    seed: int


@dataclass(frozen=True)
class Continuation:
    """What was sampled behind a prefix.

    Attributes:
        token_ids: without the prefix, the end token included.
        truncated: the cap on the completion's total length ended it.
    """

    token_ids: tuple[int, ...]
    truncated: bool


class SearchPolicy(Protocol):
    """A model with its sampler settings, on token ids.

    Attributes:
        identity: what decides its distribution: model fingerprint, tokenizer hash, temperature, top-p, top-k, cap on
            the completion's total length. Stored results belong to one identity.
        prefilled_tokens: tokens of prompts and prefixes that were computed so far, by both verbs.
    """

    identity: dict[str, Any]
    prefilled_tokens: int

    def sample(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        """Finished continuations; the cap is on prefix and continuation together."""
        ...

    def score(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[float]]:
        """Log-probability of each token of each (prompt ids, completion ids), nats.

        Under the distribution that `sample` draws from: after temperature, top-k and top-p.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        ...
