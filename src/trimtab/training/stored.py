"""Completions that this run did not just sample: from a file (best of n, a teacher's, anyone's) or its own of before.

They join a prompt's group beside fresh ones, or make it up alone. What they were sampled with does not matter to a
method without importance ratios (gvpo, distill), so no old log-probabilities are kept.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.config import OffPolicySection, RunConfig
from trimtab.errors import InputError
from trimtab.files import read_lines
from trimtab.policy.rollouts import Rollouts, pad_left, pad_right
from trimtab.tasks.problems import Prompts, encode_rows, load_task_rows
from trimtab.training.combinations import learns_from_rewards

logger = logging.getLogger("trimtab")

REPLAY_FILE = "trainer/replay.jsonl"


@dataclass(frozen=True)
class Stored:
    """One completion.

    Attributes:
        ids: its tokens, the end token included unless it was truncated.
        text: what the reward functions read.
        reward: as given or as earned when it was fresh; None: the run's reward functions judge it.
        truncated: whether it lacks its end.
        source: where it comes from, for the log.
    """

    ids: list[int]
    text: str
    reward: float | None
    truncated: bool
    source: str


class StoredCompletions:
    """The completions at hand for each training prompt."""

    def __init__(self, settings: OffPolicySection, given: dict[int, list[Stored]] | None = None) -> None:
        """`given` are those of a file, by the prompt's number among the training prompts."""
        self.settings = settings
        self.given = given or {}
        self.replay: dict[int, list[Stored]] = {}

    def take(self, prompt: int, count: int, seed: int) -> list[Stored]:
        """Up to `count` different completions of a prompt, drawn by the seed."""
        there = [*self.given.get(prompt, []), *self.replay.get(prompt, [])]
        if len(there) <= count:
            return there
        chosen = np.random.default_rng(seed).permutation(len(there))[:count]
        return [there[place] for place in sorted(chosen.tolist())]

    def add(self, prompt: int, fresh: Stored) -> None:
        """Keep a fresh completion for later; the oldest makes room."""
        self.replay[prompt] = [*self.replay.get(prompt, []), fresh][-self.settings.replay :]

    def save(self, folder: Path) -> None:
        """Write the replay buffer into a checkpoint."""
        if not self.settings.replay:
            return
        path = folder / REPLAY_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"prompt": n, **asdict(stored)} for n, own in self.replay.items() for stored in own]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Take the replay buffer of a checkpoint."""
        self.replay = {}
        for line in read_lines(folder / REPLAY_FILE):
            self.replay.setdefault(line.pop("prompt"), []).append(Stored(**line))


def read_stored(config: RunConfig, train: Prompts, tokenizer: Any) -> tuple[Prompts, dict[int, list[Stored]]]:
    """The file's completions by training prompt; rows that cannot be used are counted and named.

    Args:
        config: names the file; its rows become prompts as the training rows do.
        train: the training prompts; a row belongs to the one with the same tokens.
        tokenizer: the student's.

    Returns:
        The training prompts that are left (each once; where nothing is sampled, those with two stored completions),
        and the completions by their number among these.

    Raises:
        InputError: no row can be used, or a column is missing or of the wrong kind.
    """
    settings = config.off_policy
    assert settings is not None and settings.data is not None
    end_id, max_tokens = tokenizer.eos_token_id, config.sampling.max_completion_tokens
    if end_id is None:
        raise InputError("off_policy.data: the tokenizer names no end token, which stored completions need")
    source = settings.data.source
    rows = load_task_rows(settings.data, config.prompt, required=["completion"])
    kept = encode_rows(rows, tokenizer, config.prompt, source=source, limit=None)
    numbers: dict[tuple[int, ...], int] = {}
    for number, ids in enumerate(train.ids):
        numbers.setdefault(tuple(ids), number)
    given: dict[int, list[Stored]] = {}
    unknown = too_long = 0
    for place, row, ids in zip(kept.numbers, kept.rows, kept.ids, strict=True):
        completion, reward = row["completion"], row.get("reward")
        if not isinstance(completion, str):
            raise InputError(f"{source}, row {place}: the completion is a {type(completion).__name__}; it must be text")
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise InputError(f"{source}, row {place}: the reward is {reward!r}; it must be a number, or left out")
        if reward is not None and not math.isfinite(reward):
            raise InputError(f"{source}, row {place}: the reward is {reward}; it must be finite, or left out")
        if reward is None and learns_from_rewards(config) and config.rewards == "none":
            raise InputError(f"{source}, row {place}: no reward, and rewards: none; give one, or name functions")
        truncated = row.get("truncated") or False
        if not isinstance(truncated, bool):
            raise InputError(
                f"{source}, row {place}: truncated is {truncated!r}; it must be true or false, or left out"
            )
        tokens = tokenizer(completion, add_special_tokens=False).input_ids
        tokens = tokens if truncated else [*tokens, end_id]
        number = numbers.get(tuple(ids), -1)
        if number < 0:
            unknown += 1
        elif not 0 < len(tokens) <= max_tokens:
            too_long += 1
        else:
            stored = Stored(tokens, completion, reward, truncated, str(row.get("source") or "file"))
            given.setdefault(number, []).append(stored)
    if unknown or too_long:
        logger.warning(
            "%s: of %d rows %d left out because their prompt is none of the training prompts, and %d that are empty or "
            "longer than sampling.max_completion_tokens",
            source,
            len(kept),
            unknown,
            too_long,
        )
    least = 1 if config.fresh_per_group else 2
    usable = [number for number in sorted(numbers.values()) if len(given.get(number, [])) >= least or least == 1]
    if not given or not usable:
        raise InputError(
            f"{source}: no training prompt has {'a completion' if least == 1 else 'two completions'} there; "
            "off_policy.data needs the prompts of data"
        )
    place_of = {number: place for place, number in enumerate(usable)}
    return train.select(usable), {place_of[number]: own for number, own in given.items() if number in place_of}


def join_rollouts(
    fresh: Rollouts | None, prompt_ids: Sequence[list[int]], extra: Sequence[Sequence[Stored]], *, pad_id: int
) -> Rollouts:
    """Fresh rows first, then every prompt's stored ones, in groups of the same number.

    Args:
        fresh: what was sampled for these prompts; None: nothing.
        prompt_ids: the prompts' tokens.
        extra: each prompt's stored completions.
        pad_id: fills up.

    Returns:
        Rollouts on the processor, without rewards or old log-probabilities; the entropies of stored rows are NaN.
    """
    owners = [number for number, own in enumerate(extra) for _ in own]
    stored = [row for own in extra for row in own]
    ids = [*(fresh.completion_lists() if fresh else []), *(row.ids for row in stored)]
    completion_ids_NT, mask_NT = pad_right(ids, pad_id)
    prompt_ids_PL, prompt_mask_PL = pad_left(prompt_ids, pad_id)
    group_ids_N = torch.tensor([*(fresh.group_ids_N.tolist() if fresh else []), *owners])
    truncated_N = torch.tensor([*(fresh.truncated_N.tolist() if fresh else []), *(row.truncated for row in stored)])
    entropies_NT = torch.zeros(mask_NT.shape).masked_fill(mask_NT, torch.nan)
    if fresh is not None and fresh.entropies_NT is not None:
        rows, width = fresh.entropies_NT.shape
        entropies_NT[:rows, :width] = fresh.entropies_NT.cpu()
    return Rollouts(
        prompt_ids_PL,
        prompt_mask_PL,
        completion_ids_NT,
        mask_NT,
        group_ids_N,
        truncated_N.bool(),
        entropies_NT=entropies_NT,
    )
