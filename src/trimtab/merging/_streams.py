"""What a merge reads, a piece at a time: no method holds more than a few pieces beside its inputs and its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Elements of a piece: enough that the cost of a call is lost in it, few enough that some pieces stay in the cache of a
# core (measured for TIES: 2^16 and 2^17 are equally fast, 2^14 and 2^19 take a third longer).
PIECE = 1 << 16


@dataclass(frozen=True)
class Inputs:
    """The tensors of one name in all models.

    Attributes:
        tensors: one of each model, flat, all of one length.
        base: that of the base model, flat, or None.
        shape: what the tensors' shape was. A row is the last dimension; a vector is one row.
        seed: of random masks.
        key: the tensors' name; random masks differ from key to key.
    """

    tensors: list[Tensor]
    base: Tensor | None
    shape: torch.Size
    seed: int
    key: str

    @property
    def size(self) -> int:
        """Elements of a tensor."""
        return len(self.tensors[0])

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shape[-1] if self.shape else 1

    def pieces(self, *, whole_rows: bool = False) -> list[slice]:
        """Slices that cover a tensor in order; with `whole_rows` none of them ends inside a row."""
        step = max(1, PIECE // self.width) * self.width if whole_rows else PIECE
        return [slice(start, min(start + step, self.size)) for start in range(0, self.size, step)]

    def vectors(self, piece: slice) -> list[Tensor]:
        """A piece of what each model adds to the base (of the tensors themselves without a base), float32, new."""
        copies = [tensor[piece].to(torch.float32, copy=True) for tensor in self.tensors]
        if self.base is None:
            return copies
        base = self.base[piece].float()
        return [copy.sub_(base) for copy in copies]

    def only(self, index: int) -> Inputs:
        """The same with one model alone."""
        return replace(self, tensors=[self.tensors[index]])

    def stream(self, *, whole_rows: bool = False) -> Iterator[Tensor]:
        """All pieces of the first model's vector, in order, made one at a time."""
        alone = self.only(0)
        return (alone.vectors(piece)[0] for piece in self.pieces(whole_rows=whole_rows))

    def output(self) -> Tensor:
        """An empty flat tensor for the result."""
        return torch.empty_like(self.tensors[0])

    def write(self, output: Tensor, piece: slice, merged: Tensor) -> None:
        """Add the base to a merged piece, cast once, and put it in its place. Changes `merged`."""
        output[piece] = merged if self.base is None else merged.add_(self.base[piece])


def all_finite(tensor: Tensor) -> bool:
    """Whether a flat floating-point tensor has neither NaN nor infinity.

    A sum is finite only if its terms are, and costs a tenth of asking every element; one that overflows is asked again.
    """
    pieces = (tensor[start : start + PIECE].float() for start in range(0, len(tensor), PIECE))
    return all(bool(piece.sum().isfinite()) or bool(piece.isfinite().all()) for piece in pieces)
