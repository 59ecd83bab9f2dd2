"""Which rows a training step takes, and which of its completions run together.

Whole groups stay in one micro-batch while they fit, so that a prompt runs once for all its completions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trimtab.policy.rollouts import Rollouts
from trimtab.seeds import derive_seed


def step_rows(count: int, per_step: int, step: int, seed: int) -> list[int]:
    """Which rows step 1, 2, ... takes: every pass over the data in an order of its own, computed from the seed."""
    taken = []
    for place in range((step - 1) * per_step, step * per_step):
        epoch, offset = divmod(place, count)
        taken.append((epoch, offset))
    orders = {epoch: _order(count, seed, epoch) for epoch in {e for e, _ in taken}}
    return [orders[epoch][offset] for epoch, offset in taken]


def _order(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_seed(seed, "data order", epoch))
    return torch.randperm(count, generator=generator).tolist()  # type: ignore[no-any-return]


def micro_batches(rollouts: Rollouts, rows_M: Tensor, budget: int) -> Iterator[Tensor]:
    """Split rows into batches of at most `budget` padded tokens, prompts counted once each.

    Groups are ordered by their longest completion, so that rows of like length meet and little is padding; a group that
    does not fit is split by length. A single row that exceeds the budget is a batch of its own.

    Args:
        rollouts: whose rows.
        rows_M: the rows to cover, each once.
        budget: tokens.

    Yields:
        Row indices.
    """
    lengths = rollouts.mask_NT.sum(dim=1).tolist()
    prompt_lengths = rollouts.prompt_mask_PL.sum(dim=1).tolist()
    owner = rollouts.group_ids_N.tolist()
    groups: dict[int, list[int]] = {}
    for row in rows_M.tolist():
        groups.setdefault(owner[row], []).append(row)
    batch: list[int] = []
    prompts: set[int] = set()
    for group in sorted(groups, key=lambda g: (max(lengths[row] for row in groups[g]), g)):
        # First the whole group, and only if that does not fit, row by row.
        whole = sorted(groups[group], key=lambda row: (lengths[row], row))
        pieces = [whole] if _cost(whole, {group}, lengths, prompt_lengths) <= budget else [[row] for row in whole]
        for piece in pieces:
            if batch and _cost(batch + piece, prompts | {group}, lengths, prompt_lengths) > budget:
                yield torch.tensor(batch, device=rows_M.device)
                batch, prompts = [], set()
            batch += piece
            prompts.add(group)
    if batch:
        yield torch.tensor(batch, device=rows_M.device)


def _cost(rows: list[int], prompts: set[int], lengths: list[int], prompt_lengths: list[int]) -> int:
    """Padded tokens of a micro-batch."""
    return len(rows) * max(lengths[row] for row in rows) + len(prompts) * max(prompt_lengths[p] for p in prompts)
