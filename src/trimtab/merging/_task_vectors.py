"""Methods that trim what each model adds to the base, let the models elect a sign, and add the rest to the base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trimtab.merging._combinations import shares
from trimtab.merging._streams import Inputs
from trimtab.merging._trims import Kind, Rescale, kept_count, make_trim
from trimtab.merging.selection import Cut, find_cuts, mask_maker


def merge_task_vectors(
    inputs: Inputs,
    *,
    kind: Kind,
    elect: bool,
    weights: list[float],
    density: list[float],
    normalize: bool,
    rescale: Rescale,
    lambda_: float,
    gamma: Sequence[float] = (),
    epsilon: Sequence[float] = (),
) -> Tensor:
    """base + λ · (sum or consensus of the trimmed wᵢ τᵢ).

    Args:
        inputs: what is merged; has a base.
        kind: which elements of τ survive, see `make_trim`.
        elect: keep, element by element, only the τ whose sign is that of Σ wᵢ τᵢ (TIES). Where that sum is 0 nothing is
            kept.
        weights: of each model. Under an election a negative one turns its τ round and counts with its size.
        density: of each model; at 1 its τ is left as it is, bit for bit, at 0 it is zero.
        normalize: divide by Σ wᵢ, under an election by Σ |wᵢ| of the models that were kept there.
        rescale: give what survives the size of the whole, see `make_trim`.
        lambda_: of the merged τ.
        gamma: of each model, for `outliers`.
        epsilon: of each model, for `rank`.
    """
    count = len(weights)
    trims = [
        make_trim(inputs.only(index), index, kind, rescale, density=one_density, gamma=one_gamma, epsilon=one_epsilon)
        for index, (one_density, one_gamma, one_epsilon) in enumerate(
            zip(density, gamma or [0.0] * count, epsilon or [0.0] * count, strict=True)
        )
    ]
    added = shares(weights) if normalize and not elect else weights
    output = inputs.output()
    for piece in inputs.pieces(whole_rows=kind == "rank"):
        vectors = [trim(vector) for trim, vector in zip(trims, inputs.vectors(piece), strict=True)]
        merged = torch.zeros_like(vectors[0])
        for vector, weight in zip(vectors, added, strict=True):
            merged.add_(vector, alpha=weight)
        if elect:
            merged = agreeing(vectors, weights, merged.sign_(), normalize=normalize)
        inputs.write(output, piece, merged.mul_(lambda_))
    return output


def agreeing(vectors: list[Tensor], weights: list[float], sign: Tensor, *, normalize: bool) -> Tensor:
    """Sum or weighted mean of those wᵢ τᵢ that have the elected sign, element by element.

    Args:
        vectors: τ of each model; changed.
        weights: of each model.
        sign: −1, 0 or 1; changed. Where it is 0, so is the result.
        normalize: the mean, with weights |wᵢ|, instead of the sum.

    Returns:
        A new tensor of the same shape.
    """
    merged = torch.zeros_like(sign)
    total = torch.zeros_like(sign)
    for vector, weight in zip(vectors, weights, strict=True):
        along = vector.mul_(sign if weight >= 0 else -sign).clamp_(min=0)
        merged.add_(along, alpha=abs(weight))
        if normalize:
            total.add_(along.sign_(), alpha=abs(weight))
    if normalize:
        # Where nobody agrees `merged` is 0, whatever it is divided by.
        merged.div_(total.clamp_(min=min((abs(weight) for weight in weights if weight), default=1.0)))
    return merged.mul_(sign)


def sce(inputs: Inputs, *, select_topk: float) -> Tensor:
    """Select, calculate, erase: arXiv 2408.07990, section 3.

    Of the elements whose variance over the models is not 0, the `select_topk` of largest variance are kept; a model's
    weight is the mean of its squared τ over the tensor; the sign of Σ τ is elected, and the others are left out of the
    weighted mean.
    """
    pieces = inputs.pieces()

    def variances() -> Iterable[Tensor]:
        return (_variance(inputs.vectors(piece)) for piece in pieces)

    cut = Cut(0.0, 0, 0)
    if select_topk < 1:
        varied = sum(int(variance.count_nonzero()) for variance in variances())
        (cut,) = find_cuts(variances, [kept_count(select_topk, varied)])

    def selected() -> Iterable[list[Tensor]]:
        mask = mask_maker(cut)
        for piece in pieces:
            vectors = inputs.vectors(piece)
            if select_topk < 1:
                kept = mask(_variance(vectors))
                vectors = [vector.mul_(kept) for vector in vectors]
            yield vectors

    squares = [0.0] * len(inputs.tensors)
    for vectors in selected():
        squares = [done + _square(vector) for done, vector in zip(squares, vectors, strict=True)]
    weights = shares(squares) if sum(squares) else [1.0] * len(squares)
    output = inputs.output()
    for piece, vectors in zip(pieces, selected(), strict=True):
        sign = _total(vectors).sign_()
        inputs.write(output, piece, agreeing(vectors, weights, sign, normalize=True))
    return output


def _total(vectors: list[Tensor]) -> Tensor:
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total.add_(vector)
    return total


def _square(vector: Tensor) -> float:
    wide = vector.double()
    return wide.dot(wide).item()


def _variance(vectors: list[Tensor]) -> Tensor:
    """Over the models, element by element; `Tensor.var` over a first dimension of a few rows is 30 times slower."""
    mean = _total(vectors).div_(len(vectors))
    variance = torch.zeros_like(mean)
    for vector in vectors:
        difference = vector - mean
        variance.addcmul_(difference, difference)
    return variance.div_(len(vectors))
