"""The one thing that sampling hands to everything else: prompts and completions as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollouts:
    """N completions of P prompts.

    Attributes:
        prompt_ids_PL: prompts, padded on the left.
        prompt_mask_PL: True on real prompt tokens.
        completion_ids_NT: completions, padded on the right.
        mask_NT: True on completion tokens through the first end-of-sequence token, inclusive.
        group_ids_N: which row of `prompt_ids_PL` each completion answers.
        truncated_N: finish reason: True where the length limit ended the row, False where an end token did.
        old_logps_NT: log-probability of each token under the policy that sampled, at its temperature; nats.
        entropies_NT: entropy of the whole distribution at each token, nats.
        rewards_N: weighted sum of the reward parts; NaN where a row is excluded.
        reward_parts: each reward on its own, shape (N,).
    """

    prompt_ids_PL: Tensor
    prompt_mask_PL: Tensor
    completion_ids_NT: Tensor
    mask_NT: Tensor
    group_ids_N: Tensor
    truncated_N: Tensor
    old_logps_NT: Tensor | None = None
    entropies_NT: Tensor | None = None
    rewards_N: Tensor | None = None
    reward_parts: dict[str, Tensor] = field(default_factory=dict)

    def select(self, rows_M: Tensor) -> Rollouts:
        """The given rows (integer index), with prompts that no row needs and padding that no row fills left out."""
        prompts_K, group_ids_M = torch.unique(self.group_ids_N[rows_M], return_inverse=True)
        prompt_mask_KL = self.prompt_mask_PL[prompts_K]
        mask_MT = self.mask_NT[rows_M]
        start = self.prompt_mask_PL.shape[1] - int(prompt_mask_KL.sum(dim=1).max())
        width = int(mask_MT.sum(dim=1).max())

        def rows(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows_M]

        def cells(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows_M, :width]

        return Rollouts(
            prompt_ids_PL=self.prompt_ids_PL[prompts_K, start:],
            prompt_mask_PL=prompt_mask_KL[:, start:],
            completion_ids_NT=self.completion_ids_NT[rows_M, :width],
            mask_NT=mask_MT[:, :width],
            group_ids_N=group_ids_M,
            truncated_N=self.truncated_N[rows_M],
            old_logps_NT=cells(self.old_logps_NT),
            entropies_NT=cells(self.entropies_NT),
            rewards_N=rows(self.rewards_N),
            reward_parts={name: part[rows_M] for name, part in self.reward_parts.items()},
        )

    def to(self, device: torch.device | str) -> Rollouts:
        """The same on another device."""
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **moved, reward_parts={k: v.to(device) for k, v in self.reward_parts.items()})  # type: ignore[arg-type]

    def completion_lists(self) -> list[list[int]]:
        """Completion ids row by row, without padding."""
        lengths = self.mask_NT.sum(dim=1).tolist()
        return [row[:length] for row, length in zip(self.completion_ids_NT.tolist(), lengths, strict=True)]


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, both (rows, longest), padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], dtype=torch.long)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return ids, mask


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, both (rows, longest), padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows], dtype=torch.long)
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return ids, mask
