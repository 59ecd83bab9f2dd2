"""One tensor of a merge: where it comes from, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.merging.models import OpenModel


@dataclass(frozen=True)
class Input:
    """A tensor of a model."""

    model: OpenModel
    tensor: str


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the output.

    Attributes:
        name: its name.
        inputs: what is merged, the base not among them.
        base: the base model's tensor, or None.
        settings: keywords of `merge_tensors`.
        shape: of the result.
        dtype: of the result.
        in_vocabulary: whether its rows are tokens that move to other rows.
    """

    name: str
    inputs: tuple[Input, ...]
    base: Input | None
    settings: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    in_vocabulary: bool

    @property
    def all_inputs(self) -> list[Input]:
        """The inputs, the base last."""
        return [*self.inputs, *([self.base] if self.base else [])]

    @property
    def elements(self) -> int:
        """Of the result."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Of the result."""
        return self.elements * self.dtype.itemsize

    @property
    def memory(self) -> int:
        """Bytes that merging it holds at once: inputs, a float32 copy of the first where the dtype changes, result."""
        held = 0
        for place, one in enumerate(self.all_inputs):
            stored = one.model.stored(one.tensor)
            wide = one.model.is_changed(one.tensor) or (place == 0 and stored.dtype != self.dtype)
            held += stored.bytes + (4 * torch.Size(stored.shape).numel() if wide else 0)
            held += stored.bytes if self.in_vocabulary else 0
        return held + self.bytes
